// Package console drives the console in headless Chromium, against a real server with simulated engines, faults and
// subscribers. Chromium speaks its DevTools protocol over a pipe, so that no library and no port is needed.
package console

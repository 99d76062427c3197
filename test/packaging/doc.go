// Package packaging tests what distributions of kvcast need: the systemd unit, and installation as a Go module.
package packaging

// Package tunnel runs the commands of docs/tunnels.md, on one host: kvcast, a simulated engine, and mutual TLS between them by ghostunnel, which
// make tunnels builds.
package tunnel

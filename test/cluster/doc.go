// Package cluster runs several kvcast serve that share a stream of three NATS servers, and kills, pauses and isolates them. It
// checks that every worker is taken over, that no two servers append for a worker at the same time, and that no router
// loses, or gets twice, an entry.
package cluster

// Package simulator simulates engines: it publishes KV-cache events as vLLM does.
//
// A seed and a few sizes, or a trace of requests, flow in. The batches of an engine with a bounded
// block pool flow out over real ZeroMQ sockets: a PUB socket with seqs from 0, and a ROUTER socket
// that replays the last batches. The same input produces the same events. The contents of the pool
// are known at each batch, so that a view of them can be verified.
//
// Engine runs on its own; Faults injects faults, at random from a seed and at chosen batches.
// Publisher has the same sockets and publishes on request, faults included.
package simulator

// Package simulator simulates engines: it publishes KV-cache events as vLLM does.
//
// A seed and a few sizes, or a trace of requests, flow in. The batches of an engine with a bounded
// block pool flow out over ZeroMQ sockets: a PUB socket with seqs from 0, and a ROUTER socket that
// replays the last batches. The same input produces the same events. Tests can compare a router's
// view with the contents of the pool after each batch.
//
// Engine publishes a workload; Faults injects faults at random and at chosen batches. Publisher has
// the same sockets, and publishes the batches and faults that its caller requests.
package simulator

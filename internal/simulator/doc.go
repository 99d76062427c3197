// Package simulator stands in for engines: it publishes KV-cache events as vLLM
// does.
//
// A seed and a few sizes flow in, or a trace of requests; what flows out, over real
// ZeroMQ sockets, are the batches of an engine with a bounded block pool: a PUB
// socket with seqs from 0, and a ROUTER socket that replays the last batches. The
// same input gives the same events. What the pool holds is known at each batch, so
// that a view of it can be judged.
//
// Engine runs by itself, and Faults is what goes wrong on its way, by odds from a
// seed and at chosen batches. Publisher has the same sockets and publishes what its
// user chooses, faults included.
package simulator

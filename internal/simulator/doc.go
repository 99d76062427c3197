// Package simulator stands in for engines: it publishes KV-cache events as vLLM
// does.
//
// A seed and a few sizes flow in; what flows out, over real ZeroMQ sockets, are
// the batches of an engine with a bounded block pool under a conversation
// workload: a PUB socket with seqs from 0, and a ROUTER socket that replays the
// last batches. The same seed gives the same events. What the pool holds in the
// end is known, so that a view of it can be judged.
//
// Engine runs by itself. Publisher has the same sockets and publishes what its
// user chooses, faults included.
package simulator

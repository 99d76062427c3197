// Package bench measures kvcast as it is run: the program as a process of its
// own, engines' batches flowing in over ZeroMQ, entries flowing out over gRPC,
// all on this machine's loopback.
//
// What flows out are the CPU time of that process alone for each batch, delivery
// or block, and what nothing of its kind can well be below, measured in the same
// run. CPU time is the figure to compare: on a machine that does something else
// beside, it moves little, while wall rates are shared with the publisher, the
// subscribers and whoever else there is.
//
// The guarantee: no figure is reported of work that was not done. Every batch is
// counted where it is sent, by the server's own metrics, and at every
// subscriber; a batch that is lost, doubled or refused fails the benchmark.
//
// The benchmarks are in the tests. The package itself is what they need of C:
// a bare libzmq receiver, and a pause and a clock that are exact.
package bench

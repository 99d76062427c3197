// Package bench measures kvcast as deployed: the program in a process of its own, engines' batches
// flowing in over ZeroMQ, entries flowing out over gRPC, all on this machine's loopback.
//
// It reports the CPU time of that process alone per batch, delivery or block, and a floor, measured
// in the same run, that no implementation is likely to beat. Compare CPU time: it varies little on
// a busy machine, while wall-clock rates depend on the publisher, the subscribers and other
// processes. BenchmarkServerToRelay reports the ratio to a bare relay from libzmq to gRPC, which has no
// block table, journal or index.
//
// The guarantee: no figure is reported for work that was not done. Every batch is counted where it
// is sent, by the server's own metrics, and at every subscriber; a lost, duplicate or rejected
// batch fails the benchmark.
//
// The benchmarks are in the tests. The package itself contains the C code that they need: a bare
// libzmq receiver, and a precise pause and ticker. Without cgo only the benchmarks remain that need no
// publisher, because engines publish with libzmq.
package bench

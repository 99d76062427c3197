// Package interop tests the native transport with other implementations of ZeroMQ as peers: libzmq,
// by itself and in Python, go-zeromq, JeroMQ, and the Rust crate zeromq. `make peers` prepares those
// that are not written in Go; without it, their tests are skipped.
//
// A peer is a process, so that it can be stopped and killed. It is started with four arguments: pub
// or router, bind or connect, an endpoint, and the interval of its heartbeats in milliseconds, 0 for
// none. It writes the endpoint that it is bound to as a line.
//
// A publisher then publishes a message for each line of its input, and writes a line. The words of
// the line are the first frame, and the sizes in bytes of the other frames. Byte i of a frame is
// i modulo 251.
//
// A router answers each request, whose last frame is a seq, as engines do: with the batches from it
// to 99, whose payloads have as many bytes as their seq, and an end marker.
package interop

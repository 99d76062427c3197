// Package zmtp implements the framing and the handshake of ZMTP 3.0 and 3.1 with the NULL mechanism (RFC 23 and RFC 37), without I/O.
//
// A Session is one side of one connection. The bytes that a peer sends flow in; messages, subscriptions and the bytes to send flow out. A
// Session has no socket, clock, goroutine or lock: the caller reads, writes, and passes the time.
//
// Whatever a peer sends ends in an event or in an *Error. A Session keeps no copy of a message, and its own memory is bounded. Limits bound
// the frames and bytes of a message, so that the caller's read buffer is bounded too.
package zmtp

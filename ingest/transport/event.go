package transport

// EventKind is the kind of an Event.
type EventKind int

// The kinds of events.
const (
	// Accepted is a connection that a peer made to a bound socket.
	Accepted EventKind = iota + 1
	// HandshakeSucceeded is a connection that is ready for messages.
	HandshakeSucceeded
	// HandshakeFailed is a peer that does not speak ZMTP, or that rejected the connection.
	HandshakeFailed
	// ConnectFailed is a connection that could not be made.
	ConnectFailed
	// Disconnected is a connection that was closed.
	Disconnected
)

// Event is an event of a connection.
type Event struct {
	Kind EventKind
	// FD is the connection's file descriptor, for Accepted and Disconnected.
	FD int
}

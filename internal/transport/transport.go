// Package transport defines how package ingest receives from engines, and requests replays.
//
// In: endpoints. A Transport connects or binds SUB sockets, and Requests send requests to replay sockets. Out: a Receiver has the messages
// of a socket in the order in which each connection delivered them, and the events of the connections among them.
//
// Package libzmq implements Transport with libzmq, package native in Go. Package enginegrpc has Receivers of engines that are read by gRPC.
package transport

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
)

const (
	// KeptFrames is how many frames of a message are kept: one more than an engine's messages and replies have.
	KeptFrames = 4
	// MaxPayloadBytes is the length of the longest payload. It is more than ten times the
	// largest batch of an engine: a step that stores 128 K tokens takes some 700 KB.
	MaxPayloadBytes = 8 << 20
	// ConnectTimeout is how long a connection attempt may take.
	ConnectTimeout = 5 * time.Second

	// KeepaliveIdle is the silence after which TCP probes the peer. With KeepaliveInterval and
	// KeepaliveCount, the system detects a dead peer within a minute.
	KeepaliveIdle = 30 * time.Second
	// KeepaliveInterval is the time between two probes.
	KeepaliveInterval = 10 * time.Second
	// KeepaliveCount is how many probes in a row remain unanswered.
	KeepaliveCount = 3
)

var (
	// ErrInterrupted is returned by Receiver.Next after a call of Interrupt.
	ErrInterrupted = errors.New("receiver was interrupted")
	// ErrEnded is returned by Receiver.Next after the end of the only connection.
	ErrEnded = errors.New("connection has ended")
	// ErrLost is the error of a connection after which the next one cannot continue: batches were lost, or the engine restarted.
	ErrLost = errors.New("batches were lost")
	// ErrTooLong is the error of a message above the limit, and of the end of a connection because of one.
	ErrTooLong = errors.New("message is too long")
)

// TooLong returns the ErrTooLong of a payload of a number of bytes.
func TooLong(bytes int) error {
	return fmt.Errorf("%w: %d bytes, want at most %d", ErrTooLong, bytes, MaxPayloadBytes)
}

// Transport makes Receivers. It is safe for concurrent use.
//
// onDrop is called with the number of messages that a Receiver had to drop; nil for nothing.
type Transport interface {
	// Subscribe connects a SUB socket to an endpoint, once, in the background, and subscribes to the topics with a prefix.
	Subscribe(endpoint, topic string, onDrop func(n int)) (Receiver, error)
	// Bind binds a SUB socket for all topics. It returns the socket's endpoint, with the port that the system chose if the given one has none.
	// A peer that sends a frame of more than MaxPayloadBytes is disconnected.
	Bind(endpoint string, onDrop func(n int)) (l Listener, bound string, err error)
	// Request connects a DEALER socket to an endpoint, once, in the background, and sends a message.
	Request(endpoint string, onDrop func(n int), frames ...[]byte) (Receiver, error)
	// Close releases the transport. All Receivers must be closed before.
	Close() error
}

// FrameRequester sends requests whose replies are not bounded by KeptFrames and MaxPayloadBytes. It is safe for concurrent use.
type FrameRequester interface {
	// RequestFrames does what Transport.Request does, except that each frame of a reply is a message of its own,
	// as soon as it has arrived. A frame has at most MaxPayloadBytes. Nothing is dropped.
	RequestFrames(endpoint string, frames ...[]byte) (Receiver, error)
}

// Receiver is a socket that receives. One goroutine calls Next and Recycle; the other methods are safe for concurrent use.
type Receiver interface {
	// Next waits for the next chunk, which the caller must pass to Recycle. It returns os.ErrDeadlineExceeded when the time that deadline
	// returns has passed; the zero time means never. After Interrupt it returns what has arrived before, and then ErrInterrupted. After the
	// end of the connection of a socket that has connected it returns ErrEnded.
	Next(deadline func() time.Time) (*Chunk, error)
	// Recycle releases the memory of a chunk.
	Recycle(c *Chunk)
	// Wake makes Next call its deadline function again.
	Wake()
	// Interrupt ends receiving.
	Interrupt()
	// Close ends receiving, and releases the socket. No call of Next may be in progress.
	Close() error
}

// Listener is the Receiver of a bound socket.
type Listener interface {
	Receiver
	// Suspend closes all connections, and each new one, until Resume is called. It does not wait for a call of Next, so that it
	// ends connections whose messages are not processed. The port stays open, so that no other process gets it.
	Suspend()
	// Resume ends what Suspend has begun, unless it returns an error. Then it may be called again.
	Resume() error
}

// Message is a message.
type Message struct {
	// Frames are the first KeptFrames frames, or all if there are fewer. They are valid until the chunk is recycled, and must not be changed.
	Frames [][]byte
	// Count is the number of all frames; 0 for a dropped message.
	Count int
	// More reports whether the message is a frame of a message with further frames: see FrameRequester.
	More bool
	// Conn is the message's connection, as in its events; -1 if it is unknown.
	Conn int
	// Foreign reports whether the message is of a dp rank that its source does not have.
	Foreign bool
	// Partial reports whether the message begins with a clear, after which its publisher does not list all blocks.
	Partial bool
	// Peer is the address of the connection's peer. It is set for bound sockets, and invalid if the peer has no IP address.
	Peer netip.Addr
}

// Bytes returns the size of the frames.
func (m Message) Bytes() (n int) {
	for _, f := range m.Frames {
		n += len(f)
	}
	return n
}

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of events.
const (
	// Connected is a connection that can receive.
	Connected EventKind = iota + 1
	// Disconnected is the end of a connection that was Connected.
	Disconnected
	// Failed is a connection that was not made.
	Failed
)

// Event is an event of a connection.
type Event struct {
	Kind EventKind
	// Conn identifies the connection until it is Disconnected.
	Conn int
	// Resumed reports whether the peer of a new connection was asked to begin with the last batch that was read, and did not refuse.
	Resumed bool
	// Err is why a connection has ended or failed; nil if that is unknown.
	Err error
	// Before is the index of the first message of the chunk that arrived after the event.
	Before int
}

// Chunk is messages in the order in which they arrived, and what happened between and after them.
type Chunk struct {
	Messages []Message
	Events   []Event
	// Drops are the messages that were dropped after the others; nil if there are none.
	Drops *Drops
	// Private is the Receiver's own.
	Private any
}

// Each calls event with each event and message with each message that was not dropped, in their order. It returns the number of messages.
func (c *Chunk) Each(event func(Event), message func(Message)) (messages int) {
	events := c.Events
	for i, m := range c.Messages {
		for ; len(events) > 0 && events[0].Before <= i; events = events[1:] {
			event(events[0])
		}
		if m.Count > 0 {
			message(m)
			messages++
		}
	}
	for _, e := range events {
		event(e)
	}
	return messages
}

// Await implements Receiver.Next: pop returns the next chunk or an error, or neither while
// there is none, and wake receives a value when either may have changed.
func Await(wake <-chan struct{}, deadline func() time.Time, pop func() (*Chunk, error)) (*Chunk, error) {
	for {
		c, err := pop()
		if c != nil || err != nil {
			return c, err
		}
		var due <-chan time.Time
		if at := deadline(); !at.IsZero() {
			wait := time.Until(at)
			if wait <= 0 {
				return nil, os.ErrDeadlineExceeded
			}
			due = time.After(wait)
		}
		select {
		case <-wake:
		case <-due:
		}
	}
}

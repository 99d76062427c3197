package transport

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

// EventKind is what happened to a connection.
type EventKind int

// What happens, and the Value of each event.
const (
	// Connected: a connection was made; its file descriptor.
	Connected EventKind = iota + 1
	// ConnectDelayed: a connection is being made; the errno, EINPROGRESS.
	ConnectDelayed
	// ConnectRetried: a connection failed and is tried again; in how many
	// milliseconds.
	ConnectRetried
	// Listening: the socket is bound; the file descriptor.
	Listening
	// Accepted: a peer connected; the connection's file descriptor.
	Accepted
	// AcceptFailed: a peer's connection could not be accepted; the errno.
	AcceptFailed
	// HandshakeSucceeded: messages can flow; 0.
	HandshakeSucceeded
	// HandshakeFailed: the peer does not talk as ZeroMQ does, or refused; an errno,
	// a protocol error, or a status of authentication.
	HandshakeFailed
	// Disconnected: a connection broke; what its file descriptor was.
	Disconnected
	// Closed: a connection that was not made yet, or a bound one, is closed; what
	// its file descriptor was.
	Closed
	// Stopped: the last event there is.
	Stopped
)

// kinds maps libzmq's events.
var kinds = map[zmq4.Event]EventKind{
	zmq4.EVENT_CONNECTED:                  Connected,
	zmq4.EVENT_CONNECT_DELAYED:            ConnectDelayed,
	zmq4.EVENT_CONNECT_RETRIED:            ConnectRetried,
	zmq4.EVENT_LISTENING:                  Listening,
	zmq4.EVENT_ACCEPTED:                   Accepted,
	zmq4.EVENT_ACCEPT_FAILED:              AcceptFailed,
	zmq4.EVENT_HANDSHAKE_SUCCEEDED:        HandshakeSucceeded,
	zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL: HandshakeFailed,
	zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL:  HandshakeFailed,
	zmq4.EVENT_HANDSHAKE_FAILED_AUTH:      HandshakeFailed,
	zmq4.EVENT_DISCONNECTED:               Disconnected,
	zmq4.EVENT_CLOSED:                     Closed,
	zmq4.EVENT_MONITOR_STOPPED:            Stopped,
}

// monitored is all of them.
var monitored = func() (all zmq4.Event) {
	for e := range kinds {
		all |= e
	}
	return all
}()

// String returns the kind's name.
func (k EventKind) String() string {
	names := [...]string{
		Connected: "connected", ConnectDelayed: "connect delayed", ConnectRetried: "connect retried",
		Listening: "listening", Accepted: "accepted", AcceptFailed: "accept failed",
		HandshakeSucceeded: "handshake succeeded", HandshakeFailed: "handshake failed",
		Disconnected: "disconnected", Closed: "closed", Stopped: "stopped",
	}
	if k < Connected || k > Stopped {
		return strconv.Itoa(int(k))
	}
	return names[k]
}

// Event is what a Monitor tells.
type Event struct {
	Kind EventKind
	// Address is the endpoint that was connected to or, of a bound socket, its own:
	// never the peer that was accepted.
	Address string
	// Value is what Kind says.
	Value int
}

// Monitor tells what happens to the connections of a socket. It has two sockets
// of its own in the same context, of which ZMQ_MAX_SOCKETS must allow so many more:
// one that libzmq's I/O threads write to and one that is read here.
//
// The queue between them is unbounded, as those threads would wait for room, and
// with them all sockets of the context. Events are few and small, some 200 bytes
// each, but a monitor must be read.
//
// One goroutine at a time may Wait; the rest is for any, while that waits too.
type Monitor struct {
	watched *zmq4.Socket
	socket  *Socket

	mu      sync.Mutex // guards what libzmq has of socket, and stopped
	stopped bool
}

// monitors counts those that there ever were, to name the next.
var monitors atomic.Uint64

// errWatching tells that a monitor can not be closed yet.
var errWatching = errors.New("the socket it watches is open")

// NewMonitor returns a monitor of a socket, which should not be connected or bound
// yet for no event to be missed. A socket has one monitor at most. It must be
// closed, after the socket is.
func NewMonitor(watched *zmq4.Socket) (*Monitor, error) {
	zctx, err := watched.Context()
	if err != nil {
		return nil, fmt.Errorf("monitor socket: %w", err)
	}
	end, err := zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return nil, fmt.Errorf("create monitor's socket: %w", err)
	}
	address := "inproc://kvcast-monitor-" + strconv.FormatUint(monitors.Add(1), 10)
	m := &Monitor{watched: watched}
	err = errors.Join(end.SetLinger(0), end.SetRcvhwm(0))
	if err == nil {
		m.socket, err = Open(end)
	}
	if err == nil {
		m.socket.ready = m.ready
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open monitor's socket: %w", err), end.Close())
	}
	if err := watched.Monitor(address, monitored); err != nil {
		return nil, errors.Join(fmt.Errorf("monitor socket: %w", err), unhook(watched), m.socket.Close())
	}
	if err := end.Connect(address); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to monitor: %w", err), unhook(watched), m.socket.Close())
	}
	return m, nil
}

// ready looks whether there is an event, while others may read them.
func (m *Monitor) ready(fd uintptr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.socket.receivable(fd)
}

// Wait blocks until there is an event, as Socket.Wait does.
func (m *Monitor) Wait() error { return m.socket.Wait() }

// SetDeadline sets when Wait ends, as Socket.SetDeadline does.
func (m *Monitor) SetDeadline(t time.Time) error { return m.socket.SetDeadline(t) }

// Interrupt ends Wait, now and later.
func (m *Monitor) Interrupt() { m.socket.Interrupt() }

// Next returns the next event, and whether there is one now. None follows
// Stopped.
func (m *Monitor) Next() (Event, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.next()
}

func (m *Monitor) next() (Event, bool, error) {
	for {
		kind, address, value, err := m.socket.zmq.RecvEvent(zmq4.DONTWAIT)
		switch {
		case err == nil:
			m.stopped = m.stopped || kind == zmq4.EVENT_MONITOR_STOPPED
			return Event{Kind: kinds[kind], Address: address, Value: value}, true, nil
		case errors.Is(err, zmq4.Errno(syscall.EINTR)):
		case errors.Is(err, zmq4.Errno(syscall.EAGAIN)):
			return Event{}, false, nil
		default:
			return Event{}, false, fmt.Errorf("read monitor: %w", err)
		}
	}
}

// Stop ends the events: Stopped is the last. It is for the goroutine that has the
// socket, before it closes that; Socket.Close does the same.
func (m *Monitor) Stop() error { return unhook(m.watched) }

// Close closes the monitor, and fails before it was stopped: libzmq's I/O threads
// wait for ever to write to a monitor that is gone. What was not read is lost.
// Closing again does nothing.
func (m *Monitor) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for !m.stopped {
		_, ok, err := m.next()
		if errors.Is(err, zmq4.ETERM) {
			break // the context's end has stopped it
		}
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("close monitor: %w", errWatching)
		}
	}
	return m.socket.Close()
}

// unhook ends what monitors a socket, if anything does.
func unhook(s *zmq4.Socket) error {
	// The context's end has done so already.
	if err := s.Monitor("", 0); err != nil && !errors.Is(err, zmq4.ETERM) {
		return fmt.Errorf("stop monitoring socket: %w", err)
	}
	return nil
}

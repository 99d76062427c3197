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

// EventKind is the kind of an Event of a connection.
type EventKind int

// The kinds, and the Value of each.
const (
	// Connected: a connection was made. Value is its file descriptor.
	Connected EventKind = iota + 1
	// ConnectDelayed: a connection is being made. Value is an errno, EINPROGRESS.
	ConnectDelayed
	// ConnectRetried: a connection failed, and is retried in Value milliseconds.
	ConnectRetried
	// Listening: the socket is bound. Value is its file descriptor.
	Listening
	// Accepted: a peer connected. Value is the connection's file descriptor.
	Accepted
	// AcceptFailed: a peer's connection could not be accepted. Value is the errno.
	AcceptFailed
	// HandshakeSucceeded: the connection is established. Value is 0.
	HandshakeSucceeded
	// HandshakeFailed: the peer speaks no ZMTP, or refused. Value is an errno, a protocol
	// error, or an authentication status.
	HandshakeFailed
	// Disconnected: a connection was closed. Value was its file descriptor.
	Disconnected
	// Closed: a pending connection or a bound socket was closed. Value was its file
	// descriptor.
	Closed
	// Stopped: the last event.
	Stopped
)

// kinds are the kinds of libzmq's events.
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

// monitored is the mask of all events.
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

// Event is an event of a connection.
type Event struct {
	Kind EventKind
	// Address is the endpoint that was connected to, or bound; never the address of an
	// accepted peer.
	Address string
	// Value depends on Kind.
	Value int
}

// Monitor reads the events of a socket's connections. It has two sockets of its own in the
// same context, which count for ZMQ_MAX_SOCKETS: libzmq's I/O threads write to one, and the
// other is read here.
//
// The queue between them is unbounded, as those threads would otherwise block, and with them
// all sockets of the context. Events have some 200 bytes, but a monitor must be read.
//
// One goroutine at a time may Wait. The other methods are safe for concurrent use.
type Monitor struct {
	watched *zmq4.Socket
	socket  *Socket

	mu      sync.Mutex // guards the libzmq socket of socket, and stopped
	stopped bool
}

// monitors counts all monitors, to name their endpoints.
var monitors atomic.Uint64

var errWatching = errors.New("the socket it watches is open")

// NewMonitor returns a monitor of a socket. Events from before are missed, so that the socket
// should not be connected or bound yet. A socket has one monitor at most. It must be closed,
// after the socket.
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

// ready reports whether there is an event. Others may read it concurrently.
func (m *Monitor) ready(fd uintptr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.socket.receivable(fd)
}

// Wait blocks until there is an event, as Socket.Wait does.
func (m *Monitor) Wait() error { return m.socket.Wait() }

// SetDeadline sets the deadline of Wait, as Socket.SetDeadline does.
func (m *Monitor) SetDeadline(t time.Time) error { return m.socket.SetDeadline(t) }

// Interrupt ends Wait, as Socket.Interrupt does.
func (m *Monitor) Interrupt() { m.socket.Interrupt() }

// Next returns the next event; ok is false where there is none now. None follows Stopped.
func (m *Monitor) Next() (e Event, ok bool, err error) {
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

// Stop ends the events with Stopped. Only the user of the socket may call it, before it
// closes the socket; Socket.Close does the same.
func (m *Monitor) Stop() error { return unhook(m.watched) }

// Close closes the monitor. It fails before the monitor was stopped, as libzmq's I/O threads
// would block when they write to it. Unread events are lost. Closing again does nothing.
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

// unhook ends the monitoring of a socket, if there is any.
func unhook(s *zmq4.Socket) error {
	// The end of the context has done so already.
	if err := s.Monitor("", 0); err != nil && !errors.Is(err, zmq4.ETERM) {
		return fmt.Errorf("stop monitoring socket: %w", err)
	}
	return nil
}

//go:build cgo

package libzmq

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
)

// eventKinds are the events of libzmq that are monitored.
type eventKinds map[zmq4.Event]transport.Event

// connectEvents are the events of a socket that connects. After a failed attempt, libzmq
// announces a retry. Another socket replaces this one before the retry (noReconnect).
var connectEvents = func() eventKinds {
	protocol := transport.Event{Kind: transport.Failed, Err: errors.New("what listens there does not speak as ZeroMQ does")}
	return eventKinds{
		zmq4.EVENT_HANDSHAKE_SUCCEEDED:        {Kind: transport.Connected},
		zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL: protocol,
		zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL:  protocol,
		zmq4.EVENT_HANDSHAKE_FAILED_AUTH:      protocol,
		zmq4.EVENT_CONNECT_RETRIED:            {Kind: transport.Failed, Err: errors.New("nothing listens there, or it cannot be reached")},
		zmq4.EVENT_DISCONNECTED:               {Kind: transport.Disconnected},
	}
}()

// bindEvents are the events of a bound socket. An accepted connection counts as connected at
// once, because only this event has its file descriptor.
var bindEvents = eventKinds{
	zmq4.EVENT_ACCEPTED:     {Kind: transport.Connected},
	zmq4.EVENT_DISCONNECTED: {Kind: transport.Disconnected},
	zmq4.EVENT_CLOSED:       {}, // see Monitor.awaitUnbound
}

// Monitor reads the events of a socket's connections. It has two sockets of its own in the same context, which count for ZMQ_MAX_SOCKETS:
// libzmq's I/O threads write to one, and the other is read here.
//
// The queue between the two sockets is unbounded: otherwise libzmq's I/O threads could block,
// and with them all sockets of the context. An event takes some 200 bytes until it is read.
//
// One goroutine at a time may Wait. The other methods are safe for concurrent use.
type Monitor struct {
	watched *zmq4.Socket
	socket  *Socket
	kinds   eventKinds

	mu      sync.Mutex // guards the libzmq socket of socket, and all below
	stopped bool       // the last event was read
	unbound bool       // EVENT_CLOSED was read; only of a bound socket
}

// monitors counts all monitors, to name their endpoints.
var monitors atomic.Uint64

// NewMonitor returns a monitor of a socket, which should not be connected or bound yet: earlier events are missed. A socket has one monitor
// at most. The monitor must be closed, after the socket.
func NewMonitor(watched *zmq4.Socket, kinds eventKinds) (*Monitor, error) {
	zctx, err := watched.Context()
	if err != nil {
		return nil, fmt.Errorf("monitor socket: %w", err)
	}
	end, err := zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return nil, fmt.Errorf("create monitor's socket: %w", err)
	}
	m := &Monitor{watched: watched, kinds: kinds}
	err = errors.Join(end.SetLinger(0), end.SetRcvhwm(noHWM))
	if err == nil {
		m.socket, err = Open(end)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open monitor's socket: %w", err), end.Close())
	}
	m.socket.ready = m.ready
	address := "inproc://kvcast-monitor-" + strconv.FormatUint(monitors.Add(1), 10)
	mask := zmq4.EVENT_MONITOR_STOPPED
	for e := range kinds {
		mask |= e
	}
	err = watched.Monitor(address, mask)
	if err == nil {
		err = end.Connect(address)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("monitor socket: %w", err), stopMonitor(watched), m.socket.Close())
	}
	return m, nil
}

// ready reports whether there is an event. Another goroutine may read it first.
func (m *Monitor) ready(fd uintptr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.socket.receivable(fd)
}

// Wait blocks until there is an event. After a call of Interrupt, it returns ErrInterrupted.
func (m *Monitor) Wait() error { return m.socket.Wait() }

// Interrupt ends the call of Wait in progress, and all later ones.
func (m *Monitor) Interrupt() { m.socket.Interrupt() }

// awaitUnbound waits until libzmq accepts no more connections for a bound socket, which its user has unbound, and drops the events
// until then. No call of Wait may be in progress; Interrupt may have ended it.
func (m *Monitor) awaitUnbound() error {
	m.socket.endInterrupt()
	for {
		ok, unbound, err := m.nextUnbound()
		if unbound {
			return nil
		}
		if err == nil && !ok {
			err = m.Wait()
		}
		if err != nil {
			return err
		}
	}
}

// nextUnbound drops an event, if ok, and reports whether the end of accepting was read.
func (m *Monitor) nextUnbound() (ok, unbound bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.unbound {
		_, ok, err = m.next()
	}
	return ok, m.unbound, err
}

// Next returns the next event, with its file descriptor as Conn; ok is false if there is none
// now. The kind of the last event, after Stop, is 0.
func (m *Monitor) Next() (e transport.Event, ok bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.next()
}

func (m *Monitor) next() (transport.Event, bool, error) {
	kind, _, value, err := m.socket.zmq.RecvEvent(zmq4.DONTWAIT)
	switch {
	case errors.Is(err, zmq4.Errno(syscall.EAGAIN)):
		return transport.Event{}, false, nil
	case err != nil:
		return transport.Event{}, false, fmt.Errorf("read monitor: %w", err)
	}
	m.stopped = m.stopped || kind == zmq4.EVENT_MONITOR_STOPPED
	m.unbound = m.unbound || kind == zmq4.EVENT_CLOSED
	e := m.kinds[kind]
	e.Conn = value
	return e, true, nil
}

// Stop ends the events. Only the user of the socket may call it, before closing the socket. Socket.Close calls it as well.
func (m *Monitor) Stop() error { return stopMonitor(m.watched) }

// Close closes the monitor, and drops unread events. It fails unless the monitor was stopped, because libzmq's I/O threads would block when
// they write to it. Closing again does nothing.
func (m *Monitor) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for !m.stopped {
		_, ok, err := m.next()
		if errors.Is(err, zmq4.ETERM) {
			break // the end of the context stopped the monitor
		}
		if err != nil {
			return err
		}
		if !ok {
			return errors.New("close monitor: the socket it watches is open")
		}
	}
	return m.socket.Close()
}

// stopMonitor ends the monitoring of a socket, if there is any.
func stopMonitor(s *zmq4.Socket) error {
	// After ETERM the end of the context has done so already.
	if err := s.Monitor("", 0); err != nil && !errors.Is(err, zmq4.ETERM) {
		return fmt.Errorf("stop monitoring socket: %w", err)
	}
	return nil
}

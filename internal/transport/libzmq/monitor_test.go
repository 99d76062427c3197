//go:build cgo

package libzmq_test

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

// newMonitor returns a monitor that is closed with the test; its socket must be
// closed before.
func newMonitor(t *testing.T, zs *zmq4.Socket, bound bool) *libzmq.Monitor {
	t.Helper()
	kinds := libzmq.ConnectEvents
	if bound {
		kinds = libzmq.BindEvents
	}
	m, err := libzmq.NewMonitor(zs, kinds)
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(patience, m.Interrupt)
	t.Cleanup(func() {
		timer.Stop()
		if err := errors.Join(m.Stop(), m.Close()); err != nil && !errors.Is(err, zmq4.ErrorSocketClosed) {
			t.Error(err)
		}
	})
	return m
}

// nextEvent waits for an event.
func nextEvent(t *testing.T, m *libzmq.Monitor) transport.Event {
	t.Helper()
	for {
		e, ok, err := m.Next()
		if err == nil && !ok {
			err = m.Wait()
		}
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			return e
		}
	}
}

// until returns the kinds of events up to the first event of a kind, and that event.
func until(t *testing.T, m *libzmq.Monitor, kind transport.EventKind) ([]transport.EventKind, transport.Event) {
	t.Helper()
	var kinds []transport.EventKind
	for {
		e := nextEvent(t, m)
		kinds = append(kinds, e.Kind)
		if e.Kind == kind {
			return kinds, e
		}
	}
}

func TestMonitorOfABoundSocket(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	sub, pub := newSocket(t, zctx, zmq4.SUB), newSocket(t, zctx, zmq4.XPUB)
	m := newMonitor(t, sub, true)
	address := bindOf(t, sub, "tcp://127.0.0.1:*")
	s := mustOpen(t, sub)
	connectTo(t, pub, address)
	kinds, accepted := until(t, m, transport.Connected)
	if accepted.Conn <= 0 || len(kinds) != 1 {
		t.Errorf("got %+v, want one event with a file descriptor", accepted)
	}

	// A message identifies its connection. The goroutine that waits for it sends the
	// subscription.
	waited := make(chan error)
	go func() { waited <- s.Wait() }()
	if _, err := pub.RecvBytes(0); err != nil {
		t.Fatal(err)
	}
	sendTo(t, pub, []byte("message"))
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	b := libzmq.NewBatch(1)
	if n, err := receive(s, b); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if got := b.Messages()[0].Conn; got != accepted.Conn {
		t.Errorf("got a message of connection %d, want %d", got, accepted.Conn)
	}

	closeNow(t, pub)
	if _, e := until(t, m, transport.Disconnected); e.Conn != accepted.Conn {
		t.Errorf("got %+v, want of connection %d", e, accepted.Conn)
	}
	if err := m.Close(); err == nil {
		t.Error("Close of a monitor whose socket is open: got no error")
	}
	closeNow(t, s)
	until(t, m, 0)
	if e, ok, err := m.Next(); ok || err != nil {
		t.Errorf("after the last event: got %+v, %v", e, err)
	}
	closeNow(t, m)
}

func TestMonitorOfASocketThatConnects(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	pub, sub := newSocket(t, zctx, zmq4.PUB), newSocket(t, zctx, zmq4.SUB)
	address := bindOf(t, pub, "tcp://127.0.0.1:*")
	m := newMonitor(t, sub, false)
	s := mustOpen(t, sub)
	if err := sub.SetReconnectIvl(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	connectTo(t, sub, address)
	until(t, m, transport.Connected)
	closeNow(t, pub)
	until(t, m, transport.Disconnected)
	until(t, m, transport.Failed)
	closeNow(t, s)
	until(t, m, 0)
}

func TestMonitorOfAFailedHandshake(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	sub := newSocket(t, zctx, zmq4.SUB)
	m := newMonitor(t, sub, false)
	address := bindOf(t, sub, "tcp://127.0.0.1:*")
	s := mustOpen(t, sub)
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(address, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	// A greeting of ZMTP 3 with an unknown mechanism.
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NOTHING")
	if _, err := c.Write(greeting); err != nil {
		t.Fatal(err)
	}
	until(t, m, transport.Failed)
	closeNow(t, c)
	closeNow(t, s)
}

func TestMonitorIsInterrupted(t *testing.T) {
	t.Parallel()
	m := newMonitor(t, newSocket(t, newContext(t), zmq4.SUB), false)
	ended := make(chan error)
	go func() { ended <- m.Wait() }()
	m.Interrupt()
	if err := <-ended; !errors.Is(err, transport.ErrInterrupted) {
		t.Errorf("got %v, want %v", err, transport.ErrInterrupted)
	}
}

func TestMonitorOfAnEndedContext(t *testing.T) {
	t.Parallel()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	zs, err := zctx.NewSocket(zmq4.SUB)
	if err != nil {
		t.Fatal(err)
	}
	m, err := libzmq.NewMonitor(zs, libzmq.ConnectEvents)
	if err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, zs)
	ended := make(chan error)
	go func() { ended <- zctx.Term() }()
	for err == nil {
		if err = m.Wait(); err == nil {
			_, _, err = m.Next()
		}
	}
	if !errors.Is(err, zmq4.ETERM) {
		t.Errorf("got %v, want %v", err, zmq4.ETERM)
	}
	closeNow(t, s)
	closeNow(t, m)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

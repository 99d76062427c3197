//go:build cgo

package libzmq

import (
	"errors"
	"sync"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
)

// receiver implements transport.Receiver: a socket, the monitor of its connections, and the goroutines that read them into an inbox.
type receiver struct {
	inbox
	monitor   *Monitor
	group     sync.WaitGroup
	connected bool // the only connection was made; guarded by mu
}

// newReceiver takes ownership of a socket that is neither connected nor bound yet.
func (t *Transport) newReceiver(s *zmq4.Socket, kinds eventKinds, onDrop func(n int)) (*receiver, error) {
	r := &receiver{inbox: t.newInbox(onDrop)}
	r.nextEvent = r.nextOfOne
	return r, r.own(s, kinds)
}

func (t *Transport) newInbox(onDrop func(n int)) inbox {
	return inbox{budget: t.budget, pool: &t.pool, onDrop: onDrop, wake: make(chan struct{}, 1), connections: make(map[int]usage)}
}

// own takes ownership of a socket that is neither connected nor bound yet. No goroutine of the receiver is running.
func (r *receiver) own(s *zmq4.Socket, kinds eventKinds) error {
	m, err := NewMonitor(s, kinds)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	socket, err := Open(s)
	if err != nil {
		return errors.Join(err, m.Stop(), s.Close(), m.Close())
	}
	r.monitor, r.socket = m, socket
	return nil
}

// start starts the goroutines.
func (r *receiver) start() {
	r.group.Go(func() { r.finish(r.drain()) })
	r.group.Go(r.watch)
}

// stop ends the goroutines.
func (r *receiver) stop() {
	r.monitor.Interrupt()
	r.socket.Interrupt()
	r.group.Wait()
}

// release closes the socket, after stop.
func (r *receiver) release() error { return errors.Join(r.socket.Close(), r.monitor.Close()) }

// watch adds the events of the connections. An error of the monitor ends drain.
func (r *receiver) watch() {
	err := r.monitor.Wait()
	for ; err == nil; err = r.monitor.Wait() {
		r.addEvents()
	}
	if !errors.Is(err, transport.ErrInterrupted) {
		r.mu.Lock()
		r.failure = err
		r.mu.Unlock()
		r.socket.Interrupt()
	}
}

// nextOfMany returns the next event of a bound socket.
func (r *receiver) nextOfMany() (transport.Event, bool) {
	e, ok, err := r.monitor.Next()
	return e, ok && err == nil // Monitor.Wait returns the error as well
}

// nextOfOne returns the next event of the only connection. Its end interrupts drain, which adds it after the messages.
func (r *receiver) nextOfOne() (transport.Event, bool) {
	for {
		e, ok := r.nextOfMany()
		e.Conn = 0
		switch {
		case !ok:
			return e, false
		case e.Kind == 0 || r.end.Kind != 0:
			continue
		case e.Kind == transport.Connected:
			r.connected = true
			return e, true
		case r.connected:
			e.Kind = transport.Disconnected
		case e.Kind == transport.Disconnected:
			e = transport.Event{Kind: transport.Failed, Err: errors.New("what listens there ended the connection before it spoke as ZeroMQ does")}
		}
		r.end = e
		r.socket.Interrupt()
	}
}

func (r *receiver) Interrupt() { r.socket.Interrupt() }

func (r *receiver) Close() error {
	r.stop()
	r.discard()
	return r.release()
}

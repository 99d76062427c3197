//go:build cgo

package libzmq

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/transport"
)

// acceptWait is the wait after a failure to accept a connection that is refused, such as of missing descriptors.
const acceptWait = 5 * time.Millisecond

// listener implements transport.Listener. libzmq closes the accepted connections of a socket only when the socket is closed:
// zmq_unbind leaves them open. So the receiver has another socket after each suspension. All of them accept from duplicates of one
// descriptor, which the listener owns, and at which it refuses peers in between. Thus no other process gets the port.
type listener struct {
	receiver
	transport *Transport
	port      port
	endpoint  string
	// suspending reports whether the end of drain is not that of the listener.
	suspending atomic.Bool
	// open are the connections whose end is not in the inbox, by file descriptor. inbox.mu guards it.
	open map[int]struct{}

	life                   sync.Mutex // guards all below, and the socket of the receiver; locked before the mutexes of inbox
	suspended, interrupted bool
	refusing               sync.WaitGroup // has a goroutine while suspended
}

// port is a socket that listens.
type port interface {
	net.Listener
	syscall.Conn
	SetDeadline(t time.Time) error
}

// Bind implements transport.Transport.
func (t *Transport) Bind(endpoint string, onDrop func(n int)) (_ transport.Listener, bound string, err error) {
	p, bound, err := transport.Listen(endpoint)
	if err != nil {
		return nil, "", err
	}
	l := &listener{
		receiver: receiver{inbox: t.newInbox(onDrop)}, transport: t, port: p.(port), endpoint: bound, open: make(map[int]struct{}),
	}
	l.bound, l.nextEvent = true, l.nextOfAccepted
	if err := l.bind(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), p.Close())
	}
	return l, bound, nil
}

// bind opens a socket that accepts connections from the port, and starts the goroutines.
func (l *listener) bind() error {
	s, err := l.transport.socket(zmq4.SUB, transport.MaxPayloadBytes, "")
	if err != nil {
		return err
	}
	if err := l.own(s, bindEvents); err != nil {
		return err
	}
	if err := l.acceptFromPort(s); err != nil {
		return errors.Join(err, l.release())
	}
	l.group.Go(func() {
		if err := l.drain(); !l.suspending.Load() || !errors.Is(err, transport.ErrInterrupted) {
			l.finish(err)
		}
	})
	l.group.Go(l.watch)
	return nil
}

// acceptFromPort gives a socket a duplicate of the port's descriptor, which libzmq closes.
func (l *listener) acceptFromPort(s *zmq4.Socket) error {
	raw, err := l.port.SyscallConn()
	if err != nil {
		return fmt.Errorf("look up port's file descriptor: %w", err)
	}
	var duplicate int
	var failed error
	err = raw.Control(func(fd uintptr) { duplicate, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("duplicate port's file descriptor: %w", err)
	}
	if err = s.SetUseFd(duplicate); err == nil {
		err = s.Bind(l.endpoint)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("give libzmq the port: %w", err), unix.Close(duplicate))
	}
	return nil
}

// nextOfAccepted returns the next event, and keeps the connections that are open.
func (l *listener) nextOfAccepted() (transport.Event, bool) {
	e, ok := l.nextOfMany()
	switch e.Kind {
	case transport.Connected:
		l.open[e.Conn] = struct{}{}
	case transport.Disconnected:
		delete(l.open, e.Conn)
	default:
	}
	return e, ok
}

func (l *listener) Suspend() {
	l.life.Lock()
	defer l.life.Unlock()
	if l.suspended || l.interrupted {
		return
	}
	l.suspended = true
	l.suspending.Store(true)
	if err := l.unbind(); err != nil {
		l.finish(err)
	}
	l.disconnect()
	l.refusing.Go(l.refuse)
}

// unbind ends the goroutines and closes the socket, after libzmq has closed its duplicate of the port's descriptor. zmq_close alone
// returns before that: libzmq would accept a peer that connects after the end of unbind.
func (l *listener) unbind() error {
	l.stop()
	err := l.socket.unbind()
	if err == nil {
		err = l.monitor.awaitUnbound()
	}
	return errors.Join(err, l.release())
}

// disconnect adds the ends of all connections, of which a closed socket has no events.
func (l *listener) disconnect() {
	l.order.Lock()
	defer l.order.Unlock()
	l.mu.Lock()
	for conn := range l.open {
		l.addEvent(transport.Event{Kind: transport.Disconnected, Conn: conn})
	}
	clear(l.open)
	l.mu.Unlock()
	l.Wake()
}

// refuse closes the connections that peers make, until the port's deadline.
func (l *listener) refuse() {
	for {
		c, err := l.port.Accept()
		switch {
		case err == nil:
			transport.Refuse(c)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return
		default:
			time.Sleep(acceptWait)
		}
	}
}

// endRefusing ends refuse.
func (l *listener) endRefusing() error {
	err := l.port.SetDeadline(time.Unix(1, 0))
	l.refusing.Wait()
	return errors.Join(err, l.port.SetDeadline(time.Time{}))
}

func (l *listener) Resume() error {
	l.life.Lock()
	defer l.life.Unlock()
	if !l.suspended || l.interrupted {
		return nil
	}
	l.suspending.Store(false)
	if err := l.bind(); err != nil {
		return fmt.Errorf("bind %s again: %w", l.endpoint, err)
	}
	l.suspended = false
	return l.endRefusing()
}

func (l *listener) Interrupt() {
	l.life.Lock()
	defer l.life.Unlock()
	l.interrupted = true
	if l.suspended {
		l.finish(transport.ErrInterrupted)
		return
	}
	l.socket.Interrupt()
}

func (l *listener) Close() error {
	l.Interrupt()
	l.life.Lock()
	defer l.life.Unlock()
	var err error
	if l.suspended {
		err = l.endRefusing()
	} else {
		err = l.unbind()
	}
	l.discard()
	return errors.Join(err, l.port.Close())
}

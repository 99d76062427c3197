package native

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// Bounds of the wait after a failure to accept a connection, such as of missing descriptors.
const (
	minAcceptWait = 5 * time.Millisecond
	maxAcceptWait = time.Second
)

// Listener implements transport.Listener.
type Listener struct {
	*Receiver

	mu sync.Mutex // guards both below
	// peers is the context of the accepted connections. It is done while the listener is suspended.
	peers      context.Context
	closePeers context.CancelFunc
}

// Bind implements transport.Transport. It drops nothing.
func (t *Transport) Bind(endpoint string, _ func(int)) (_ transport.Listener, bound string, err error) {
	socket, bound, err := transport.Listen(endpoint)
	if err != nil {
		return nil, "", err
	}
	p, err := newPipe()
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("bind %s: %w", endpoint, err), socket.Close())
	}
	l := &Listener{Receiver: t.newReceiver(zmtp.Config{Socket: zmtp.SUB}, newReads(t.config))}
	l.pipe = p
	l.peers, l.closePeers = context.WithCancel(l.ctx)
	l.done.Go(func() { l.accept(socket) })
	return l, bound, nil
}

// Suspend implements transport.Listener.
func (l *Listener) Suspend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closePeers()
}

// Resume implements transport.Listener.
func (l *Listener) Resume() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.peers.Err() != nil {
		l.peers, l.closePeers = context.WithCancel(l.ctx)
	}
	return nil
}

// peersContext returns the context of connections that are accepted now.
func (l *Listener) peersContext() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peers
}

// accept serves the connections of a socket.
func (l *Listener) accept(socket net.Listener) {
	stop := context.AfterFunc(l.ctx, func() { _ = socket.Close() })
	defer stop()
	wait := minAcceptWait
	for id := 1; ; id++ {
		c, err := socket.Accept()
		switch {
		case l.ctx.Err() != nil:
			if c != nil {
				_ = c.Close()
			}
			return
		case err != nil:
			select {
			case <-time.After(wait):
			case <-l.ctx.Done():
			}
			wait = min(2*wait, maxAcceptWait)
			continue
		}
		wait = minAcceptWait
		ctx := l.peersContext()
		if ctx.Err() != nil {
			transport.Refuse(c)
			continue
		}
		n := newConn(ctx, l.Receiver, id, c)
		if err := l.transport.connections.add(n); err != nil {
			l.transport.config.OnReject(n.peer, err)
			_ = c.Close()
			continue
		}
		l.done.Go(n.serveAccepted)
	}
}

// serveAccepted serves an accepted connection.
func (c *conn) serveAccepted() {
	r := c.receiver
	defer close(c.done)
	c.ttl = r.transport.config.PeerTTL
	c.awaitEarlier()
	err := c.serve(nil)
	if protocol := (*zmtp.Error)(nil); errors.As(err, &protocol) {
		r.transport.config.OnReject(c.peer, protocol)
	}
	if errors.As(err, new(*notEstablished)) {
		r.transport.connections.remove(c)
		return
	}
	// The event releases the connection's place when it has been processed, so that the
	// events that wait are bounded as well.
	last := eventChunk(transport.Event{Kind: transport.Disconnected, Conn: c.id, Err: err})
	last.leaving = c
	r.push(last)
}

// pingsPerTTL is how many PINGs are sent in the time after which the peer closes the connection: one may be late.
const pingsPerTTL = 3

// keepPinging sends PINGs with the TTL until the connection ends. It does so beside the goroutine of the connection, which
// waits while messages are not processed: that is not to end the connection.
func (c *conn) keepPinging() {
	ping := zmtp.AppendPing(nil, c.ttl)
	ticker := time.NewTicker(c.ttl / pingsPerTTL)
	defer ticker.Stop()
	for {
		if err := c.write(ping); err != nil {
			_ = c.net.Close() // a part of the PING may have been sent
			return
		}
		select {
		case <-ticker.C:
		case <-c.done:
			return
		case <-c.ctx.Done():
			return
		}
	}
}

package server

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/peer"
)

// connections knows the open connections of a listener, so that they can be
// closed whatever gRPC makes of them.
type connections struct {
	mu     sync.Mutex // guards all below
	open   map[*connection]struct{}
	closed bool
}

func newConnections() *connections {
	return &connections{open: make(map[*connection]struct{})}
}

// connection takes itself off the list when it is closed.
type connection struct {
	net.Conn
	of     *connections
	opened time.Time
}

// address is a client's. All that a call can learn of its connection is the
// address, so this is what tells it when the connection was opened.
type address struct {
	net.Addr
	opened time.Time
}

// RemoteAddr returns the client's address.
func (c *connection) RemoteAddr() net.Addr { return address{c.Conn.RemoteAddr(), c.opened} }

// openedAt returns when the connection of a call was opened.
func openedAt(ctx context.Context) (_ time.Time, ok bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return time.Time{}, false
	}
	a, ok := p.Addr.(address)
	return a.opened, ok
}

// Close closes the connection.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// listen returns the listener with its connections known.
func (c *connections) listen(l net.Listener) net.Listener { return knownListener{l, c} }

type knownListener struct {
	net.Listener
	conns *connections
}

// Accept implements net.Listener.
func (l knownListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: conn, of: l.conns, opened: time.Now()}
	l.conns.mu.Lock()
	closed := l.conns.closed
	if !closed {
		l.conns.open[c] = struct{}{}
	}
	l.conns.mu.Unlock()
	if closed {
		_ = conn.Close() // gRPC notices at the first read
	}
	return c, nil
}

// close closes all connections, and those to come.
func (c *connections) close() {
	c.mu.Lock()
	open := c.open
	c.open, c.closed = make(map[*connection]struct{}), true
	c.mu.Unlock()
	for conn := range open {
		_ = conn.Conn.Close() // its user notices
	}
}

package server

import (
	"net"
	"sync"
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
	of *connections
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
	c := &connection{Conn: conn, of: l.conns}
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

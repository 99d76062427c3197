package server

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc/peer"
)

// connections knows the open connections of a listener, so that they can be
// closed whatever gRPC makes of them, and bounds them.
type connections struct {
	limit   *quota
	refused func(from net.Addr, err error) // called for each that is refused

	mu        sync.Mutex // guards all below
	open      map[*connection]struct{}
	addresses map[netip.Prefix]*peerAddress // those that have a connection
	closed    bool
}

func newConnections(limit *quota, refused func(net.Addr, error)) *connections {
	return &connections{
		limit: limit, refused: refused,
		open: make(map[*connection]struct{}), addresses: make(map[netip.Prefix]*peerAddress),
	}
}

// connection takes itself off the list when it is closed.
type connection struct {
	net.Conn
	of     *connections
	peer   *peerAddress
	opened time.Time
}

// address is a client's. All that a call can learn of its connection is the
// address, so this is what tells it when the connection was opened, and what its
// peers have of bounded resources.
type address struct {
	net.Addr
	peer   *peerAddress
	opened time.Time
}

// RemoteAddr returns the client's address.
func (c *connection) RemoteAddr() net.Addr { return address{c.Conn.RemoteAddr(), c.peer, c.opened} }

// addressOf returns the address of the connection of a call; ok is false where the
// call came over none that was accepted here.
func addressOf(ctx context.Context) (_ address, ok bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return address{}, false
	}
	a, ok := p.Addr.(address)
	return a, ok
}

// openedAt returns when the connection of a call was opened.
func openedAt(ctx context.Context) (_ time.Time, ok bool) {
	a, ok := addressOf(ctx)
	return a.opened, ok
}

// Close closes the connection.
func (c *connection) Close() error {
	c.of.remove(c)
	return c.Conn.Close()
}

// listen returns the listener with its connections known.
func (c *connections) listen(l net.Listener) net.Listener { return knownListener{l, c} }

type knownListener struct {
	net.Listener
	conns *connections
}

// Accept implements net.Listener. A connection beyond the limit is closed without a
// word: whatever HTTP/2 could say would make it count as established, and its
// client come back at once in place of backing off.
func (l knownListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := l.conns.add(conn); c != nil {
			return c, nil
		}
		_ = conn.Close()
	}
}

// add lists a connection; nil means that it is refused.
func (c *connections) add(conn net.Conn) *connection {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	prefix := peerPrefix(conn.RemoteAddr())
	p := c.addresses[prefix]
	if p == nil {
		p = newPeerAddress(prefix)
	}
	if err := c.limit.take(&p.connections); err != nil {
		c.mu.Unlock()
		c.refused(conn.RemoteAddr(), err)
		return nil
	}
	defer c.mu.Unlock()
	c.addresses[prefix] = p
	one := &connection{Conn: conn, of: c, peer: p, opened: time.Now()}
	c.open[one] = struct{}{}
	return one
}

// remove takes a connection off the list. It may be called more than once.
func (c *connections) remove(one *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.open[one]; !ok {
		return
	}
	delete(c.open, one)
	c.limit.release(&one.peer.connections)
	if one.peer.connections.Load() == 0 {
		delete(c.addresses, one.peer.prefix)
	}
}

// close closes all connections, and those to come.
func (c *connections) close() {
	c.mu.Lock()
	c.closed = true
	open := make([]*connection, 0, len(c.open))
	for conn := range c.open {
		open = append(open, conn)
	}
	c.mu.Unlock()
	for _, conn := range open {
		_ = conn.Conn.Close() // its user notices, and takes it off the list
	}
}

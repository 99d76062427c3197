package server

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
)

// connections tracks the open connections of a listener and bounds their number. It
// can close them even where gRPC would wait, as during a handshake.
type connections struct {
	quota   *quota
	refused func(from net.Addr, err error) // called for each refused connection

	mu     sync.Mutex // guards all below
	open   map[*connection]struct{}
	peers  map[netip.Prefix]*peerAddress // those with open connections
	closed bool
}

func newConnections(q *quota, refused func(net.Addr, error)) *connections {
	return &connections{
		quota: q, refused: refused,
		open: make(map[*connection]struct{}), peers: make(map[netip.Prefix]*peerAddress),
	}
}

// connection is an accepted connection. Close releases its quota.
type connection struct {
	net.Conn
	owner  *connections
	peer   *peerAddress
	opened time.Time
}

// remoteAddr is a connection's remote address. It is all of the connection that gRPC
// passes on to calls, so it carries what they need to know of it.
type remoteAddr struct {
	net.Addr
	peer   *peerAddress
	opened time.Time
}

// RemoteAddr returns a remoteAddr.
func (c *connection) RemoteAddr() net.Addr { return remoteAddr{c.Conn.RemoteAddr(), c.peer, c.opened} }

// remoteAddrOf returns the remote address of a call's connection, if the connection was accepted here.
func remoteAddrOf(ctx context.Context) (_ remoteAddr, ok bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return remoteAddr{}, false
	}
	a, ok := p.Addr.(remoteAddr)
	return a, ok
}

// peerOf returns the peer address of a call.
func (s *Server) peerOf(ctx context.Context) *peerAddress {
	if a, ok := remoteAddrOf(ctx); ok {
		return a.peer
	}
	return s.unknownPeer
}

// Close closes the connection.
func (c *connection) Close() error {
	c.owner.remove(c)
	return c.Conn.Close()
}

// listen wraps a listener so that its connections are tracked.
func (c *connections) listen(l net.Listener) net.Listener { return trackedListener{l, c} }

type trackedListener struct {
	net.Listener
	connections *connections
}

// Accept implements net.Listener. It closes a connection beyond the limit without an
// answer: an HTTP/2 error would count as an established connection, after which the
// client would reconnect at once instead of backing off.
func (l trackedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c, err := l.connections.add(conn)
		if err == nil {
			return c, nil
		}
		if !errors.Is(err, net.ErrClosed) {
			l.connections.refused(conn.RemoteAddr(), err)
		}
		_ = conn.Close()
	}
}

// add tracks a connection. The error is net.ErrClosed or that of the quota.
func (c *connections) add(conn net.Conn) (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, net.ErrClosed
	}
	prefix := peerPrefix(conn.RemoteAddr())
	p := c.peers[prefix]
	if p == nil {
		p = newPeerAddress(prefix)
	}
	if err := c.quota.acquire(&p.connections); err != nil {
		return nil, err
	}
	c.peers[prefix] = p
	tracked := &connection{Conn: conn, owner: c, peer: p, opened: time.Now()}
	c.open[tracked] = struct{}{}
	return tracked, nil
}

// remove stops tracking a connection. Further calls do nothing.
func (c *connections) remove(conn *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.open[conn]; !ok {
		return
	}
	delete(c.open, conn)
	c.quota.release(&conn.peer.connections)
	if conn.peer.connections.Load() == 0 {
		delete(c.peers, conn.peer.prefix)
	}
}

// close closes all open connections and refuses new ones.
func (c *connections) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for conn := range c.open {
		_ = conn.Conn.Close() // gRPC notices, and calls connection.Close
	}
}

// peerAddress is a client address, and what its clients use of each limited resource.
type peerAddress struct {
	prefix      netip.Prefix
	connections atomic.Int64
	watches     atomic.Int64
	reflections atomic.Int64
	receiving   chan struct{} // one element per call whose request is being received
}

func newPeerAddress(prefix netip.Prefix) *peerAddress {
	return &peerAddress{prefix: prefix, receiving: make(chan struct{}, maxReceivingPerAddress)}
}

// peerPrefix returns the prefix that stands for a client: its IPv4 address, or the /64 of its IPv6 address,
// since one client usually has all of it. All other addresses share the zero prefix.
func peerPrefix(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	prefix, _ := ip.Prefix(bits) // fails for an invalid address, which gets the zero prefix
	return prefix
}

// Clients reconnect now and then, so that a load balancer can move them to other servers. At MaxConnectionAge
// gRPC sends GOAWAY, and after a grace closes the connection, which its calls see as a network failure.
// Subscribe streams therefore end by themselves in between, with a reason. From the start of the connection:
//
//	0.9 to 1.1 age                  GOAWAY: new calls use another connection
//	1.1 age + 0.25 to 1 grace       Subscribe streams end, spread at random
//	at least 1 grace after that     gRPC closes the connection
//
// A stream must not end before the GOAWAY, or its client resumes over the same
// connection. gRPC measures the age from the end of the handshake, streams measure it
// from the accept; a quarter of the grace covers the difference.

// keepaliveParams returns gRPC's part of the connection age limit.
func (s *Server) keepaliveParams() keepalive.ServerParameters {
	p := keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}
	if age := s.cfg.MaxConnectionAge; age > 0 {
		p.MaxConnectionAge = age
		p.MaxConnectionAgeGrace = age/5 + 2*s.cfg.MaxConnectionAgeGrace // counts from the GOAWAY, as early as 0.9 age
	}
	return p
}

// connectionAgeTimer returns a timer for the end of a Subscribe stream; nil: no limit.
func (s *Server) connectionAgeTimer(ctx context.Context) *time.Timer {
	age, grace := s.cfg.MaxConnectionAge, s.cfg.MaxConnectionAgeGrace
	addr, ok := remoteAddrOf(ctx)
	if age == 0 || !ok {
		return nil
	}
	end := addr.opened.Add(age + age/10 + grace/4 + rand.N(grace*3/4+1))
	return time.NewTimer(time.Until(end))
}

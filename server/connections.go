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

	"github.com/kvcast/kvcast/internal/budget"
)

// connections tracks the open connections of a server and bounds their number. It can close a connection
// during its handshake, while gRPC would wait for the handshake to end.
type connections struct {
	quota   *quota
	refused func(from net.Addr, err error) // called for each refused connection
	writes  atomic.Uint64                  // to all connections

	mu     sync.Mutex // guards all below
	open   map[*connection]struct{}
	peers  map[netip.Prefix]*peerAddress // peers with open connections
	closed bool
}

func newConnections(q *quota, refused func(net.Addr, error)) *connections {
	return &connections{quota: q, refused: refused, open: make(map[*connection]struct{}), peers: make(map[netip.Prefix]*peerAddress)}
}

// connection is an accepted connection. Close releases its quota.
type connection struct {
	net.Conn
	owner     *connections
	peer      *peerAddress
	opened    time.Time
	receiving chan struct{} // has one element per call whose request is being received, or is the next of those of its address
}

// remoteAddr is the remote address of a connection. gRPC passes only the address to calls, so it carries the
// connection.
type remoteAddr struct {
	net.Addr
	conn *connection
}

func (c *connection) RemoteAddr() net.Addr { return remoteAddr{c.Conn.RemoteAddr(), c} }

func connectionOf(ctx context.Context) *connection {
	p, _ := peer.FromContext(ctx)
	return p.Addr.(remoteAddr).conn // all connections are accepted by trackedListener
}

func (c *connection) Write(b []byte) (int, error) {
	c.owner.writes.Add(1)
	return c.Conn.Write(b)
}

func (c *connection) Close() error {
	c.owner.remove(c)
	return c.Conn.Close()
}

// trackedListener adds the connections that it accepts to connections.
type trackedListener struct {
	net.Listener
	connections *connections
}

// Accept implements net.Listener. It closes a connection beyond the limit without an answer. After an HTTP/2
// error, the client would consider the connection established and reconnect at once instead of backing off.
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

// add tracks a connection. The error is net.ErrClosed or an error of the quota.
func (c *connections) add(conn net.Conn) (*connection, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, net.ErrClosed
	}
	prefix := budget.PeerOf(conn.RemoteAddr())
	p := c.peers[prefix]
	if p == nil {
		p = &peerAddress{prefix: prefix, receiving: make(chan struct{}, maxReceivingPerAddress), admitted: make(chan struct{}, maxAdmittedPerAddress)}
	}
	if err := c.quota.acquire(&p.connections); err != nil {
		return nil, err
	}
	c.peers[prefix] = p
	tracked := &connection{Conn: conn, owner: c, peer: p, opened: time.Now(), receiving: make(chan struct{}, maxReceivingPerConnection)}
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

// peerAddress is a client address, with the number of instances that its clients use of each limited resource.
type peerAddress struct {
	prefix       netip.Prefix
	connections  atomic.Int64
	watches      atomic.Int64
	reflections  atomic.Int64
	matchStreams atomic.Int64
	receiving    chan struct{} // has one element per call whose request is being received
	admitted     chan struct{} // has one element per call whose request will be received
}

// Clients reconnect at MaxConnectionAge, so that a load balancer can move them to other servers. gRPC sends
// GOAWAY at that age and closes the connection after a grace time, which calls see as a network failure. The
// server ends Subscribe streams between the two, with a reason. Measured from the accept:
//
//	0.9 to 1.1 age                GOAWAY: new calls use another connection
//	1.1 age + 0.25 to 1 grace     Subscribe streams end, at random times
//	at least 1 grace later        gRPC closes the connection
//
// A stream must not end before the GOAWAY, or its client resumes over the same connection. gRPC measures the
// age from the end of the handshake; a quarter of the grace time covers the difference.

func (s *Server) keepaliveParams() keepalive.ServerParameters {
	p := keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}
	if age := s.cfg.MaxConnectionAge; age > 0 {
		p.MaxConnectionAge = age
		p.MaxConnectionAgeGrace = age/5 + 2*s.cfg.MaxConnectionAgeGrace // from the GOAWAY, which may be at 0.9 age
	}
	return p
}

// connectionAgeTimer returns a timer that fires when a Subscribe stream must end; nil: no limit.
func (s *Server) connectionAgeTimer(ctx context.Context) *time.Timer {
	age, grace := s.cfg.MaxConnectionAge, s.cfg.MaxConnectionAgeGrace
	if age == 0 {
		return nil
	}
	end := connectionOf(ctx).opened.Add(age + age/10 + grace/4 + rand.N(grace*3/4+1))
	return time.NewTimer(time.Until(end))
}

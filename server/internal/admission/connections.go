package admission

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/kvcast/kvcast/internal/budget"
)

// Connections tracks the open connections of a server and bounds their number. It can close a connection
// during its handshake, while gRPC would wait for the handshake to end.
type Connections struct {
	quota   *Quota
	refused func(from net.Addr, err error) // called for each refused connection
	writes  atomic.Uint64                  // to all connections

	mu     sync.Mutex // guards all below
	open   map[*connection]struct{}
	peers  map[netip.Prefix]*peerAddress // peers with open connections
	closed bool
}

// NewConnections returns the connections of a server. It calls refused for each connection that it refuses, with an error of package budget.
func NewConnections(q *Quota, refused func(net.Addr, error)) *Connections {
	return &Connections{quota: q, refused: refused, open: make(map[*connection]struct{}), peers: make(map[netip.Prefix]*peerAddress)}
}

// Total returns the budget of all open connections.
func (c *Connections) Total() *budget.Budget { return c.quota.total }

// Writes returns the number of writes to all connections so far.
func (c *Connections) Writes() uint64 { return c.writes.Load() }

// Listener returns a listener whose connections are tracked. A server must have no others.
func (c *Connections) Listener(l net.Listener) net.Listener { return trackedListener{l, c} }

// Opened returns when the connection of a call was accepted.
func Opened(ctx context.Context) time.Time { return connectionOf(ctx).opened }

// connection is an accepted connection. Close releases its quota.
type connection struct {
	net.Conn
	owner     *Connections
	peer      *peerAddress
	opened    time.Time
	receiving chan struct{} // has one element per call whose request is being received, or is the next of those of its address
}

// remoteAddr is the remote address of a connection. gRPC passes only the address to calls, so it carries the connection.
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

// trackedListener adds the connections that it accepts to Connections.
type trackedListener struct {
	net.Listener
	connections *Connections
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

// add tracks a connection. The error is net.ErrClosed or one of package budget.
func (c *Connections) add(conn net.Conn) (*connection, error) {
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
	if err := c.quota.acquire(prefix); err != nil {
		return nil, err
	}
	p.connections++
	c.peers[prefix] = p
	tracked := &connection{Conn: conn, owner: c, peer: p, opened: time.Now(), receiving: make(chan struct{}, maxReceivingPerConnection)}
	c.open[tracked] = struct{}{}
	return tracked, nil
}

// remove stops tracking a connection. Further calls do nothing.
func (c *Connections) remove(conn *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.open[conn]; !ok {
		return
	}
	delete(c.open, conn)
	c.quota.release(conn.peer.prefix)
	if conn.peer.connections--; conn.peer.connections == 0 {
		delete(c.peers, conn.peer.prefix)
	}
}

// Close closes all open connections and refuses new ones.
func (c *Connections) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for conn := range c.open {
		_ = conn.Conn.Close() // gRPC notices, and calls connection.Close
	}
}

// peerAddress is a client address.
type peerAddress struct {
	prefix      netip.Prefix
	connections int
	receiving   chan struct{} // has one element per call whose request is being received
	admitted    chan struct{} // has one element per call whose request will be received
}

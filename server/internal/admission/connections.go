package admission

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
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
	unread  *Unread
	refused func(from net.Addr, err error) // called for each refused connection
	writes  atomic.Uint64                  // to all connections
	// maxUnproved bounds the connections on which no call was permitted; 0 means that this does not matter.
	maxUnproved int

	mu       sync.Mutex // guards all below
	open     map[*connection]struct{}
	peers    map[netip.Prefix]*peerAddress // peers with open connections
	unproved int
	closed   bool
}

// NewConnections returns the connections of a server. It calls refused for each connection that it refuses, with an error of package budget.
//
// If proof is set, calls need credentials: connections without a call that Proved was called for may have a quarter of the quota. A further one takes
// the place of the oldest of the address with the most.
func NewConnections(q *Quota, unread *Unread, proof bool, refused func(net.Addr, error)) *Connections {
	c := &Connections{quota: q, unread: unread, refused: refused, open: make(map[*connection]struct{}), peers: make(map[netip.Prefix]*peerAddress)}
	if proof {
		c.maxUnproved = int(max(1, q.total.Limit()/4))
	}
	return c
}

// Total returns the budget of all open connections.
func (c *Connections) Total() *budget.Budget { return c.quota.total }

// Writes returns the number of writes to all connections so far.
func (c *Connections) Writes() uint64 { return c.writes.Load() }

// Listener returns a listener whose connections are tracked. A server must have no others.
func (c *Connections) Listener(l net.Listener) net.Listener { return trackedListener{l, c} }

// CloseConnection closes the connection of a call, unless the call came over another port.
func CloseConnection(ctx context.Context) {
	p, _ := peer.FromContext(ctx)
	if a, ok := p.Addr.(remoteAddr); ok {
		_ = a.conn.Conn.Close()
	}
}

// Opened returns when the connection of a call was accepted.
func Opened(ctx context.Context) time.Time { return connectionOf(ctx).opened }

// connection is an accepted connection. Close releases its quota.
type connection struct {
	net.Conn
	owner     *Connections
	peer      *peerAddress
	opened    time.Time
	receiving chan struct{} // has one element per call whose request is being received, or is the next of those of its address
	unread    unreadAnswers
	edges     atomic.Uint64 // how often writes have begun and ended: odd during one
	watched   atomic.Bool   // see Unread.watch
}

// writing reports whether a write is in progress.
func (c *connection) writing() bool { return c.edges.Load()&1 != 0 }

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

// AddressOf returns the prefix that counts the limits of a call: that of its connection, or of the address of a server.Caller.
func AddressOf(ctx context.Context) netip.Prefix {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Prefix{}
	}
	if a, ok := p.Addr.(remoteAddr); ok {
		return a.conn.peer.prefix
	}
	return budget.ClientOf(p.Addr.String())
}

func (c *connection) Write(b []byte) (int, error) {
	c.owner.writes.Add(1)
	c.edges.Add(1)
	defer c.edges.Add(1)
	return c.Conn.Write(b)
}

func (c *connection) Close() error {
	c.owner.remove(c)
	c.unread.close(c.owner.unread, c)
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
	if c.maxUnproved > 0 {
		p.unproved = append(p.unproved, tracked)
		if c.unproved++; c.unproved > c.maxUnproved {
			c.displace()
		}
	}
	return tracked, nil
}

// displace closes the oldest connection without a permitted call of the address that has the most of them; of several, the oldest of all.
func (c *Connections) displace() {
	var oldest *connection
	for _, p := range c.peers {
		n := len(p.unproved)
		if n > 0 && (oldest == nil || n > len(oldest.peer.unproved) || n == len(oldest.peer.unproved) && p.unproved[0].opened.Before(oldest.opened)) {
			oldest = p.unproved[0]
		}
	}
	c.prove(oldest)
	_ = oldest.Conn.Close() // gRPC notices, and calls connection.Close
}

// Proved reports that a call was permitted, so that its connection, if it has one, is of a client with credentials.
func (c *Connections) Proved(ctx context.Context) {
	p, _ := peer.FromContext(ctx)
	if a, ok := p.Addr.(remoteAddr); ok && c.maxUnproved > 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.prove(a.conn)
	}
}

// prove removes a connection from those without a permitted call.
func (c *Connections) prove(conn *connection) {
	if i := slices.Index(conn.peer.unproved, conn); i >= 0 {
		conn.peer.unproved = slices.Delete(conn.peer.unproved, i, i+1)
		c.unproved--
	}
}

// remove stops tracking a connection. Further calls do nothing.
func (c *Connections) remove(conn *connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.open[conn]; !ok {
		return
	}
	delete(c.open, conn)
	c.prove(conn)
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
	unproved    []*connection // without a permitted call, the oldest first
	receiving   chan struct{} // has one element per call whose request is being received
	admitted    chan struct{} // has one element per call whose request will be received
}

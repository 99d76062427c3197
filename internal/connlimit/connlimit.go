// Package connlimit bounds the connections of a listener, in total and by client address.
//
// In: the connections of a listener. Out: those within the limits. Others are closed at once, so that a client that opens
// all it can does not make others wait.
package connlimit

import (
	"net"
	"net/netip"
	"sync"

	"github.com/kvcast/kvcast/internal/budget"
)

// Listener is a listener with limits. Use New.
type Listener struct {
	net.Listener
	total, perAddress int

	mu   sync.Mutex // guards what follows
	open int
	by   map[netip.Prefix]int
}

// New returns a listener that accepts at most total connections at a time from l, and at most perAddress from one address. All
// IPv6 addresses in a /64 count as one.
func New(l net.Listener, total, perAddress int) *Listener {
	return &Listener{Listener: l, total: total, perAddress: perAddress, by: make(map[netip.Prefix]int)}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := addressOf(c)
		if l.acquire(from) {
			return &conn{Conn: c, release: sync.OnceFunc(func() { l.release(from) })}, nil
		}
		_ = c.Close()
	}
}

func addressOf(c net.Conn) netip.Prefix {
	if tcp, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return budget.AddressOf(tcp.AddrPort().Addr())
	}
	return netip.Prefix{}
}

func (l *Listener) acquire(from netip.Prefix) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == l.total || l.by[from] == l.perAddress {
		return false
	}
	l.open++
	l.by[from]++
	return true
}

func (l *Listener) release(from netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.by[from]--; l.by[from] == 0 {
		delete(l.by, from)
	}
}

// conn is an accepted connection.
type conn struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.release()
	return c.Conn.Close()
}

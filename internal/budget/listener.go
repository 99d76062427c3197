// Package connlimit bounds the connections of a listener, in total and by client address.
//
// In: the connections of a listener. Out: those within the limits. Others are closed at once, so that a client that opens
// all it can does not make others wait.
package connlimit

import (
	"net"
	"sync"

	"github.com/kvcast/kvcast/internal/budget"
)

// New returns a listener that closes the connections of l beyond the shares, of which a connection uses 1 until it is closed.
func New(l net.Listener, shares *budget.Shares) net.Listener { return listener{l, shares} }

type listener struct {
	net.Listener
	shares *budget.Shares
}

// Accept implements net.Listener.
func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := budget.PeerOf(c.RemoteAddr())
		if l.shares.Reserve(from, 1) == nil {
			return conn{c, sync.OnceFunc(func() { l.shares.Release(from, 1) })}, nil
		}
		_ = c.Close()
	}
}

// conn is an accepted connection.
type conn struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c conn) Close() error {
	c.release()
	return c.Conn.Close()
}

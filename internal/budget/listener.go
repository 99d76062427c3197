package budget

import (
	"net"
	"sync"
)

// Limit returns a listener that closes the connections of l beyond the shares, of which a connection uses 1 until it is closed. They are
// closed at once, so that a client that opens all it can does not make others wait.
func (s *Shares) Limit(l net.Listener) net.Listener { return listener{l, s} }

type listener struct {
	net.Listener
	shares *Shares
}

func (l listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := PeerOf(c.RemoteAddr())
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

func (c conn) Close() error {
	c.release()
	return c.Conn.Close()
}

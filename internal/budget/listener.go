package budget

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Limit returns a listener that closes the connections of l beyond the shares, of which a connection uses 1 until it is closed. They are
// closed at once, so that a client that opens all it can does not make others wait. If the budget is used up, a new connection takes the place of
// the oldest of the address with the most, unless its own address would have as many then.
func (s *Shares) Limit(l net.Listener) net.Listener {
	return &listener{Listener: l, shares: s, open: make(map[netip.Prefix][]*conn)}
}

type listener struct {
	net.Listener
	shares *Shares

	mu   sync.Mutex               // guards open
	open map[netip.Prefix][]*conn // the oldest first
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := PeerOf(c.RemoteAddr())
		err = l.shares.Reserve(from, 1)
		if errors.Is(err, ErrTotal) {
			if victim := l.victim(from); victim != nil {
				_ = victim.Close()
				err = l.shares.Reserve(from, 1)
			}
		}
		if err == nil {
			return l.add(c, from), nil
		}
		_ = c.Close()
	}
}

// victim returns the connection that is closed for a new one of an address; nil if there is none.
func (l *listener) victim(from netip.Prefix) (oldest *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := len(l.open[from]) + 1
	for _, all := range l.open {
		if len(all) > most {
			most, oldest = len(all), all[0]
		}
	}
	return oldest
}

func (l *listener) add(c net.Conn, from netip.Prefix) *conn {
	n := &conn{Conn: c}
	n.release = sync.OnceFunc(func() {
		l.mu.Lock()
		l.open[from] = slices.DeleteFunc(l.open[from], func(o *conn) bool { return o == n })
		if len(l.open[from]) == 0 {
			delete(l.open, from)
		}
		l.mu.Unlock()
		l.shares.Release(from, 1)
	})
	l.mu.Lock()
	l.open[from] = append(l.open[from], n)
	l.mu.Unlock()
	return n
}

// conn is an accepted connection.
type conn struct {
	net.Conn
	release func()
}

func (c *conn) Close() error {
	c.release()
	return c.Conn.Close()
}

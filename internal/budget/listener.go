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
// the oldest of the address with the most, unless its own address would have as many then. Of addresses with as many, it is the one with the
// oldest connection.
func (s *Shares) Limit(l net.Listener) net.Listener {
	return &listener{Listener: l, shares: s}
}

type listener struct {
	net.Listener
	shares *Shares

	mu   sync.Mutex // guards open
	open []*conn    // the oldest first
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
func (l *listener) victim(from netip.Prefix) *conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := Displaced(l.open, func(c *conn) netip.Prefix { return c.from }, from); i >= 0 {
		return l.open[i]
	}
	return nil
}

// Displaced returns the index of what gives way to a new one of an address, of all that there are, the oldest first: the oldest of the address with
// the most, of several the one with the oldest. It is -1 if the new one's address would have as many.
func Displaced[T any](all []T, addressOf func(T) netip.Prefix, address netip.Prefix) int {
	counts := make(map[netip.Prefix]int)
	for _, one := range all {
		counts[addressOf(one)]++
	}
	displaced, most := -1, counts[address]+1
	for i, one := range all {
		if n := counts[addressOf(one)]; n > most {
			displaced, most = i, n
		}
	}
	return displaced
}

func (l *listener) add(c net.Conn, from netip.Prefix) *conn {
	n := &conn{Conn: c, from: from}
	n.release = sync.OnceFunc(func() {
		l.mu.Lock()
		l.open = slices.DeleteFunc(l.open, func(o *conn) bool { return o == n })
		l.mu.Unlock()
		l.shares.Release(from, 1)
	})
	l.mu.Lock()
	l.open = append(l.open, n)
	l.mu.Unlock()
	return n
}

// conn is an accepted connection.
type conn struct {
	net.Conn
	from    netip.Prefix
	release func()
}

func (c *conn) Close() error {
	c.release()
	return c.Conn.Close()
}

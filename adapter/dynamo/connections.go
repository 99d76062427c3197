package dynamo

import (
	"net"
	"net/netip"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/budget"
)

// LimitConnections returns a listener that closes connections beyond the limits of all and of each address.
func LimitConnections(l net.Listener, registerer prometheus.Registerer) net.Listener {
	total := budget.New("dynamo_connections", maxConnections)
	registerer.MustRegister(budget.Collector{total})
	return limitedListener{l, budget.NewShares(total, maxConnections/2)}
}

type limitedListener struct {
	net.Listener
	shares *budget.Shares
}

// Accept implements net.Listener.
func (l limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		address := addressOf(c.RemoteAddr().String())
		if l.shares.Reserve(address, 1) == nil {
			return limitedConn{c, sync.OnceFunc(func() { l.shares.Release(address, 1) })}, nil
		}
		_ = c.Close()
	}
}

type limitedConn struct {
	net.Conn
	release func()
}

// Close implements net.Conn.
func (c limitedConn) Close() error {
	c.release()
	return c.Conn.Close()
}

// addressOf returns the prefix of a client's IP:PORT.
func addressOf(remote string) netip.Prefix {
	client, _ := netip.ParseAddrPort(remote)
	return budget.AddressOf(client.Addr())
}

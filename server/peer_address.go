package server

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/budget"
)

// peerAddress is an address that clients connect from, and what they have of each
// bounded resource together.
type peerAddress struct {
	prefix      netip.Prefix
	connections atomic.Int64
	watches     atomic.Int64
	reflections atomic.Int64
	arriving    chan struct{} // one for each call whose request is arriving
}

func newPeerAddress(prefix netip.Prefix) *peerAddress {
	return &peerAddress{prefix: prefix, arriving: make(chan struct{}, maxArrivingPerAddress)}
}

// peerOf returns the address that a call came from.
func (s *Server) peerOf(ctx context.Context) *peerAddress {
	if a, ok := addressOf(ctx); ok {
		return a.peer
	}
	return s.unknownPeer
}

// peerPrefix is what clients are told apart by: an IPv4 address, or the /64 of an IPv6
// address, of which whoever has one address has all. What is no IP address is one
// peer.
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
	prefix, _ := ip.Prefix(bits) // the error is that of an invalid address, which is the zero prefix
	return prefix
}

var (
	errAddressShare = errors.New("the peers of one address have as many as they may")
	errAllTaken     = errors.New("all peers together have as many as they may")
)

// quota bounds how many of a resource all peers may have, and those of one address.
// What is granted stays granted until it is released.
type quota struct {
	all     *budget.Budget
	each    int64
	refused prometheus.Counter // because of each; the budget counts the others
}

func newQuota(resource string, all, each int) *quota {
	return &quota{
		all:  budget.New(resource, int64(all)),
		each: int64(each),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kvcast", Subsystem: "server", Name: "address_refused_total",
			Help:        "Requests for a resource that were refused because the peers of one address had their share, by resource.",
			ConstLabels: prometheus.Labels{"resource": resource},
		}),
	}
}

// take takes one, where held is what the address has. The error is errAddressShare or
// errAllTaken.
func (q *quota) take(held *atomic.Int64) error {
	if held.Add(1) > q.each {
		held.Add(-1)
		q.refused.Inc()
		return errAddressShare
	}
	if !q.all.Take(1) {
		held.Add(-1)
		return errAllTaken
	}
	return nil
}

// release returns one that take granted.
func (q *quota) release(held *atomic.Int64) {
	q.all.Release(1)
	held.Add(-1)
}

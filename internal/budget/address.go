package budget

import (
	"errors"
	"net"
	"net/netip"
	"sync"
)

// AddressOf returns the prefix that limits by address count: an IPv4 address, or the /64 of an IPv6
// address, since one host usually has a whole /64. All invalid addresses share the zero prefix.
func AddressOf(ip netip.Addr) netip.Prefix {
	ip = ip.Unmap().WithZone("")
	bits := ip.BitLen()
	if ip.Is6() {
		bits = 64
	}
	prefix, _ := ip.Prefix(bits) // the zero prefix if the address is invalid
	return prefix
}

// PeerOf returns the AddressOf a connection's remote address. All connections that are not TCP share the zero prefix.
func PeerOf(remote net.Addr) netip.Prefix {
	tcp, ok := remote.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return AddressOf(tcp.AddrPort().Addr())
}

// Errors of Shares.Reserve.
var (
	ErrShare = errors.New("the share of the address is used up")
	ErrTotal = errors.New("the total budget is used up")
)

// Shares bounds how much of a budget each client address uses. It is safe for concurrent use.
type Shares struct {
	total      *Budget
	perAddress int64

	mu   sync.Mutex // guards used
	used map[netip.Prefix]int64
}

// NewShares returns the shares of a budget.
func NewShares(total *Budget, perAddress int64) *Shares {
	return &Shares{total: total, perAddress: perAddress, used: make(map[netip.Prefix]int64)}
}

// Reserve reserves n units for an address unless that exceeds its share or the budget. Both refusals count as those of the budget.
func (s *Shares) Reserve(address netip.Prefix, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > s.perAddress-s.used[address] {
		s.total.refused.Add(1)
		return ErrShare
	}
	if !s.total.Reserve(n) {
		return ErrTotal
	}
	s.used[address] += n
	return nil
}

// Release returns n reserved units of an address.
func (s *Shares) Release(address netip.Prefix, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total.Release(n)
	if s.used[address] -= n; s.used[address] == 0 {
		delete(s.used, address)
	}
}

package budget

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
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

	mu      sync.Mutex // guards all below
	used    map[netip.Prefix]int64
	waiting []*claim // of Acquire, in the order of the calls
}

// claim is a call of Acquire that waits.
type claim struct {
	address netip.Prefix
	n       int64
	granted chan struct{}
}

// NewShares returns the shares of a budget. A budget of nil has no limit beside the shares.
func NewShares(total *Budget, perAddress int64) *Shares {
	return &Shares{total: total, perAddress: perAddress, used: make(map[netip.Prefix]int64)}
}

// Reserve reserves n units for an address unless that exceeds its share or the budget. Both refusals count as those of the budget.
func (s *Shares) Reserve(address netip.Prefix, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reserve(address, n)
}

func (s *Shares) reserve(address netip.Prefix, n int64) error {
	if n > s.perAddress-s.used[address] {
		s.total.refuse()
		return ErrShare
	}
	if !s.total.Reserve(n) {
		return ErrTotal
	}
	s.used[address] += n
	return nil
}

// Acquire reserves n units for an address as soon as that exceeds neither its share nor the budget, of which all units must be
// reserved by these Shares. Of the calls for which there is room, that of the address which uses the least comes next, of several the
// first. The error is that of ctx. There may be as many calls as the caller has goroutines.
func (s *Shares) Acquire(ctx context.Context, address netip.Prefix, n int64) error {
	c := &claim{address, n, make(chan struct{})}
	s.mu.Lock()
	s.waiting = append(s.waiting, c)
	s.grant()
	s.mu.Unlock()
	select {
	case <-c.granted:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.waiting, c); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
	} else {
		s.release(address, n)
	}
	return ctx.Err()
}

// grant grants the claims for which there is room.
func (s *Shares) grant() {
	for {
		next := -1
		for i, c := range s.waiting {
			fits := c.n <= s.perAddress-s.used[c.address] && c.n <= s.total.Room()
			if fits && (next < 0 || s.used[c.address] < s.used[s.waiting[next].address]) {
				next = i
			}
		}
		if next < 0 || s.reserve(s.waiting[next].address, s.waiting[next].n) != nil {
			return
		}
		close(s.waiting[next].granted)
		s.waiting = slices.Delete(s.waiting, next, next+1)
	}
}

// Waiting reports whether a call of Acquire waits.
func (s *Shares) Waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting) > 0
}

// Full reports whether an address uses its share.
func (s *Shares) Full(address netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used[address] >= s.perAddress
}

// Release returns n reserved units of an address.
func (s *Shares) Release(address netip.Prefix, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release(address, n)
}

func (s *Shares) release(address netip.Prefix, n int64) {
	s.total.Release(n)
	if s.used[address] -= n; s.used[address] == 0 {
		delete(s.used, address)
	}
	s.grant()
}

package budget

import (
	"cmp"
	"context"
	"errors"
	"math"
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

// ClientOf returns the AddressOf a client's IP:PORT; the zero prefix if it is none.
func ClientOf(remote string) netip.Prefix {
	client, _ := netip.ParseAddrPort(remote)
	return AddressOf(client.Addr())
}

// Errors of Shares.
var (
	ErrShare   = errors.New("the share of the address is used up")
	ErrTotal   = errors.New("the total budget is used up")
	ErrWaiting = errors.New("too many calls wait")
)

// Shares bounds how much of a budget each client address uses. It is safe for concurrent use.
type Shares struct {
	total      *Budget
	perAddress int64
	maxWaiting int

	mu      sync.Mutex // guards all below
	used    map[netip.Prefix]int64
	queues  map[netip.Prefix]*queue // of the addresses for which a call of Acquire waits
	waiting int                     // such calls
	calls   uint64                  // such calls so far
	grants  uint64                  // to such calls so far
}

// queue is the calls of Acquire that wait for an address.
type queue struct {
	claims  []*claim // in the order of the calls
	granted uint64   // the number of the last grant; 0: none, since the address has a queue
}

// claim is a call of Acquire that waits.
type claim struct {
	number uint64 // of the call
	n      int64
	done   chan error // receives nil when the units are reserved, or ErrWaiting
}

// NewShares returns the shares of a budget. A budget of nil has no limit beside the shares.
func NewShares(total *Budget, perAddress int64) *Shares {
	return &Shares{total: total, perAddress: perAddress, maxWaiting: math.MaxInt, used: make(map[netip.Prefix]int64), queues: make(map[netip.Prefix]*queue)}
}

// LimitWaiting bounds the calls of Acquire that wait, and returns s. It must be called before s is used.
func (s *Shares) LimitWaiting(n int) *Shares {
	s.maxWaiting = n
	return s
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

// fits reports whether n units can be reserved.
func (s *Shares) fits(address netip.Prefix, n int64) bool {
	return n <= s.perAddress-s.used[address] && n <= s.total.Room()
}

// TryAcquire reserves n units for an address if no call of Acquire waits and there is room.
func (s *Shares) TryAcquire(address netip.Prefix, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting == 0 && s.fits(address, n) && s.reserve(address, n) == nil
}

// Acquire reserves n units for an address as soon as that exceeds neither its share nor the budget, of which all units must be
// reserved by these Shares. Of the addresses whose first call has room, the one that uses the least comes next; of several the one whose turn was
// longest ago, and of several the first. If more calls than LimitWaiting says wait, the last call of the address with the most gives up its place, or else this one,
// with ErrWaiting. Otherwise the error is that of ctx.
func (s *Shares) Acquire(ctx context.Context, address netip.Prefix, n int64) error {
	s.mu.Lock()
	s.calls++
	c := &claim{s.calls, n, make(chan error, 1)}
	q := s.queues[address]
	if q == nil {
		q = new(queue)
		s.queues[address] = q
	}
	q.claims, s.waiting = append(q.claims, c), s.waiting+1
	s.grant()
	if s.waiting > s.maxWaiting {
		s.displace(address)
	}
	s.mu.Unlock()
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(q.claims, c); i >= 0 {
		s.remove(address, q, i)
	} else if err := <-c.done; err != nil {
		return err
	} else {
		s.release(address, n)
	}
	return ctx.Err()
}

// remove removes a call from the queue of its address.
func (s *Shares) remove(address netip.Prefix, q *queue, i int) *claim {
	c := q.claims[i]
	q.claims, s.waiting = slices.Delete(q.claims, i, i+1), s.waiting-1
	if len(q.claims) == 0 {
		delete(s.queues, address)
	}
	return c
}

// displace refuses the last call of the address with the most that wait; of several that of an address whose call is given, or else of any.
func (s *Shares) displace(last netip.Prefix) {
	most := s.queues[last]
	for address, q := range s.queues {
		if len(q.claims) > len(most.claims) {
			last, most = address, q
		}
	}
	s.remove(last, most, len(most.claims)-1).done <- ErrWaiting
}

// grant grants the claims for which there is room.
func (s *Shares) grant() {
	for s.waiting > 0 {
		var (
			next  netip.Prefix
			first *queue
		)
		for address, q := range s.queues {
			if s.fits(address, q.claims[0].n) && (first == nil || s.before(address, q, next, first)) {
				next, first = address, q
			}
		}
		if first == nil || s.reserve(next, first.claims[0].n) != nil {
			return
		}
		s.grants++
		first.granted = s.grants
		s.remove(next, first, 0).done <- nil
	}
}

// before reports whether address a comes before b.
func (s *Shares) before(a netip.Prefix, of *queue, b netip.Prefix, other *queue) bool {
	return cmp.Or(cmp.Compare(s.used[a], s.used[b]), cmp.Compare(of.granted, other.granted), cmp.Compare(of.claims[0].number, other.claims[0].number)) < 0
}

// Waiting returns the number of calls of Acquire that wait.
func (s *Shares) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting
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

package ledger

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

const (
	// maxPart is which part of what usual messages share one may have.
	maxPart = 8
	// fairGrace is how many times longer an address may be stalled that uses no more than another: a lost packet takes 200 ms (Linux's
	// TCP_RTO_MIN).
	fairGrace = 8
)

// state is what a Ledger decides by. Its methods take the time, and call nothing but evict of claims.
type state struct {
	limit   int64
	reserve int64 // of limit, for one large message
	grace   time.Duration
	used    int64
	owners  map[netip.Prefix]*owner
	waiting []*Claim // in the order of their requests
	// incomplete are the granted claims whose message has not arrived.
	incomplete []*Claim
	large      *Claim // that has the reserve; nil if none has
}

// owner is an address with claims.
type owner struct {
	used   int64
	claims int // granted and waiting
}

func (s *state) request(c *Claim) {
	o := s.owners[c.address]
	if o == nil {
		o = new(owner)
		s.owners[c.address] = o
	}
	o.claims++
	s.waiting = append(s.waiting, c)
}

func (s *state) extend(c *Claim, bytes int64) bool {
	more := bytes - c.bytes
	isReserved := (s.large == nil || s.large == c) && (bytes <= s.reserve || s.reserve == s.limit)
	switch {
	case c != s.large && !s.isLarge(bytes) && more <= s.room():
	case isReserved:
		s.large = c
	default:
		return false
	}
	s.change(c, more)
	return true
}

func (s *state) shrink(c *Claim, bytes int64) {
	s.change(c, min(0, max(1, bytes)-c.bytes))
	if c == s.large && c.bytes <= s.room() {
		s.large = nil
	}
}

// change changes the bytes of a granted claim.
func (s *state) change(c *Claim, by int64) {
	c.bytes += by
	s.used += by
	s.owners[c.address].used += by
}

func (s *state) complete(c *Claim) {
	c.incomplete = false
	s.incomplete = without(s.incomplete, c)
}

func (s *state) release(c *Claim) {
	o := s.owners[c.address]
	if i := slices.Index(s.waiting, c); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
	} else {
		s.change(c, -c.bytes)
		s.incomplete = without(s.incomplete, c)
	}
	if o.claims--; o.claims == 0 {
		delete(s.owners, c.address)
	}
	if s.large == c {
		s.large = nil
	}
}

func without(all []*Claim, c *Claim) []*Claim {
	if i := slices.Index(all, c); i >= 0 {
		all = slices.Delete(all, i, i+1)
	}
	return all
}

// room returns the bytes that usual messages do not use of what they share.
func (s *state) room() int64 {
	room := s.limit - s.reserve - s.used
	if s.large != nil {
		room += s.large.bytes
	}
	return room
}

// isLarge reports whether a claim of so many bytes needs the reserve.
func (s *state) isLarge(bytes int64) bool { return bytes > (s.limit-s.reserve)/maxPart }

// settle grants the claims for which there is memory, and evicts messages for the next ones.
func (s *state) settle(now time.Time) {
	for next := s.next(true); next != nil; next = s.next(true) {
		if s.large != nil {
			s.evictStalled(now, true, 1)
			break
		}
		s.large = next
		s.grant(next, now)
	}
	for next := s.next(false); next != nil; next = s.next(false) {
		if missing := next.bytes - s.room(); missing > 0 {
			s.evictStalled(now, false, missing)
			break
		}
		s.grant(next, now)
	}
}

// next returns the large or usual message that is next of those that wait; nil if there is none.
func (s *state) next(large bool) (next *Claim) {
	for _, c := range s.waiting {
		if s.isLarge(c.bytes) == large && (next == nil || s.compare(c, next) < 0) {
			next = c
		}
	}
	return next
}

// compare returns a negative number if a claim is granted before another that was made before.
func (s *state) compare(a, b *Claim) int {
	o, p := s.owners[a.address], s.owners[b.address]
	return cmp.Or(cmp.Compare(o.used, p.used), cmp.Compare(o.claims, p.claims))
}

func (s *state) grant(c *Claim, now time.Time) {
	s.waiting = without(s.waiting, c)
	s.used += c.bytes
	s.owners[c.address].used += c.bytes
	c.since, c.before = now, c.arrived.Load()
	if c.evict != nil {
		c.incomplete = true
		s.incomplete = append(s.incomplete, c)
	}
	close(c.granted)
}

// evictStalled evicts stalled messages, of that which has the reserve or of the others, until so many bytes will be free, the slowest first.
func (s *state) evictStalled(now time.Time, large bool, missing int64) {
	for _, c := range s.incomplete {
		if c.evicted && (c == s.large) == large {
			missing -= c.bytes // until its connection has ended, it is counted
		}
	}
	for fair := s.leastWill(large); missing > 0; {
		var slowest *Claim
		for _, c := range s.incomplete {
			if (c == s.large) == large && s.isStalled(c, fair, now) && (slowest == nil || c.rate(now) < slowest.rate(now)) {
				slowest = c
			}
		}
		if slowest == nil {
			return
		}
		if slowest.evicted = slowest.evict(); slowest.evicted {
			missing -= slowest.bytes
		} else { // it begins anew
			slowest.since, slowest.before = now, slowest.arrived.Load()
		}
	}
}

// leastWill returns how many bytes the address of a claim that waits will use when it is granted: the least of all.
func (s *state) leastWill(large bool) int64 {
	least := s.limit
	for _, c := range s.waiting {
		if s.isLarge(c.bytes) == large {
			least = min(least, s.owners[c.address].used+c.bytes)
		}
	}
	return least
}

// isStalled reports whether a message is stalled, and not evicted. If it is not, its next grace time begins. That is longer for an address that uses
// no more than is fair.
func (s *state) isStalled(c *Claim, fair int64, now time.Time) bool {
	grace := s.grace
	if s.owners[c.address].used <= fair {
		grace *= fairGrace
	}
	if !c.incomplete || c.evicted || now.Sub(c.since) < grace {
		return false
	}
	if c.rate(now) < minRate {
		return true
	}
	c.since, c.before = now, c.arrived.Load()
	return false
}

// rate returns how many bytes a second have arrived in the grace time, and since then.
func (c *Claim) rate(now time.Time) float64 {
	return float64(c.arrived.Load()-c.before) / now.Sub(c.since).Seconds()
}

// Package ledger bounds the memory of the messages that several peers send.
//
// In: claims for the memory of messages, before their bytes are read. Out: grants, and evictions of messages that are incomplete.
// The granted claims have no more bytes together than the limit, unless there is one alone.
package ledger

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Ledger grants the memory of messages: from before their bytes are read until they have been processed. A
// connection is not read while it waits for memory. A Ledger is safe for concurrent use.
//
// If memory is exhausted, the address that uses the least comes next, and messages that are incomplete are evicted: of an address that uses
// more than a quarter and than the one that waits, or after a time. The memory of messages that wait to be processed is freed by that only.
type Ledger struct {
	limit int64

	mu      sync.Mutex // guards all below, and the claims
	used    int64
	owners  map[netip.Prefix]*owner
	waiting []*Claim // in the order of their requests
}

// owner is an address with claims.
type owner struct {
	used       int64
	claims     int      // granted and waiting
	incomplete []*Claim // granted, the oldest first
}

// Claim is the memory of one message.
type Claim struct {
	address netip.Prefix
	bytes   int64
	granted chan struct{} // closed when it is granted
	evict   func()        // nil if the message is complete
	since   time.Time     // when it was granted
	evicted bool
}

// NewClaim returns a claim for the memory of a message from an address. evict is called at most once, when the message is to be
// given up because it is incomplete; it must not block. It is nil for a message that is complete.
func NewClaim(address netip.Prefix, bytes int64, evict func()) *Claim {
	return &Claim{address: address, bytes: bytes, granted: make(chan struct{}), evict: evict}
}

// Granted is closed when the claim is granted.
func (c *Claim) Granted() <-chan struct{} { return c.granted }

// New returns a Ledger that grants claims of so many bytes together.
func New(limit int64) *Ledger {
	return &Ledger{limit: limit, owners: make(map[netip.Prefix]*owner)}
}

// Used returns the bytes of the granted claims.
func (l *Ledger) Used() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used
}

// Waiting returns the number of claims that wait.
func (l *Ledger) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting)
}

// Request makes a claim, which may have to wait.
func (l *Ledger) Request(c *Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.owners[c.address]
	if o == nil {
		o = new(owner)
		l.owners[c.address] = o
	}
	o.claims++
	l.waiting = append(l.waiting, c)
	l.grant()
}

// Extend raises the bytes of a granted claim, unless that exceeds the limit. It does not wait, because
// others may wait for the memory that the claim has.
func (l *Ledger) Extend(c *Claim, bytes int64) bool {
	if bytes <= c.bytes {
		return true // the owner of the claim alone changes it
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	more := bytes - c.bytes
	if l.used+more > l.limit && l.used > c.bytes {
		return false
	}
	l.used += more
	l.owners[c.address].used += more
	c.bytes = bytes
	l.grant() // another address may come next now
	return true
}

// Shrink lowers the bytes of a granted claim, to 1 at least.
func (l *Ledger) Shrink(c *Claim, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	less := max(0, c.bytes-bytes)
	l.used -= less
	l.owners[c.address].used -= less
	c.bytes -= less
	l.grant()
}

// Complete reports that the message of a granted claim has arrived.
func (l *Ledger) Complete(c *Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owners[c.address].remove(c)
}

// Release ends a claim, granted or waiting.
func (l *Ledger) Release(c *Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.owners[c.address]
	if i := slices.Index(l.waiting, c); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
	} else {
		l.used -= c.bytes
		o.used -= c.bytes
		o.remove(c)
	}
	if o.claims--; o.claims == 0 {
		delete(l.owners, c.address)
	}
	l.grant()
}

func (o *owner) remove(c *Claim) {
	if i := slices.Index(o.incomplete, c); i >= 0 {
		o.incomplete = slices.Delete(o.incomplete, i, i+1)
	}
}

// grant grants the claims for which there is memory, and makes room for the next one.
func (l *Ledger) grant() {
	for len(l.waiting) > 0 {
		at, o := 0, l.owners[l.waiting[0].address]
		for i, c := range l.waiting {
			if other := l.owners[c.address]; other.used < o.used {
				at, o = i, other
			}
		}
		next := l.waiting[at]
		if l.used > 0 && l.used+next.bytes > l.limit {
			l.makeRoom(next)
			return
		}
		l.waiting = slices.Delete(l.waiting, at, at+1)
		o.used += next.bytes
		l.used += next.bytes
		if next.evict != nil {
			o.incomplete = append(o.incomplete, next)
		}
		next.since = time.Now()
		close(next.granted)
	}
}

// makeRoom evicts messages of addresses that use more than a quarter, and more than the address of a claim will use when it is granted.
func (l *Ledger) makeRoom(c *Claim) {
	fair := l.owners[c.address].used + c.bytes
	missing := l.used + c.bytes - l.limit
	for _, o := range l.owners {
		for _, i := range o.incomplete {
			if i.evicted {
				missing -= i.bytes // until its connection has ended, it is counted
			}
		}
	}
	for missing > 0 {
		var largest *owner
		for _, o := range l.owners {
			if o.evictable() != nil && (largest == nil || o.used > largest.used) {
				largest = o
			}
		}
		if largest == nil || largest.used <= max(fair, l.limit/4) {
			return
		}
		missing -= l.evict(largest.evictable())
	}
}

// evictable returns the oldest message that is incomplete and not evicted; nil if there is none.
func (o *owner) evictable() *Claim {
	i := slices.IndexFunc(o.incomplete, func(c *Claim) bool { return !c.evicted })
	if i < 0 {
		return nil
	}
	return o.incomplete[i]
}

func (l *Ledger) evict(c *Claim) int64 {
	c.evicted = true
	c.evict()
	return c.bytes
}

// EvictSince evicts the message that is incomplete for the longest time, if it was granted before a time.
func (l *Ledger) EvictSince(before time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var oldest *Claim
	for _, o := range l.owners {
		if c := o.evictable(); c != nil && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	if oldest != nil && oldest.since.Before(before) {
		l.evict(oldest)
	}
}

package native

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

// ledger grants the memory of large messages: from before their bytes are read until they have been
// processed. A connection is not read while it waits for memory.
//
// If memory is exhausted, the address that uses the least comes next, and messages that are incomplete
// are evicted: of an address that uses more than a quarter and than the one that waits, or after a
// time. The memory of messages that wait to be processed is freed by that only.
type ledger struct {
	limit int64

	mu      sync.Mutex // guards all below, and the claims
	used    int64
	owners  map[netip.Prefix]*owner
	waiting []*claim // in the order of their requests
}

// owner is an address with claims.
type owner struct {
	used       int64
	claims     int      // granted and waiting
	incomplete []*claim // granted, the oldest first
}

// claim is the memory of one message.
type claim struct {
	address netip.Prefix
	bytes   int64
	granted chan struct{} // closed when it is granted
	evict   func()        // must not block; called at most once
	since   time.Time     // when it was granted
	evicted bool
}

func newLedger(limit int64) *ledger {
	return &ledger{limit: limit, owners: make(map[netip.Prefix]*owner)}
}

// request makes a claim, which may have to wait.
func (l *ledger) request(c *claim) {
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

// extend raises the bytes of a granted claim, unless that exceeds the limit. It does not wait, because
// others may wait for the memory that the claim has.
func (l *ledger) extend(c *claim, bytes int64) bool {
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

// complete reports that the message of a granted claim has arrived.
func (l *ledger) complete(c *claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owners[c.address].remove(c)
}

// release ends a claim, granted or waiting.
func (l *ledger) release(c *claim) {
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

func (o *owner) remove(c *claim) {
	if i := slices.Index(o.incomplete, c); i >= 0 {
		o.incomplete = slices.Delete(o.incomplete, i, i+1)
	}
}

// grant grants the claims for which there is memory, and makes room for the next one.
func (l *ledger) grant() {
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
		o.incomplete = append(o.incomplete, next)
		next.since = time.Now()
		close(next.granted)
	}
}

// makeRoom evicts messages of addresses that use more than a quarter, and more than the address of a
// claim will use when it is granted.
func (l *ledger) makeRoom(c *claim) {
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
func (o *owner) evictable() *claim {
	i := slices.IndexFunc(o.incomplete, func(c *claim) bool { return !c.evicted })
	if i < 0 {
		return nil
	}
	return o.incomplete[i]
}

func (l *ledger) evict(c *claim) int64 {
	c.evicted = true
	c.evict()
	return c.bytes
}

// evictSince evicts the message that is incomplete for the longest time, if it was granted before a
// time.
func (l *ledger) evictSince(before time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var oldest *claim
	for _, o := range l.owners {
		if c := o.evictable(); c != nil && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	if oldest != nil && oldest.since.Before(before) {
		l.evict(oldest)
	}
}

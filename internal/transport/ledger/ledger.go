// Package ledger bounds the memory of the messages that several peers send.
//
// In: claims for the memory of messages, before their bytes are read. Out: grants, and evictions of messages that are incomplete. All
// granted claims together have at most as many bytes as the limit. A claim of more than that is granted only while there is no other.
//
//   - So much of the limit as the largest message needs is reserved for one large message at a time. Others, of at most an eighth of the
//     rest, share the rest. So a granted claim never waits for another, and large messages do not keep memory from usual ones.
//   - Of the claims that wait, that comes next whose address uses the least; of several that of the address with the fewest claims, and then
//     the first. What it needs does not count, so that small messages do not keep a large one waiting for ever.
//   - A message is stalled if it has grown by less than minRate in a grace time. While others wait, stalled messages are evicted, the slowest
//     first. An address that uses no more than another one that waits has more time.
//
// The memory of messages that wait to be processed is freed by that only.
package ledger

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// minRate is how many bytes a second a message brings that is not stalled.
const minRate = 1 << 20

// Ledger grants the memory of messages until they have been processed. A connection is not read while it waits for memory. A Ledger is safe
// for concurrent use.
type Ledger struct {
	grace func() time.Duration

	mu    sync.Mutex // guards all below, and the claims
	state state
	timer *time.Timer // set while claims wait
}

// Claim is the memory of one message.
type Claim struct {
	address netip.Prefix
	bytes   int64
	evict   func() bool
	arrived atomic.Int64  // bytes of the message that are there
	granted chan struct{} // closed when it is granted

	// since is when the grace time began, and before how many bytes were there at that time.
	since      time.Time
	before     int64
	incomplete bool // it is granted, and its message has not arrived
	evicted    bool
}

// NewClaim returns a claim for the memory of a message from an address. evict is called when the message is to be given up because it is
// incomplete, and reports whether it is: it refuses if bytes of the message are there that were not read. It must not block. It is nil for a
// message that is complete.
func NewClaim(address netip.Prefix, bytes int64, evict func() bool) *Claim {
	return &Claim{address: address, bytes: bytes, evict: evict, granted: make(chan struct{})}
}

// Granted is closed when the claim is granted.
func (c *Claim) Granted() <-chan struct{} { return c.granted }

// Arrived sets how many bytes of the message are there.
func (c *Claim) Arrived(bytes int) { c.arrived.Store(int64(bytes)) }

// New returns a Ledger that grants claims of so many bytes together. largest is the most that the claim of one message needs, and grace returns
// the time in which a message must bring bytes while others wait.
func New(limit, largest int64, grace func() time.Duration) *Ledger {
	return &Ledger{grace: grace, state: state{
		limit: limit, reserve: min(limit, largest), grace: grace(), owners: make(map[netip.Prefix]*owner),
	}}
}

// Used returns the bytes of the granted claims.
func (l *Ledger) Used() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.used
}

// Waiting returns the number of claims that wait.
func (l *Ledger) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.state.waiting)
}

// Request makes a claim, which may have to wait.
func (l *Ledger) Request(c *Claim) { l.change(func() { l.state.request(c) }) }

// Extend raises the bytes of a granted claim. It returns false at once if there is no memory for that: a claim that has memory and waits for
// more could keep others waiting for ever.
func (l *Ledger) Extend(c *Claim, bytes int64) (ok bool) {
	if bytes <= c.bytes {
		return true // the owner of the claim alone changes it
	}
	l.change(func() { ok = l.state.extend(c, bytes) })
	return ok
}

// Shrink lowers the bytes of a granted claim, to 1 at least.
func (l *Ledger) Shrink(c *Claim, bytes int64) { l.change(func() { l.state.shrink(c, bytes) }) }

// Complete reports that the message of a granted claim has arrived.
func (l *Ledger) Complete(c *Claim) { l.change(func() { l.state.complete(c) }) }

// Release ends a claim, granted or waiting.
func (l *Ledger) Release(c *Claim) { l.change(func() { l.state.release(c) }) }

// change changes the state, and makes the grants and evictions that follow.
func (l *Ledger) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	l.settle(time.Now())
}

// settle makes the grants and evictions that are due, and sets the timer for those that time brings.
func (l *Ledger) settle(now time.Time) {
	if len(l.state.waiting) > 0 {
		l.state.grace = l.grace()
	}
	l.state.settle(now)
	switch {
	case len(l.state.waiting) == 0 && l.timer != nil:
		l.timer.Stop()
		l.timer = nil
	case len(l.state.waiting) > 0 && l.timer == nil:
		l.timer = time.AfterFunc(l.state.grace, l.tick)
	}
}

func (l *Ledger) tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = nil // it has fired; if it was stopped too late, and another was set, both run until nobody waits
	l.settle(time.Now())
}

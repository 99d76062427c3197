package jetstream

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvcast/kvcast/internal/journal"
)

// chain has the appends of one worker that this process owns, in a stream that others append to as well. At most one unit
// is published and not delivered: a message, or an atomic batch of several. It carries the seq that the worker's last
// entry must have, so that it is stored only if no other process has appended for the worker, and at most once, however often
// it is published. A delivery by the stream's consumer acknowledges it, and only a delivery does.
//
// A chain decides, and its shared journal does what it says.
type chain struct {
	worker  string
	model   string
	subject string
	claim   uint64          // seq of the ownership record that made this process the owner, or of its last renewal
	last    uint64          // seq of the worker's last entry
	source  *journal.Source // of the appends; nil before the first
	// appends are those that are not delivered, oldest first. appends[:unit] are published as one. appends[:sent] were
	// published in any unit: an earlier, larger one may be stored after all.
	appends []*inFlight
	unit    int
	sent    int
	batch   bool      // the unit was published as an atomic batch
	number  uint64    // of the unit
	since   time.Time // when the unit was first published, or the last append of it was delivered
	// published is when the unit was last published.
	published time.Time
	singly    int // number of appends to publish one at a time, since the servers have refused a batch
	// renewing reports whether a renewed ownership record is among the appends.
	renewing bool
	// err is why later appends fail: one before them was not started.
	err error
}

// isReady reports whether there is something to publish.
func (c *chain) isReady() bool { return c.unit == 0 && len(c.appends) > 0 }

// next begins a unit of at most limit appends.
func (c *chain) next(limit int, number uint64, now time.Time) []*inFlight {
	if c.singly > 0 {
		limit = 1
		c.singly--
	}
	c.unit, c.number, c.published = min(limit, len(c.appends)), number, now
	if c.sent == 0 { // else it is published again, which is no progress
		c.since = now
	}
	c.batch, c.sent = c.unit > 1, max(c.sent, c.unit)
	return c.appends[:c.unit]
}

// delivered removes and returns the append that a message of the worker is, which has a seq. It is a journal.ErrFenced if this process has not
// published it: only another owner may do so, after a record of its own.
func (c *chain) delivered(m *nats.Msg, seq uint64, now time.Time) (*inFlight, error) {
	if c.sent == 0 || !c.appends[0].equal(m.Subject, m.Header, m.Data) {
		return nil, fmt.Errorf("%w: this instance has not written entry %d of worker %q", journal.ErrFenced, seq, c.worker)
	}
	a := c.appends[0]
	c.appends[0] = nil
	c.appends, c.unit, c.sent = c.appends[1:], max(c.unit-1, 0), c.sent-1
	c.last, c.since = seq, now
	if a.isOwnership {
		c.claim, c.renewing = seq, false
	}
	return a, nil
}

// overtaken is called for a message of the worker that is no entry. It is not stored after what is published, which would have been delivered
// before, so the stream refuses that: all is published again.
func (c *chain) overtaken(seq uint64) { c.last, c.unit, c.sent = seq, 0, 0 }

// refused makes the unit be published again, and one append at a time if it was a batch.
func (c *chain) refused() {
	if c.batch {
		c.singly = c.unit
	}
	c.unit = 0
}

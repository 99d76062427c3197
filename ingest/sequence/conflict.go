package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// conflictTimeout is how long one of two publishers must be silent for the other to be
// the only one again.
const conflictTimeout = time.Minute

// former is where the seqs were before they jumped back, or ahead over a gap, and the
// incarnation that was read then. A publisher that continues there is a second one.
type former struct {
	last        uint64
	incarnation incarnation
	known       bool
}

// continuesAt reports whether seq is the one after the last.
func (f *former) continuesAt(seq uint64) bool { return f.known && seq > f.last && seq-f.last == 1 }

// names reports whether a batch names the former incarnation.
func (f *former) names(b *Batch) bool { return f.known && f.incarnation.matches(b) }

// conflict tracks two publishers that use one topic and rank. Their batches cannot be put
// in order, and neither is a restart of the other.
type conflict struct {
	runs [2]run
}

// run is the batches of one of the two.
type run struct {
	last       uint64
	at         time.Time
	connection ConnectionID // 0 where both use one connection
}

// record adds a batch to the run that it belongs to.
func (c *conflict) record(now time.Time, seq uint64, via ConnectionID) {
	i, ok := c.runOf(via)
	if !ok {
		i = c.nearest(seq)
	}
	c.runs[i].last, c.runs[i].at = seq, now
}

// runOf returns the run that uses a connection. ok is false where none is known to.
func (c *conflict) runOf(via ConnectionID) (i int, ok bool) {
	for i := range c.runs {
		if via != 0 && c.runs[i].connection == via {
			return i, true
		}
	}
	return 0, false
}

// nearest returns the run whose last seq is the nearest below seq, or of two such the
// one that has been silent for longer.
func (c *conflict) nearest(seq uint64) (i int) {
	switch above0, above1 := seq-c.runs[0].last, seq-c.runs[1].last; {
	case above1 < above0, above1 == above0 && c.runs[1].at.Before(c.runs[0].at):
		return 1
	default:
		return 0
	}
}

// survivor returns the last seq of the only run that is left. ok is false while both are
// active.
func (c *conflict) survivor(now time.Time) (last uint64, ok bool) {
	for i := range c.runs {
		if now.Sub(c.runs[i].at) > conflictTimeout {
			return c.runs[1-i].last, true
		}
	}
	return 0, false
}

// lastBy returns the last seq of the run that uses a connection, or else of the one that
// was active last.
func (c *conflict) lastBy(via ConnectionID) uint64 {
	i, ok := c.runOf(via)
	if !ok && c.runs[1].at.After(c.runs[0].at) {
		i = 1
	}
	return c.runs[i].last
}

// secondPublisher reports whether a batch is of another publisher that is active beside
// the one read last: it continues where seqs or epochs were before they jumped, or has a
// lower seq while the connection of before is still open.
func (m *Machine) secondPublisher(b *Batch) bool {
	if v, _ := m.classify(b); v != verdictRestart {
		return false
	}
	if m.incarnation.contradicts(b) {
		return m.former.names(b)
	}
	return m.former.continuesAt(b.Seq) || m.other.ID != 0
}

// beginConflict reports that two publishers share the topic and rank. The second one is
// at seq.
func (m *Machine) beginConflict(now time.Time, seq uint64) {
	m.emit(Action{Kind: ReportConflict})
	runs := [2]run{{last: m.order.last, at: now}, {last: seq, at: now}}
	if m.other.ID != 0 {
		runs[0].connection, runs[1].connection = m.other.ID, m.current.ID
	}
	m.conflict, m.former = conflict{runs}, former{}
	m.reportGap(seqRange{}, feed.GapAmbiguousPublisher, nil)
	m.endRepair()
	m.state = Conflicted
	m.hasUnbuffered = false
	for m.buffer.head() != nil {
		m.deliverUnordered(m.buffer.pop())
	}
}

// deliverUnordered delivers a batch of either publisher.
func (m *Machine) deliverUnordered(b *Batch) {
	m.conflict.record(b.ReceivedAt, b.Seq, m.current.ID)
	if b.Malformed {
		m.emit(Action{Kind: Reject, Batch: b})
		return
	}
	m.emit(Action{Kind: Deliver, Batch: b})
}

// endConflictWith ends a conflict of which one connection is left.
func (m *Machine) endConflictWith(now time.Time) {
	if m.state == Conflicted {
		m.endConflict(now, m.conflict.lastBy(m.current.ID))
	}
}

// endConflict continues with the remaining publisher, whose last seq is given. With a replay
// socket its blocks are replayed; otherwise those of both stay.
func (m *Machine) endConflict(now time.Time, last uint64) {
	m.conflict, m.former = conflict{}, former{}
	m.state = Live
	if m.replayEndpoint != "" {
		m.restart(EvidenceConflict, m.order.last)
		m.former = former{}
		m.startRepair(now, CauseReconnect)
		return
	}
	m.order.reset()
	m.order.skipTo(last)
}

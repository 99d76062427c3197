package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// conflictTimeout is how long one of two publishers in conflict must be silent before the conflict ends.
const conflictTimeout = time.Minute

// former is the last seq and the incarnation before the seqs jumped back, or ahead over a gap. A
// batch that continues there is of a second publisher.
type former struct {
	last        uint64
	incarnation incarnation
	known       bool
}

// continuesAt reports whether seq is the seq after the last.
func (f *former) continuesAt(seq uint64) bool { return f.known && seq > f.last && seq-f.last == 1 }

// matches reports whether a batch identifies the former incarnation.
func (f *former) matches(b *Batch) bool { return f.known && f.incarnation.matches(b) }

// conflict tracks two publishers that use the same topic and rank. Their batches have no common
// order, and neither publisher is a restart of the other.
type conflict struct {
	runs [2]run
}

// run is the sequence of batches of one of the two publishers.
type run struct {
	last       uint64 // seq
	at         time.Time
	connection ConnectionID // 0 if both publishers use one connection
}

// record adds a batch to its publisher's run.
func (c *conflict) record(now time.Time, seq uint64, via ConnectionID) {
	i, ok := c.runOf(via)
	if !ok {
		i = c.nearest(seq)
	}
	c.runs[i].last, c.runs[i].at = seq, now
}

// runOf returns the run that uses a connection. ok is false if none is known to use it.
func (c *conflict) runOf(via ConnectionID) (i int, ok bool) {
	for i := range c.runs {
		if via != 0 && c.runs[i].connection == via {
			return i, true
		}
	}
	return 0, false
}

// nearest returns the run whose last seq is the nearest below seq. If both are equally near, it is the run that has been silent for longer.
func (c *conflict) nearest(seq uint64) (i int) {
	above0, above1 := seq-c.runs[0].last, seq-c.runs[1].last
	if above1 < above0 || above1 == above0 && c.runs[1].at.Before(c.runs[0].at) {
		return 1
	}
	return 0
}

// survivor returns the last seq of the only run that is active. ok is false while both are.
func (c *conflict) survivor(now time.Time) (last uint64, ok bool) {
	for i := range c.runs {
		if now.Sub(c.runs[i].at) > conflictTimeout {
			return c.runs[1-i].last, true
		}
	}
	return 0, false
}

// lastBy returns the last seq of the run that uses a connection. If none is known to use it, it is
// the last seq of the run that was active last.
func (c *conflict) lastBy(via ConnectionID) uint64 {
	i, ok := c.runOf(via)
	if !ok && c.runs[1].at.After(c.runs[0].at) {
		i = 1
	}
	return c.runs[i].last
}

// fromSecondPublisher reports whether a batch with verdictRestart is of a second publisher, active beside the publisher of the last batch:
// it continues the former seqs or incarnation, or the former connection is still open.
func (m *Machine) fromSecondPublisher(b *Batch) bool {
	if m.incarnation.contradicts(b) {
		return m.former.matches(b)
	}
	return m.former.continuesAt(b.Seq) || m.other.ID != 0
}

// beginConflict reports that two publishers share the topic and rank. seq is the last seq of the second publisher.
func (m *Machine) beginConflict(now time.Time, seq uint64) {
	if m.repair != nil && m.repair.request.restoring {
		m.abortRestore() // before the report of the gap, because it empties the view
	}
	m.emit(Action{Kind: ReportConflict})
	m.resetProof()
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
	kind := Deliver
	if b.Malformed {
		kind = Reject
	}
	m.emit(Action{Kind: kind, Batch: b})
}

// disconnectPublisher ends a conflict when one of the two connections is closed.
func (m *Machine) disconnectPublisher(now time.Time) {
	if m.state == Conflicted {
		m.endConflict(now, m.conflict.lastBy(m.current.ID))
	}
}

// endConflict continues with the remaining publisher, whose last seq is given. If it has a replay
// socket, its blocks are replayed; otherwise the blocks of both publishers remain.
func (m *Machine) endConflict(now time.Time, last uint64) {
	m.conflict, m.former = conflict{}, former{}
	m.resetProof()
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

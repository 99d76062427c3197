package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// Arrival takes the next live batch. via is the connection by which it arrived; 0 where
// that is closed and may have been another publisher's.
func (m *Machine) Arrival(now time.Time, via ConnectionID, b *Batch) []Action {
	m.begin()
	m.arriveBy(now, via)
	b.ReceivedAt, b.connection = now, m.connections
	m.heardAt = now
	if m.state == Suspect {
		m.state = m.settledState()
	}
	if m.heartbeat(b) {
		return m.actions
	}
	if m.state == Conflicted {
		if last, ok := m.conflict.survivor(now); ok {
			m.endConflict(now, last)
		}
	}
	if m.state != Conflicted && !m.incarnation.contradicts(b) {
		m.incarnation.learn(b)
	}
	switch {
	case m.state == Conflicted:
		m.deliverUnordered(b)
	case !m.replayable(now) && m.secondPublisher(b):
		m.beginConflict(now, b.Seq)
		m.deliverUnordered(b)
	case !m.replayable(now):
		m.deliverWithoutReplay(b)
	case m.incarnation.contradicts(b):
		m.otherIncarnation(now, b, via == 0)
	case m.repair != nil:
		m.bufferLive(b)
	case m.order.progress == progressUnknown:
		m.bufferLive(b)
		m.startRepair(now, CauseStart)
	case m.possibleRestartReported:
		m.bufferLive(b) // now the replay socket may show whether the engine restarted
		m.startRepair(now, CauseReconnect)
	case !m.deliverInOrder(b):
		m.bufferLive(b)
		m.startRepair(now, CauseGap)
	}
	return m.actions
}

// arriveBy notes the connection of a batch. Where it is the one of before, two publishers
// take turns.
func (m *Machine) arriveBy(now time.Time, via ConnectionID) {
	switch {
	case via == 0 && m.connections == 0:
		m.connections = 1
		m.absentUntil = now.Add(m.cfg.Grace)
	case via != 0 && via == m.other.ID:
		m.current, m.other = m.other, m.current
		m.useReplay(m.current.Replay)
		if m.state != Conflicted {
			m.beginConflict(now, m.order.last)
		}
	}
}

func (m *Machine) classify(b *Batch) (verdict, seqRange) {
	return m.order.classify(b.Seq, b.Fingerprint, m.incarnation.contradicts(b))
}

// heartbeat reports whether a batch only says that its publisher is alive: without
// events, and with the seq of the last batch again. The publisher must name its
// incarnation, since a restarted engine may reach the same seq.
func (m *Machine) heartbeat(b *Batch) bool {
	return b.Empty && len(b.Publisher) > 0 &&
		m.order.reading() && b.Seq == m.order.last && string(b.Publisher) == m.incarnation.publisher
}

// otherIncarnation takes a live batch that names another incarnation than the one that is
// read, of a publisher with a replay socket. The batch is stale if it was read before, or
// arrived by a connection that is closed; of a second publisher if it continues the former
// incarnation; and otherwise of an engine that restarted, whatever its seq.
func (m *Machine) otherIncarnation(now time.Time, b *Batch, closed bool) {
	switch {
	case !m.former.names(b):
		m.restart(EvidenceBatch, b.Seq)
		m.endRepair() // its replies may be of either incarnation
		m.incarnation.learn(b)
		m.buffer.keepOnly(&m.incarnation)
		m.bufferLive(b)
		m.startRepair(now, CauseStart)
	case closed || b.Seq <= m.former.last:
		m.emit(Action{Kind: DropStale})
	default:
		m.beginConflict(now, b.Seq)
		m.deliverUnordered(b)
	}
}

// bufferLive keeps a live batch until those before it are read. The replay may have a
// malformed one whole.
func (m *Machine) bufferLive(b *Batch) {
	switch {
	case b.Malformed:
		m.emit(Action{Kind: Reject, Batch: b})
	case m.buffer.add(b):
		return
	default:
		m.emit(Action{Kind: DropOverflow})
	}
	next, ok := m.order.next()
	if (!ok || b.Seq >= next) && (!m.hasUnbuffered || b.Seq >= m.unbuffered) {
		m.unbuffered, m.hasUnbuffered = b.Seq, true
	}
}

// deliverInOrder delivers a live batch of a publisher with a replay socket, if nothing is
// missing before it. Otherwise it reports false: whether the engine restarted is for its
// replay to show, as the batch may be late, or another publisher's.
func (m *Machine) deliverInOrder(b *Batch) bool {
	switch v, missing := m.classify(b); {
	case v == verdictDuplicate:
		m.emit(Action{Kind: DropDuplicate})
	case v == verdictFirst:
		if missing = m.beginIncarnation(b.Seq, missing, b); missing.count > 0 {
			m.reportGap(missing, feed.GapReplayUnavailable, b)
		}
		m.read(b)
	case v == verdictNext && !b.Malformed:
		m.read(b)
	default:
		return false
	}
	return true
}

// deliverWithoutReplay takes a batch of a publisher without a replay socket: a restart is
// reported, then what is missing as one gap, with the batch itself if it is malformed, and
// then it is delivered.
func (m *Machine) deliverWithoutReplay(b *Batch) {
	v, missing := m.classify(b)
	switch v {
	case verdictDuplicate:
		m.emit(Action{Kind: DropDuplicate})
		return
	case verdictRestart:
		m.restart(EvidenceBatch, b.Seq)
		missing = m.beginIncarnation(b.Seq, missing, b)
	case verdictFirst:
		missing = m.beginIncarnation(b.Seq, missing, b)
	case verdictGap:
		m.former = former{last: m.order.last, incarnation: m.incarnation, known: true}
	case verdictNext:
	}
	if b.Malformed {
		m.emit(Action{Kind: Reject, Batch: b})
		missing = missing.through(b.Seq)
	}
	if missing.count > 0 {
		m.reportGap(missing, feed.GapReplayUnavailable, b)
	}
	m.read(b)
}

// beginIncarnation makes the batch at seq the first of an incarnation, and returns what
// has to be reported as lost of it. At first contact that is nothing: nobody was connected
// when the engine published it.
func (m *Machine) beginIncarnation(seq uint64, missing seqRange, b *Batch) seqRange {
	m.order.beginEmpty()
	if m.repair == nil {
		m.state = Live
	}
	firstContact := m.restarts == 0
	m.emit(Action{
		Kind: ReportBegin, Seq: seq, Batch: b, FirstContact: firstContact,
		First: missing.first, Last: missing.last, Missed: missing.count,
	})
	if missing.count > 0 && firstContact {
		m.order.skipTo(missing.last)
		return seqRange{}
	}
	return missing
}

// restart reports that the engine restarted, and forgets the incarnation of before.
func (m *Machine) restart(e Evidence, seq uint64) {
	m.emit(Action{Kind: ReportRestart, Evidence: e, Seq: seq})
	m.former = former{last: m.order.last, incarnation: m.incarnation, known: true}
	m.buffer.dropBefore(m.connections)
	m.hasUnbuffered = false
	m.forgetIncarnation()
}

// reportGap reports the batches of a range as lost, and advances the last read seq to its
// end. An empty range means that batches may be lost, but not which.
func (m *Machine) reportGap(missing seqRange, reason feed.GapReason, next *Batch) {
	m.emit(Action{
		Kind: ReportGap, Reason: reason, Batch: next,
		First: missing.first, Last: missing.last, Missed: missing.count,
	})
	if missing.count > 0 {
		m.order.skipTo(missing.last)
	}
}

// reportPossibleRestart reports that the engine may have restarted, once for as long as
// nothing new is read.
func (m *Machine) reportPossibleRestart() {
	if !m.possibleRestartReported {
		m.possibleRestartReported = true
		m.reportGap(seqRange{}, feed.GapPossibleRestart, nil)
	}
}

// read makes a batch the last one read, and delivers it.
func (m *Machine) read(b *Batch) {
	m.order.advance(b.Seq, b.Fingerprint)
	m.possibleRestartReported = false
	m.overrunPending, m.overrunUntil = false, time.Time{}
	m.incarnation.learn(b)
	m.emit(Action{Kind: Deliver, Batch: b})
}

// suspect records that the connection seems to be dead.
func (m *Machine) suspect() {
	m.emit(Action{Kind: ReportSilent})
	m.state = Suspect
}

package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// Arrival is the input for the next live batch. via is its connection; 0 if that connection is closed, and may have been another
// publisher's. Such a batch is stale while there is a connection. Otherwise it may be of a connection that is unknown to the machine, and
// the engine may have restarted before that: the batch is delivered only after a request to the replay socket, if there is one.
func (m *Machine) Arrival(now time.Time, via ConnectionID, b *Batch) []Action {
	m.begin()
	if m.resumedRestore {
		m.abortRestore()
	}
	if via == 0 && m.Connected() {
		// The engine published the batch before it opened its current connection.
		m.emit(Action{Kind: DropStale})
		return m.actions
	}
	m.arriveBy(now, via)
	b.ReceivedAt, b.connection = now, m.connections
	if via == 0 {
		b.connection-- // newer than the last connection, and older than the requests sent since
	}
	m.heardAt = now
	if m.state == Suspect {
		m.state = m.settledState()
	}
	if m.heartbeat(b) {
		return m.actions
	}
	if m.Resuming() && m.resume(b) {
		m.emit(Action{Kind: DropDuplicate})
		return m.actions
	}
	if m.state == Conflicted {
		if last, ok := m.conflict.survivor(now); ok {
			m.endConflict(now, last)
		}
	}
	if m.state == Conflicted {
		m.deliverUnordered(b)
		return m.actions
	}
	contradicts := m.incarnation.contradicts(b)
	if m.probing() && (b.Malformed || !m.isNextOrDuplicate(b)) {
		m.endProbe()
	}
	if !contradicts {
		m.incarnation.record(b)
	}
	if via != 0 {
		m.recordLive(now, b)
	}
	switch {
	case m.wantsProof(now) && !m.possibleRestartReported && m.verdictOf(b) == verdictNext: // else a repair follows, whose replies may be a proof
		m.bufferLive(b)
		m.requestProof(now)
	case !m.replayable(now) && (via != 0 || m.replayEndpoint == "" || m.proof.origin == originForeign):
		m.arriveWithoutReplay(now, b)
	case contradicts:
		m.arriveOfOther(now, b, via == 0)
	case m.Replaying():
		m.bufferLive(b)
	case m.order.progress == progressUnknown:
		m.bufferLive(b)
		m.startRepair(now, CauseStart)
	case m.possibleRestartReported, via == 0:
		m.bufferLive(b) // the replay socket may show whether the engine restarted
		m.startRepair(now, CauseReconnect)
	case !m.deliverInOrder(b):
		m.bufferLive(b)
		m.startRepair(now, CauseGap)
	}
	return m.actions
}

// arriveBy records the connection of a batch. If it is the earlier of two open connections, two publishers alternate: a conflict.
func (m *Machine) arriveBy(now time.Time, via ConnectionID) {
	switch {
	case via == 0 && m.connections == 0:
		m.connections = 1
		m.absentUntil = now.Add(m.cfg.Grace)
	case via != 0 && via == m.other.ID:
		m.current, m.other = m.other, m.current
		m.useEndpoints(m.current)
		if m.state != Conflicted {
			m.beginConflict(now, m.order.last)
		}
	}
}

func (m *Machine) classify(b *Batch) (verdict, seqRange) {
	v, missing := m.order.classify(b.Seq, b.Fingerprint, m.incarnation.contradicts(b))
	if v == verdictRestart && m.inSnapshot(b) {
		return verdictDuplicate, seqRange{}
	}
	return v, missing
}

func (m *Machine) verdictOf(b *Batch) verdict {
	v, _ := m.classify(b)
	return v
}

func (m *Machine) isNextOrDuplicate(b *Batch) bool {
	v := m.verdictOf(b)
	return v == verdictNext || v == verdictDuplicate
}

// heartbeat reports whether a batch repeats the last seq without events, to show that the publisher is alive. The publisher must identify
// its incarnation, because a restarted engine may reach the same seq.
func (m *Machine) heartbeat(b *Batch) bool {
	return b.Empty && len(b.Publisher) > 0 &&
		m.order.reading() && b.Seq == m.order.last && string(b.Publisher) == m.incarnation.publisher
}

// arriveOfOther handles a live batch that identifies another incarnation than the current one. The publisher has a replay socket, or a
// repair is in progress. If the batch identifies the former incarnation, it is stale when it was read before or its connection is closed,
// and of a second publisher otherwise. Any other batch shows a restart, whatever its seq.
func (m *Machine) arriveOfOther(now time.Time, b *Batch, closed bool) {
	switch {
	case !m.former.matches(b):
		m.restart(EvidenceBatch, b.Seq)
		m.endRepair() // its replies may be of either incarnation
		m.incarnation.record(b)
		m.buffer.removeIf(m.incarnation.contradicts)
		m.bufferLive(b)
		switch {
		case m.replayable(now):
			m.startRepair(now, CauseStart)
		case m.lossKnown() && m.canRestore(now):
			m.startRestore(now, CauseStart)
		default:
			m.flushWithoutReplay()
		}
	case closed || b.Seq <= m.former.last:
		m.emit(Action{Kind: DropStale})
	default:
		m.beginConflict(now, b.Seq)
		m.deliverUnordered(b)
	}
}

// bufferLive buffers a live batch until the batches before it are read. A malformed batch is
// requested instead: the replay socket may have it intact.
func (m *Machine) bufferLive(b *Batch) {
	m.learnSnapshotBatch(b)
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

// deliverInOrder delivers a live batch of a publisher with a replay socket if no batch is missing before it. Otherwise it returns false:
// only a replay shows whether the engine restarted, because the batch may be late, or of another publisher.
func (m *Machine) deliverInOrder(b *Batch) bool {
	switch v := m.verdictOf(b); {
	case v == verdictDuplicate:
		m.learnSnapshotBatch(b)
		m.emit(Action{Kind: DropDuplicate})
	case v == verdictNext && !b.Malformed:
		m.read(b)
	default:
		return false
	}
	return true
}

// arriveWithoutReplay handles a live batch of a publisher whose replay socket cannot be asked. If batches are
// missing before it, a snapshot is requested, if there may be one.
func (m *Machine) arriveWithoutReplay(now time.Time, b *Batch) {
	v, missing := m.classify(b)
	switch {
	case v == verdictRestart && m.fromSecondPublisher(b):
		m.beginConflict(now, b.Seq)
		m.deliverUnordered(b)
	case missing.count > 0 && m.Connected() && m.canRestore(now):
		cause := CauseGap
		if v == verdictRestart {
			m.restart(EvidenceBatch, b.Seq)
			m.incarnation.record(b)
		}
		if v != verdictGap {
			cause = CauseStart
		}
		m.bufferLive(b)
		m.startRestore(now, cause)
	default:
		m.deliverWithoutReplay(b, v, missing)
	}
}

// deliverWithoutReplay reports a restart if a batch shows it, then the missing batches as one gap,
// which includes the batch if it is malformed, and then delivers the batch.
func (m *Machine) deliverWithoutReplay(b *Batch, v verdict, missing seqRange) {
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
	if missing.count > 0 || v == verdictFirst && b.Seq > m.order.first {
		m.noteLoss()
	}
	if missing.count > 0 {
		m.reportGap(missing, feed.GapReplayUnavailable, b)
	}
	m.read(b)
}

// beginIncarnation makes the batch at seq the first of an incarnation, and returns the seqs to report as lost. At first contact there are
// none: kvcast was not connected when the engine published them.
func (m *Machine) beginIncarnation(seq uint64, missing seqRange, b *Batch) seqRange {
	m.order.progress, m.begun = progressEmpty, seq
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

// restart reports that the engine restarted, and forgets the incarnation that ended.
func (m *Machine) restart(e Evidence, seq uint64) {
	m.emit(Action{Kind: ReportRestart, Evidence: e, Seq: seq})
	m.former = former{last: m.order.last, incarnation: m.incarnation, known: true}
	m.buffer.removeIf(func(b *Batch) bool { return b.connection != m.connections })
	m.hasUnbuffered = false
	if m.repair != nil {
		m.repair.request.restoring = false // the report empties the view
	}
	m.forgetIncarnation()
}

// reportGap reports a range of batches as lost, and advances the last seq to its end. An empty
// range means that unknown batches may be lost.
func (m *Machine) reportGap(missing seqRange, reason feed.GapReason, next *Batch) {
	m.emit(Action{
		Kind: ReportGap, Reason: reason, Repairable: m.loss.known && !m.loss.final, Batch: next,
		First: missing.first, Last: missing.last, Missed: missing.count,
	})
	if missing.count > 0 {
		m.order.skipTo(missing.last)
	}
}

// reportPossibleRestart reports that the engine may have restarted, at most once between two batches that are read.
func (m *Machine) reportPossibleRestart() {
	if !m.possibleRestartReported {
		m.possibleRestartReported = true
		m.noteLoss()
		m.reportGap(seqRange{}, feed.GapPossibleRestart, nil)
	}
}

// read delivers a batch, and makes it the last one read.
func (m *Machine) read(b *Batch) {
	m.order.advance(b.Seq, b.Fingerprint)
	b.Unproved = b.Replayed && m.proof.origin != originProved
	m.proof.unproved = m.proof.unproved || b.Unproved
	m.proof.lastProved = !b.Unproved
	m.possibleRestartReported = false
	if m.overrunPending {
		m.overrunPending, m.overrunUntil = false, time.Time{}
	}
	m.incarnation.record(b)
	m.deliver(b)
}

// deliver delivers a batch, and reports what it does not contain.
func (m *Machine) deliver(b *Batch) {
	m.emit(Action{Kind: Deliver, Batch: b})
	if b.Partial {
		m.reportGap(seqRange{}, feed.GapJoinedLate, nil)
	}
}

// suspect reports that the connection seems to be dead.
func (m *Machine) suspect() {
	m.emit(Action{Kind: ReportSilent})
	m.state = Suspect
}

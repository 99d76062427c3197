package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// maxSnapshotFailures is how many requests for a snapshot in a row may fail before the repair goes on
	// without one. No snapshot is then requested for RestTime. A request that was not sent, because too many
	// others were in progress, counts as that many, and no snapshot is requested for busyRestTime.
	maxSnapshotFailures = 4
	// snapshotRestTime is how long no snapshot is requested after one was used, so that an engine whose
	// replay is too short for its rate is not asked in a loop.
	snapshotRestTime = 10 * time.Second
)

// A snapshot of an engine's cache takes the place of batches that the replay socket does not have:
//
//  1. It is requested when a repair would otherwise report a loss, see lossKnown and cutForgotten, or instead of
//     a replay if none can be requested. Batches that are only doubtful are no reason.
//  2. SnapshotHeader has the seq of the last batch that the snapshot includes. A snapshot that includes no batch
//     after those that were read is not used. If it identifies another incarnation, the engine restarted.
//  3. Otherwise the view is emptied, because the snapshot has all blocks, and SnapshotBatch is called for each
//     batch of it. They are ordinary batches without seqs of their own: they are delivered with the snapshot's.
//  4. After the last one, the batches that follow come from the reorder buffer and the replay socket.
//  5. If the snapshot ends early, the view is emptied again, and the loss is reported. After maxSnapshotFailures the repair goes on as
//     if there were no snapshots.

// canRestore reports whether a snapshot may be requested.
func (m *Machine) canRestore(now time.Time) bool {
	return m.snapshotEndpoint != "" && !now.Before(m.snapshotRestUntil) && (!m.snapshotsBegin || !m.order.reading())
}

// lossKnown reports whether batches are missing that no request has brought: those before a live batch, or
// before the first one of an incarnation.
func (m *Machine) lossKnown() bool {
	b := m.bufferHead()
	if m.order.progress == progressUnknown {
		return b != nil && b.Seq > m.order.first || m.hasUnbuffered && m.unbuffered > m.order.first
	}
	return m.gapKnown()
}

// startRestore starts a repair that begins with a snapshot, because there is no replay.
func (m *Machine) startRestore(now time.Time, cause Cause) {
	m.repair = &repair{Repair: Repair{Cause: cause, Began: now}, since: now}
	m.reportRepair(RepairStarted)
	m.sendSnapshotRequest()
}

// sendSnapshotRequest sends the repair's next request, for a snapshot.
func (m *Machine) sendSnapshotRequest() {
	r := m.repair
	m.requestID++
	r.Requests++
	r.retryAt, r.snapshotDue = time.Time{}, false
	r.request = request{id: m.requestID, target: targetSnapshot, connection: m.connections}
	m.buffer.markRequested()
	m.state = m.repairState()
	m.emit(Action{Kind: RequestSnapshot, Request: &Request{ID: m.requestID, Cause: r.Cause, Endpoint: m.snapshotEndpoint}})
}

// snapshotInProgress reports whether a request in progress is for a snapshot.
func (m *Machine) snapshotInProgress(requestID uint64) bool {
	return m.inProgress(requestID) && m.repair.request.target == targetSnapshot
}

// SnapshotHeader is the input for the beginning of a snapshot. The header has the seq of the last batch that the
// snapshot includes, and the identifiers of the incarnation. more reports whether the snapshot is wanted.
func (m *Machine) SnapshotHeader(now time.Time, requestID uint64, header *Batch) (actions []Action, more bool) {
	m.begin()
	if !m.snapshotInProgress(requestID) || m.repair.request.restoring {
		return nil, false
	}
	m.heardAt = now
	q := &m.repair.request
	switch {
	case m.incarnation.contradicts(header) && m.order.reading():
		m.restart(EvidenceReplay, m.order.last)
	case m.incarnation.contradicts(header):
		m.incarnation = incarnation{}
	case m.order.reading() && header.Seq <= m.order.last:
		q.cut = cutHole
		m.emit(Action{Kind: RejectSnapshot, Seq: header.Seq})
		return m.actions, false
	}
	m.incarnation.record(header)
	m.order.reset()
	m.possibleRestartReported = false
	q.restoring, q.sameIncarnation, q.snapshotSeq = true, true, header.Seq
	m.emit(Action{Kind: BeginRestore, Seq: header.Seq, Batch: header})
	return m.actions, true
}

// SnapshotBatch is the input for the next batch of a snapshot. more reports whether further ones are wanted: a
// malformed batch, or one of another incarnation, ends the snapshot.
func (m *Machine) SnapshotBatch(now time.Time, requestID uint64, b *Batch) (actions []Action, more bool) {
	m.begin()
	if !m.snapshotInProgress(requestID) || !m.repair.request.restoring {
		return nil, false
	}
	q := &m.repair.request
	b.Seq, b.Replayed, b.Restored, b.ReceivedAt = q.snapshotSeq, true, true, now
	m.heardAt = now
	switch {
	case b.Malformed:
		m.emit(Action{Kind: Reject, Batch: b})
		q.cut = cutHole
		return m.actions, false
	case m.incarnation.contradicts(b):
		q.cut = cutHole
		return m.actions, false
	}
	m.repair.Batches++
	m.emit(Action{Kind: Deliver, Batch: b})
	return m.actions, true
}

// endSnapshot evaluates the end of a request for a snapshot.
func (m *Machine) endSnapshot(now time.Time, r *repair, outcome Outcome) {
	q := &r.request
	if outcome == OutcomeComplete && q.restoring && q.cut == cutNone {
		m.endRestore(now, r)
		return
	}
	if q.restoring {
		m.abortRestore()
	}
	r.snapshotFailures++
	if r.snapshotFailures < maxSnapshotFailures && now.Sub(r.since) <= maxRepairTime && outcome != OutcomeBusy && m.snapshotEndpoint != "" {
		r.snapshotDue = true
		r.retryAt = now.Add(m.cfg.Jitter(retryWait(r.snapshotFailures)))
		return
	}
	rest := RestTime
	if outcome == OutcomeBusy {
		rest = busyRestTime
	}
	m.snapshotRestUntil = now.Add(rest)
	m.emit(Action{Kind: SnapshotFailed})
	m.replayRest(now, r)
}

// endRestore makes the last batch that a whole snapshot includes the last one read, and fetches the batches after it.
func (m *Machine) endRestore(now time.Time, r *repair) {
	q := &r.request
	q.restoring = false
	m.order.skipTo(q.snapshotSeq)
	m.snapshotSeq, m.hasSnapshot = q.snapshotSeq, true
	for i := range m.buffer.batches {
		m.learnSnapshotBatch(&m.buffer.batches[i])
	}
	m.snapshotRestUntil = now.Add(snapshotRestTime)
	m.emit(Action{Kind: EndRestore, Seq: q.snapshotSeq, Repair: &Repair{Cause: r.Cause, Began: r.Began, Requests: r.Requests, Batches: r.Batches}})
	*r = repair{Repair: r.Repair, since: now, answered: r.answered, recheck: r.recheck, request: r.request}
	q = &r.request
	m.dropStale(q.connection)
	if m.flush(q) {
		m.requestProofInstead(r)
		return
	}
	m.replayRest(now, r)
}

// replayRest continues a repair after a request for a snapshot: with a replay if there can be one.
//
// No replay follows the snapshot of an engine whose replies do not name the incarnation: their first, the last batch that
// the snapshot includes, cannot be compared with it, and a restart would have to be reported as possible. Batches that the
// connection has lost since are found by the next live batch or the check of silence.
func (m *Machine) replayRest(now time.Time, r *repair) {
	replays := m.replayEndpoint != "" && !now.Before(m.restUntil)
	switch {
	case m.hasSnapshot && m.caughtUp() && r.recheck == recheckNone && (!replays || m.answered != ReplayAnswers || m.incarnation.publisher == ""):
		m.finishRepair(r) // a replay would not be answered, or could not be compared with the snapshot
	case !replays:
		m.abandonRepair(now, r, OutcomeFailed)
	default:
		m.sendRequest()
	}
}

// abortRestore empties the view of a part of a snapshot, and reports the loss, since it is not known whether anything
// follows. What is read next is the first of the incarnation.
func (m *Machine) abortRestore() {
	m.emit(Action{Kind: AbortRestore, Reason: feed.GapReplayIncomplete})
	known := m.incarnation
	m.forgetIncarnation()
	m.incarnation = known
	m.noteLoss()
	m.resumedRestore = false
	if m.repair != nil {
		m.repair.request.restoring = false
		m.repair.comparePast, m.repair.forgottenTo = false, 0
	}
}

// learnSnapshotBatch records the fingerprint of the last batch that the snapshot includes, if b is that batch. A later
// replay of it then shows that the engine did not restart, also if replies do not name the incarnation.
func (m *Machine) learnSnapshotBatch(b *Batch) {
	if m.confirms(b) && !b.Malformed && b.Seq == m.snapshotSeq && m.order.last == b.Seq && len(m.order.history.ring) == 0 {
		m.order.history.add(b.Seq, b.Fingerprint)
	}
}

// confirms reports whether a batch names the incarnation that was begun with a snapshot.
func (m *Machine) confirms(b *Batch) bool { return m.hasSnapshot && m.incarnation.confirms(b) }

// inSnapshot reports whether a batch is included in the snapshot with which the incarnation was begun: its
// fingerprint is not known, but the batch names the incarnation.
func (m *Machine) inSnapshot(b *Batch) bool {
	if !m.confirms(b) || b.Seq > m.snapshotSeq {
		return false
	}
	_, remembered := m.order.history.find(b.Seq)
	return !remembered
}

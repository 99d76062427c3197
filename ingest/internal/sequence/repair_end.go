package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// ReplayEnded is the input for the end of a request.
//
//  1. If a complete request brought nothing, a request for targetPast follows. If a request shows a
//     restart, a request for all batches follows.
//  2. Buffered live batches are delivered as far as they follow the last batch read.
//     If the replies begin after the batches that are missing, a snapshot is requested instead.
//  3. If nothing is missing then, the repair is done. Otherwise another request follows, after a
//     wait if this one brought nothing, until maxFailures or maxRepairTime is reached.
func (m *Machine) ReplayEnded(now time.Time, requestID uint64, outcome Outcome) []Action {
	m.begin()
	if !m.inProgress(requestID) {
		return nil
	}
	r := m.repair
	q := &r.request
	if q.target == targetSnapshot {
		m.endSnapshot(now, r, outcome)
		return m.actions
	}
	m.recordHealth(r, outcome)
	if q.target == targetProof {
		m.endProof(now, r)
		return m.actions
	}
	if q.target == targetWhole && q.cut == cutNone {
		m.endWhole(now, r, outcome)
		return m.actions
	}
	if q.cut == cutForgotten {
		m.sendSnapshotRequest()
		return m.actions
	}
	if outcome == OutcomeComplete {
		r.answered = true
		if q.cut == cutNone && m.requestsAgain(r) {
			m.sendRequest()
			return m.actions
		}
	}
	if q.cut == cutRestart {
		m.restart(EvidenceReplay, m.order.last)
		reconnected := r.recheck == recheckReconnect
		r.startOver(r.since)
		if reconnected {
			r.recheck = recheckReconnect
		}
		m.sendRequest()
		return m.actions
	}
	complete := outcome == OutcomeComplete && q.cut == cutNone
	buffered := len(m.buffer.batches)
	if complete {
		m.dropStale(q.connection)
	}
	// Without any of these conditions, buffered batches may be of another incarnation than the replies.
	if q.target == targetAll || q.sameIncarnation || q.target == targetPast && complete {
		if m.flush(q) {
			m.requestProofInstead(r)
			return m.actions
		}
	}
	if m.repair == r {
		m.continueRepair(now, r, outcome, len(m.buffer.batches) < buffered)
	}
	if m.wantsProof(now) {
		m.requestProof(now)
	}
	return m.actions
}

// recordHealth records whether the replay socket replied.
func (m *Machine) recordHealth(r *repair, outcome Outcome) {
	switch {
	case outcome == OutcomeBusy:
	case r.request.replies > 0 || outcome == OutcomeComplete:
		m.answered, m.gaveUp = ReplayAnswers, false
	case outcome == OutcomeSilent && m.answered == ReplayAnswers:
		m.answered = ReplayUnanswered
	}
}

// requestsAgain evaluates a complete request, and reports whether another follows at once.
func (m *Machine) requestsAgain(r *repair) bool {
	q := &r.request
	switch {
	case q.target == targetPast && q.sameIncarnation:
		r.comparePast = false
	case q.target == targetPast && q.matchesPast:
		q.cut = cutRestart // the batches that were read are of two incarnations
	case q.target == targetPast:
		// The engine has no batch that was read, though an engine that did not restart
		// would have its last. It may have later batches now, if some arrived meanwhile.
		m.reportPossibleRestart()
		again := !r.pastUnknown && (m.bufferHead() != nil || m.hasUnbuffered)
		r.comparePast, r.pastUnknown = false, true
		return again
	case q.target == targetRest && q.replies == 0 && m.bufferContradicts():
		q.cut = cutRestart
	case q.target == targetRest && q.replies == 0:
		r.comparePast = true
		return true
	case m.order.progress == progressUnknown:
		m.order.progress = progressEmpty
	}
	return false
}

// continueRepair ends the repair or sends the next request. flushed reports whether buffered batches were delivered.
func (m *Machine) continueRepair(now time.Time, r *repair, outcome Outcome, flushed bool) {
	q := &r.request
	// Some engines repeat only the last batch, without an end marker.
	onlyLast := outcome == OutcomeSilent && q.sameIncarnation && !q.advanced
	if (outcome == OutcomeComplete || onlyLast) && q.cut == cutNone && m.caughtUp() {
		switch {
		case r.recheck != recheckNone:
			if r.recheck == recheckReconnect {
				r.Cause = CauseReconnect
			}
			r.startOver(now)
			m.sendRequest()
		case q.replies >= replyQueue && now.Sub(r.since) <= maxRepairTime:
			m.sendRequest() // the last replies may have been dropped
		default:
			m.finishRepair(r)
		}
		return
	}
	if q.advanced || flushed {
		r.failures = 0
	} else if outcome != OutcomeYielded {
		r.failures++
	}
	if r.Cause == CauseSilence && m.gapKnown() {
		r.Cause = CauseGap
	}
	exhausted := m.exhausted(now, r, outcome)
	if exhausted && m.lossKnown() && m.Connected() && m.canRestore(now) {
		m.sendSnapshotRequest()
		return
	}
	if exhausted && (outcome == OutcomeBusy || r.final || q.cut != cutHole) {
		m.abandonRepair(now, r, outcome)
		return
	}
	r.final = exhausted
	if q.cut == cutHole {
		m.reportRepair(RepairHole)
	}
	if r.failures == 0 || r.final {
		m.sendRequest()
		return
	}
	r.retryAt = now.Add(m.cfg.Jitter(retryWait(r.failures)))
}

// exhausted reports whether no further request may follow.
func (m *Machine) exhausted(now time.Time, r *repair, outcome Outcome) bool {
	switch {
	case m.replayEndpoint == "", now.Sub(r.since) > max(maxRepairTime, m.cfg.Patience), r.Cause == CauseSilence && !r.answered:
		return true
	case r.answered, outcome == OutcomeBusy:
		return r.failures >= maxFailures
	case m.answered == ReplayNeverAnswered && (m.gaveUp || m.order.progress == progressUnknown):
		return r.failures >= maxFirstFailures || outcome == OutcomeSilent
	default:
		return r.failures >= maxFailures && now.Sub(r.since) >= m.cfg.Patience
	}
}

// startOver resets an answered repair, except for its report.
func (r *repair) startOver(since time.Time) {
	*r = repair{Repair: r.Repair, since: since, answered: true}
}

// retryWait returns the wait after a number of failures.
func retryWait(failures int) time.Duration {
	wait := minRetryWait
	for range failures - 1 {
		wait = min(4*wait, maxRetryWait)
	}
	return wait
}

// caughtUp reports whether no live batch shows that a batch is missing.
func (m *Machine) caughtUp() bool {
	next, ok := m.order.next()
	return m.order.progress != progressUnknown && m.bufferHead() == nil &&
		(!m.hasUnbuffered || !ok || next > m.unbuffered)
}

// gapKnown reports whether a live batch shows that batches before it are missing.
func (m *Machine) gapKnown() bool {
	b := m.bufferHead()
	return m.hasUnbuffered || b != nil && m.verdictOf(b) == verdictGap
}

// bufferContradicts reports whether the first buffered batch is of another incarnation than the batches that were read.
func (m *Machine) bufferContradicts() bool {
	b := m.bufferHead()
	return b != nil && m.verdictOf(b) == verdictRestart
}

// bufferHead returns the first buffered batch. It drops the heartbeats before that batch: they repeat the seq of a batch that was read.
func (m *Machine) bufferHead() *Batch {
	for {
		b := m.buffer.head()
		if b == nil || !b.Empty || len(b.Publisher) == 0 || string(b.Publisher) != m.incarnation.publisher ||
			!m.order.reading() || b.Seq > m.order.last {
			return b
		}
		m.buffer.pop()
	}
}

// dropStale drops the buffered batches of connections before the given one, on which a request
// completed. They are duplicates, or of an earlier incarnation: the replay has all later batches.
func (m *Machine) dropStale(connection uint32) {
	for b := m.bufferHead(); b != nil && b.connection < connection; b = m.bufferHead() {
		if m.verdictOf(b) == verdictDuplicate {
			m.emit(Action{Kind: DropDuplicate})
		} else {
			m.emit(Action{Kind: DropStale})
		}
		m.buffer.pop()
	}
}

// flush delivers the buffered batches of the request's connection as far as they follow the last batch read. Batches of a later connection
// wait for a request that is sent on it, because the engine may have restarted in between.
//
// After an empty replay, batches wait for the next request if all arrived later than this one, because the engine may have begun to publish
// in between. If one of the same connection arrived earlier, the engine does not keep its batches, and another request would show nothing.
//
// If the replies confirmed the incarnation, a batch that contradicts it and arrived before the request is stale, or of another engine. A
// contradicting batch that arrived later may be of the next incarnation; the next request shows that. flush reports whether such a batch
// is the live one of Machine.proof: the replies may be another publisher's.
func (m *Machine) flush(q *request) (contradictsProof bool) {
	if q.target == targetPast && !q.sameIncarnation && m.buffer.requested == 0 {
		return false
	}
	for b := m.bufferHead(); b != nil && b.connection == q.connection && m.order.progress != progressUnknown; b = m.bufferHead() {
		if q.sameIncarnation && m.buffer.requested > 0 && m.verdictOf(b) == verdictRestart {
			if m.isProof(b) {
				return true
			}
			m.emit(Action{Kind: DropStale})
			m.buffer.pop()
			continue
		}
		c := *b
		if !m.deliverInOrder(&c) {
			return false
		}
		m.buffer.pop()
	}
	return false
}

// flushWithoutReplay delivers the buffered batches up to a gap, without comparing them with a replay.
// The engine may have restarted between two connections.
func (m *Machine) flushWithoutReplay() {
	var connection uint32
	b := m.bufferHead()
	for ; b != nil && m.verdictOf(b) != verdictGap; b = m.bufferHead() {
		if connection != 0 && b.connection != connection {
			m.reportPossibleRestart()
		}
		connection = b.connection
		b = m.buffer.pop()
		v, missing := m.classify(b)
		m.deliverWithoutReplay(b, v, missing)
	}
	if b == nil && connection != 0 && connection != m.connections && m.Connected() {
		m.reportPossibleRestart()
	}
}

// finishRepair ends a repair after which nothing is missing.
func (m *Machine) finishRepair(r *repair) {
	m.reportRepair(RepairDone)
	if r.Cause == CauseSilence && r.request.advanced && m.cfg.CanReconnect {
		// The replay had batches that did not arrive on the connection: it is dead.
		m.emit(Action{Kind: Reconnect})
	}
	m.hasUnbuffered = false
	m.settle()
}

// settle ends the repair and sets the state.
func (m *Machine) settle() {
	m.endRepair()
	if m.state != Conflicted {
		m.state = m.settledState()
	}
}

// abandonRepair reports the missing batches as lost, and delivers the buffered batches. If they show
// that more is missing, another repair follows.
func (m *Machine) abandonRepair(now time.Time, r *repair, outcome Outcome) {
	m.reportRepair(RepairFailed)
	reason := feed.GapReplayIncomplete
	switch {
	case r.answered:
		if m.Connected() {
			m.dropStale(r.request.connection)
		}
	case outcome == OutcomeBusy:
		reason, m.restUntil = feed.GapReplayUnavailable, now.Add(busyRestTime)
	case r.Cause != CauseSilence:
		reason, m.restUntil = feed.GapReplayUnavailable, now.Add(RestTime)
		m.gaveUp = m.answered == ReplayNeverAnswered
	default:
		reason = feed.GapReplayUnavailable
	}
	target, wanted := m.unbuffered+1, m.hasUnbuffered
	if b := m.bufferHead(); b != nil {
		target, wanted = b.Seq, true
	}
	if m.order.progress == progressEmpty {
		m.order.reset() // the next batch is the first, whatever its seq
	}
	if m.order.reading() && (r.Cause == CauseReconnect || r.recheck == recheckReconnect) {
		m.reportPossibleRestart() // the engine was not asked since it was reconnected
	}
	if !wanted {
		m.abandonProbe(r)
		return
	}
	m.skipMissing(target, reason)
	if m.bufferHead() == nil {
		m.hasUnbuffered = false
	}
	m.flushWithoutReplay()
	switch {
	case m.repair != r:
	case m.caughtUp():
		m.settle()
	default:
		*r = repair{Repair: Repair{Cause: CauseGap, Began: now}, since: now, recheck: r.recheck}
		m.sendRequest()
	}
}

// abandonProbe abandons a repair when no batch is known to be missing.
func (m *Machine) abandonProbe(r *repair) {
	m.settle()
	switch {
	case r.Cause == CauseSilence:
		m.suspect()
		if m.cfg.CanReconnect {
			m.emit(Action{Kind: Reconnect})
		}
	case m.order.progress != progressUnknown:
		m.reportPossibleRestart()
	}
}

// skipMissing reports the unread seqs before target as lost.
func (m *Machine) skipMissing(target uint64, reason feed.GapReason) {
	next, known := m.order.next()
	if !known {
		next = m.order.first
	}
	missing := rangeBetween(next, target)
	if missing.count > 0 && m.repair.request.cut == cutNone {
		m.noteLoss()
	}
	if m.order.progress == progressUnknown {
		missing = m.beginIncarnation(target, missing, nil)
	}
	if missing.count > 0 {
		m.reportGap(missing, reason, nil)
	}
}

package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// ReplayEnded takes the end of a request.
//
//  1. A complete request that brought nothing is followed by one for targetPast. One that
//     shows a restart is followed by one for everything.
//  2. Buffered live batches are delivered as far as they follow what was read.
//  3. If nothing is missing then, the repair is done. Otherwise another request follows,
//     after a wait where this one brought nothing, until there were too many.
func (m *Machine) ReplayEnded(now time.Time, requestID uint64, outcome Outcome) []Action {
	m.begin()
	if !m.inProgress(requestID) {
		return nil
	}
	r := m.repair
	complete := outcome == OutcomeComplete
	r.answered = r.answered || complete
	m.noteHealth(r, outcome)
	if complete && r.request.cut == cutNone && m.requestsAgain(r) {
		m.sendRequest()
		return m.actions
	}
	if r.request.cut == cutRestart {
		m.restart(EvidenceReplay, m.order.last)
		reconnected := r.recheck == recheckReconnect
		r.startOver(r.since)
		if reconnected {
			r.recheck = recheckReconnect
		}
		m.sendRequest()
		return m.actions
	}
	buffered := len(m.buffer.batches)
	m.flushAfter(r, complete && r.request.cut == cutNone)
	if m.repair == r {
		m.continueRepair(now, r, outcome, len(m.buffer.batches) < buffered)
	}
	return m.actions
}

// noteHealth records how the replay socket answered.
func (m *Machine) noteHealth(r *repair, outcome Outcome) {
	switch {
	case outcome == OutcomeBusy:
	case r.request.replies > 0 || outcome == OutcomeComplete:
		m.replayHealth = replayResponsive
	case outcome == OutcomeSilent && m.replayHealth == replayResponsive:
		m.replayHealth = replayUnresponsive
	}
}

// requestsAgain draws the conclusions from a complete request, and reports whether another
// one follows at once.
func (m *Machine) requestsAgain(r *repair) bool {
	q := &r.request
	switch {
	case q.target == targetPast && q.sameIncarnation:
		r.comparePast = false
	case q.target == targetPast:
		// It has nothing of what was read, where an engine that did not restart would
		// remember its last batch. If batches arrived meanwhile it may have them now.
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
		m.order.beginEmpty()
	}
	return false
}

// flushAfter delivers buffered batches after a request, unless they may be of another
// incarnation than the replies.
func (m *Machine) flushAfter(r *repair, complete bool) {
	q := &r.request
	if complete {
		m.dropStale(q.connection)
	}
	if q.target == targetAll || q.sameIncarnation || q.target == targetPast && complete {
		m.flush(q)
	}
}

// continueRepair ends the repair or sends the next request. flushed reports whether
// buffered batches were delivered.
func (m *Machine) continueRepair(now time.Time, r *repair, outcome Outcome, flushed bool) {
	q := &r.request
	complete := outcome == OutcomeComplete
	if outcome == OutcomeSilent && q.sameIncarnation && !q.advanced && m.caughtUp() {
		complete = true // an engine that repeats the last batch alone, without an end marker
	}
	switch complete = complete && q.cut == cutNone; {
	case complete && m.caughtUp() && r.recheck != recheckNone:
		r.startOver(now)
		m.sendRequest()
		return
	case complete && m.caughtUp() && q.replies >= replyQueue && now.Sub(r.since) <= maxRepairTime:
		m.sendRequest() // the last replies may have been dropped
		return
	case complete && m.caughtUp():
		m.finishRepair(r)
		return
	case q.advanced || flushed:
		r.failures = 0
	case outcome == OutcomeYielded:
	default:
		r.failures++
	}
	if r.cause == CauseSilence && m.gapKnown() {
		r.cause = CauseGap
	}
	exhausted := m.exhausted(now, r, outcome)
	if exhausted && (outcome == OutcomeBusy || r.final || q.cut != cutHole) {
		m.abandonRepair(now, r, outcome)
		return
	}
	r.final = exhausted
	if q.cut == cutHole {
		m.emit(Action{Kind: RepairHole, Cause: r.cause, Seq: m.order.last, Batches: r.batches})
	}
	if r.failures == 0 || r.final {
		m.sendRequest()
		return
	}
	r.retryAt = now.Add(m.cfg.Jitter(retryWait(r.failures)))
}

// exhausted reports whether the repair has tried enough.
func (m *Machine) exhausted(now time.Time, r *repair, outcome Outcome) bool {
	untried := m.replayHealth == replayUntried
	return r.failures >= maxFailures ||
		now.Sub(r.since) > maxRepairTime ||
		r.cause == CauseSilence && !r.answered ||
		untried && (r.failures >= maxFirstFailures || outcome == OutcomeSilent) ||
		outcome == OutcomeBusy ||
		m.replayEndpoint == ""
}

// startOver resets a repair that was answered, but for its counts.
func (r *repair) startOver(since time.Time) {
	*r = repair{cause: r.cause, began: r.began, since: since, answered: true, requests: r.requests, batches: r.batches}
}

// retryWait returns how long to wait after so many failures.
func retryWait(failures int) time.Duration {
	wait := minRetryWait
	for range failures - 1 {
		wait = min(4*wait, maxRetryWait)
	}
	return wait
}

// caughtUp reports whether nothing is missing as far as is known.
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

// bufferContradicts reports whether the first buffered batch is of another incarnation
// than was read.
func (m *Machine) bufferContradicts() bool {
	b := m.bufferHead()
	return b != nil && m.verdictOf(b) == verdictRestart
}

func (m *Machine) verdictOf(b *Batch) verdict {
	v, _ := m.classify(b)
	return v
}

// bufferHead returns the first buffered batch. It drops the heartbeats before it: the
// batch whose seq they repeat has been read.
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

// dropStale drops the buffered batches that arrived by a connection before the one of a
// complete request, apart from those read meanwhile: had they been of the incarnation
// that was replayed, the replay would have had them.
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

// flush delivers the buffered batches as far as they follow what was read. A batch that
// arrived before the request and contradicts the incarnation that the replies confirmed
// is stale, or of another engine. One that arrived since may be of the next incarnation,
// which the next request shows.
func (m *Machine) flush(q *request) {
	for b := m.bufferHead(); b != nil && b.connection >= q.connection && m.order.progress != progressUnknown; b = m.bufferHead() {
		if q.sameIncarnation && m.buffer.requested > 0 && m.verdictOf(b) == verdictRestart {
			m.emit(Action{Kind: DropStale})
			m.buffer.pop()
			continue
		}
		c := *b
		if !m.deliverInOrder(&c) {
			return
		}
		m.buffer.pop()
	}
}

// flushWithoutReplay delivers the buffered batches by what they say themselves, up to a
// gap. Between two connections the engine may have restarted.
func (m *Machine) flushWithoutReplay() {
	var connection uint32
	b := m.bufferHead()
	for ; b != nil && m.verdictOf(b) != verdictGap; b = m.bufferHead() {
		if connection != 0 && b.connection != connection {
			m.reportPossibleRestart()
		}
		connection = b.connection
		m.deliverWithoutReplay(m.buffer.pop())
	}
	if b == nil && connection != 0 && connection != m.connections {
		m.reportPossibleRestart()
	}
}

// finishRepair ends a repair that brought everything.
func (m *Machine) finishRepair(r *repair) {
	m.emit(r.report(RepairDone))
	if r.cause == CauseSilence && r.request.advanced && m.cfg.Renews {
		// Batches were published that did not arrive by the connection: it is dead.
		m.emit(Action{Kind: RenewConnection})
	}
	m.hasUnbuffered = false
	m.settle()
}

func (r *repair) report(k Kind) Action {
	return Action{Kind: k, Cause: r.cause, Requests: r.requests, Batches: r.batches, Began: r.began}
}

// settle ends the repair and sets the state.
func (m *Machine) settle() {
	m.endRepair()
	if m.state != Conflicted {
		m.state = m.settledState()
	}
}

// abandonRepair reports what is still missing as lost, and delivers the buffered batches. Where they show that more is missing, another repair follows.
func (m *Machine) abandonRepair(now time.Time, r *repair, outcome Outcome) {
	m.emit(r.report(RepairFailed))
	reason := feed.GapReplayIncomplete
	if r.answered {
		m.dropStale(r.request.connection)
	} else {
		reason = feed.GapReplayUnavailable
		switch {
		case outcome == OutcomeBusy:
			m.restUntil = now.Add(busyRestTime)
		case r.cause != CauseSilence:
			m.restUntil = now.Add(RestTime)
		}
	}
	target, wanted := m.unbuffered+1, m.hasUnbuffered
	if b := m.bufferHead(); b != nil {
		target, wanted = b.Seq, true
	}
	if m.order.progress == progressEmpty {
		m.order.reset() // the first batch is the beginning all the same
	}
	if m.order.reading() && (r.cause == CauseReconnect || r.recheck == recheckReconnect) {
		m.reportPossibleRestart() // the engine that is connected now was not asked
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
		*r = repair{cause: CauseGap, began: now, since: now, recheck: r.recheck}
		m.sendRequest()
	}
}

// abandonProbe ends a repair without which nothing is known to be missing.
func (m *Machine) abandonProbe(r *repair) {
	m.settle()
	switch {
	case r.cause == CauseSilence:
		m.suspect()
		if m.cfg.Renews {
			m.emit(Action{Kind: RenewConnection})
		}
	case m.order.progress != progressUnknown:
		m.reportPossibleRestart()
	}
}

// skipMissing reports the seqs before target that were not read as lost.
func (m *Machine) skipMissing(target uint64, reason feed.GapReason) {
	next, _ := m.order.next()
	missing := rangeBetween(next, target)
	if m.order.progress == progressUnknown {
		missing = m.beginIncarnation(target, rangeBetween(m.order.first, target), nil)
	}
	if missing.count > 0 {
		m.reportGap(missing, reason, nil)
	}
}

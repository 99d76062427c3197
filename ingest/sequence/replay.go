package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

const (
	// maxFailures is how many requests in a row may bring nothing before what is missing
	// counts as lost. Of a replay socket that has never answered they are fewer, and one
	// that stays silent is not asked twice.
	maxFailures      = 4
	maxFirstFailures = 2
	// RestTime is how long a replay socket that did not answer is not asked, so that live
	// batches are not buffered for each gap. busyRestTime is that of one that was
	// not asked, as too many others were.
	RestTime     = time.Minute
	busyRestTime = 10 * time.Second
	// maxRepairTime is how long a repair may take, so that live batches are not buffered
	// without end for an engine whose replay never catches up.
	maxRepairTime = 2 * time.Minute
	// replyQueue is how many replies a ROUTER socket queues by default (libzmq's ZMQ_SNDHWM).
	// It drops what does not fit, which may be the last replies before the end marker.
	replyQueue = 1000
	// The wait before a request that follows one that brought nothing. It grows fourfold.
	minRetryWait = 100 * time.Millisecond
	maxRetryWait = 10 * time.Second
)

// target is what a request asks for.
type target uint8

const (
	// targetAll: everything, as nothing of the incarnation was read. The first reply
	// is the beginning.
	targetAll target = iota + 1
	// targetRest: what follows the last batch read, that batch included. If another batch
	// of its seq comes back, the engine restarted.
	targetRest
	// targetPast: everything, after targetRest brought nothing, not even the last batch. A
	// batch that is not as it was read shows that the engine restarted, and one that is,
	// that it did not.
	targetPast
)

// recheck is why one more request has to follow a complete one.
type recheck uint8

const (
	recheckNone recheck = iota
	// recheckOverrun: live messages were dropped meanwhile.
	recheckOverrun
	// recheckReconnect: the connection was lost meanwhile.
	recheckReconnect
)

// cut is why a request was ended before its end marker.
type cut uint8

const (
	cutNone cut = iota
	// cutHole: a batch is missing in the replies.
	cutHole
	// cutRestart: the replies are of another incarnation than was read.
	cutRestart
)

// repair fetches what is missing from the replay socket, by one or more requests:
//
//  1. Where nothing of the incarnation was read, everything is requested (targetAll).
//  2. Otherwise the last batch and what follows (targetRest). If later batches come first,
//     twice the same, the engine has forgotten those between.
//  3. If nothing comes, everything is requested to compare it with what was read
//     (targetPast). If there is neither a batch that was read nor one that contradicts
//     it, a possible restart is reported.
//  4. Replies must be contiguous. At a hole the request ends, and the next one continues
//     from there, as it does after an interruption. So does one after so many replies that
//     the last may have been dropped.
//  5. Then the buffered live batches follow. They may show another hole or restart.
//  6. When maxFailures requests in a row brought nothing, what is missing is lost.
type repair struct {
	cause Cause
	began time.Time
	// since is the start of maxRepairTime.
	since time.Time
	// answered reports whether any request was answered.
	answered bool
	failures int // requests in a row that brought nothing
	recheck  recheck
	// comparePast reports whether the next request is for targetPast.
	comparePast bool
	// pastUnknown reports whether one for targetPast had nothing of what was read.
	pastUnknown bool
	// final reports whether the request is the last one: holes in it are losses.
	final bool
	// forgottenTo is the first seq of the last replies that did not begin with the seq
	// requested; 0 if there were none.
	forgottenTo uint64
	// requests counts the requests, and batches those that were read of their replies.
	requests, batches uint64
	retryAt           time.Time // of the next request; zero while one is in progress

	request request
}

// request is the one in progress, or the last one.
type request struct {
	id     uint64
	target target
	// connection is the number of the connection when the request was sent.
	connection uint32
	// sameIncarnation reports whether a reply shows that the engine did not restart.
	sameIncarnation bool
	replies         int
	// advanced reports whether a reply was the next batch.
	advanced bool
	cut      cut
}

// replayable reports whether the replay socket can be asked, or is being asked.
func (m *Machine) replayable(now time.Time) bool {
	return m.repair != nil || m.replayEndpoint != "" && !now.Before(m.restUntil)
}

// retryAt returns when the next request is due; zero where none waits.
func (m *Machine) retryAt() time.Time {
	if m.repair == nil {
		return time.Time{}
	}
	return m.repair.retryAt
}

// startRepair starts a repair, or has the one in progress check once more.
func (m *Machine) startRepair(now time.Time, cause Cause) {
	if r := m.repair; r != nil {
		if cause == CauseReconnect {
			r.recheck = recheckReconnect
			if r.cause == CauseSilence {
				r.cause = cause
			}
			m.state = m.repairState()
		}
		return
	}
	m.repair = &repair{cause: cause, began: now, since: now}
	m.emit(Action{Kind: RepairStarted, Cause: cause})
	m.sendRequest()
}

// endRepair ends the repair in progress, if there is one. The caller sets the state.
func (m *Machine) endRepair() {
	if m.repair == nil {
		return
	}
	m.emit(Action{Kind: CancelReplay, RequestID: m.repair.request.id})
	m.repair = nil
}

// repairState is the state during the repair in progress.
func (m *Machine) repairState() State {
	switch r := m.repair; {
	case m.state == Suspect && r.cause == CauseSilence:
		return Suspect
	case r.cause == CauseSilence:
		return Verifying
	case r.cause == CauseStart, r.request.target == targetAll:
		return Starting
	default:
		return Repairing
	}
}

// sendRequest requests what the repair needs next.
func (m *Machine) sendRequest() {
	r := m.repair
	m.requestID++
	r.requests++
	r.retryAt = time.Time{}
	r.request = request{id: m.requestID, target: targetRest, connection: m.connections}
	from := m.order.last
	switch {
	case !m.order.reading():
		r.request.target, from = targetAll, m.order.first
	case r.comparePast:
		r.request.target, from = targetPast, m.order.first
	}
	m.buffer.markRequested()
	m.state = m.repairState()
	m.emit(Action{
		Kind: RequestReplay, Cause: r.cause, RequestID: r.request.id, Seq: from,
		Endpoint: m.replayEndpoint, Answered: m.replayHealth == replayResponsive,
	})
}

// Sent is the input when a request is sent. The replies are newer than the batches that
// arrived before.
func (m *Machine) Sent(requestID uint64) {
	if !m.inProgress(requestID) {
		return
	}
	m.repair.request.connection = m.connections
	if !m.Connected() {
		m.repair.request.connection++ // all batches of connections so far are older
	}
	m.buffer.markRequested()
}

// Waited is the input when a request has waited for others. The wait does not count as time of the
// repair.
func (m *Machine) Waited(requestID uint64, d time.Duration) {
	if m.inProgress(requestID) {
		m.repair.since = m.repair.since.Add(d)
	}
}

func (m *Machine) inProgress(requestID uint64) bool {
	return m.repair != nil && m.repair.request.id == requestID && m.repair.retryAt.IsZero()
}

// Reply takes the next reply to a request, and reports whether more are wanted.
func (m *Machine) Reply(now time.Time, requestID uint64, b *Batch) (actions []Action, more bool) {
	m.begin()
	if !m.inProgress(requestID) {
		return nil, false
	}
	b.Replayed, b.ReceivedAt = true, now
	m.heardAt = now
	r := m.repair
	r.answered = true
	r.request.replies++
	if m.order.reading() && m.incarnation.contradicts(b) {
		r.request.cut = cutRestart
		return m.actions, false
	}
	if done, more := m.compare(r, b); done {
		return m.actions, more
	}
	return m.actions, m.readReply(r, b)
}

// compare compares a reply with what was read. done is false for one that follows it.
func (m *Machine) compare(r *repair, b *Batch) (done, more bool) {
	q := &r.request
	past := &m.order.history
	switch {
	case q.target == targetPast && b.Seq <= m.order.last:
		switch {
		case past.contains(b.Seq, b.Fingerprint):
			q.sameIncarnation = true
		case past.containsSeq(b.Seq) || past.startsAfter(b.Seq):
			// An engine that did not restart would have forgotten one so old long before the
			// last.
			q.cut = cutRestart
			return true, false
		}
		return true, true
	case q.target == targetRest && !q.sameIncarnation && b.Seq == m.order.last:
		if past.contradicts(b.Seq, b.Fingerprint) {
			q.cut = cutRestart
			return true, false
		}
		q.sameIncarnation = true
		return true, true
	case q.target == targetRest && b.Seq < m.order.last:
		return true, true // it was not requested
	}
	return false, false
}

// readReply reads a reply that follows what was read, and reports whether more are wanted.
func (m *Machine) readReply(r *repair, b *Batch) (more bool) {
	q := &r.request
	next, known := m.order.next()
	switch {
	case m.order.progress == progressUnknown:
		if missing := m.beginIncarnation(b.Seq, rangeBetween(m.order.first, b.Seq), b); missing.count > 0 {
			m.reportGap(missing, feed.GapReplayForgotten, b)
		}
	case !known || b.Seq < next:
		return true
	case q.replies == 1 && (q.target != targetAll || b.Seq > next):
		// The first batch requested is missing.
		if r.forgottenTo != b.Seq && !r.final {
			r.forgottenTo, q.cut = b.Seq, cutHole
			return false
		}
		if m.bufferContradicts() {
			q.cut = cutRestart
			return false
		}
		q.sameIncarnation = true
		m.reportGap(rangeBetween(next, b.Seq), feed.GapReplayForgotten, b)
	case b.Seq > next && !r.final:
		q.cut = cutHole
		return false
	case b.Seq > next:
		m.reportGap(rangeBetween(next, b.Seq), feed.GapReplayIncomplete, b)
	}
	q.advanced = true
	r.batches++
	if b.Malformed {
		m.emit(Action{Kind: Reject, Batch: b})
		m.reportGap(seqRange{}.through(b.Seq), feed.GapReplayIncomplete, b)
	}
	m.read(b)
	return true
}

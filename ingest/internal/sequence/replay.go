package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// maxFailures is how many requests in a row must bring nothing before the missing batches count as lost, in Config.Patience at least if
	// none was answered. If a replay socket that has never replied is not waited for, the limit is maxFirstFailures, or 1 if it stays silent.
	maxFailures      = 4
	maxFirstFailures = 2
	// RestTime is how long no request because of a gap is sent to a replay socket that did not reply, so that live batches are not buffered at
	// each gap. busyRestTime applies instead if the request was not sent because too many others were in progress.
	RestTime     = time.Minute
	busyRestTime = 10 * time.Second
	// maxRepairTime bounds a repair, and so how long live batches are buffered for an engine whose replay never catches up.
	maxRepairTime = 2 * time.Minute
	// replyQueue is how many replies a ROUTER socket queues by default (libzmq's ZMQ_SNDHWM).
	// It drops the replies that do not fit, which may be the last before the end marker.
	replyQueue = 1000
	// minRetryWait is the wait after the first request that brings nothing. Each further such request quadruples the wait, up to maxRetryWait.
	minRetryWait = 100 * time.Millisecond
	maxRetryWait = 10 * time.Second
)

// target is the range of batches that a request asks for.
type target uint8

const (
	// targetAll: all batches, because none of the incarnation was read. The first reply is the first batch.
	targetAll target = iota + 1
	// targetRest: the last batch read and all later ones. If another batch with the last seq is returned, the engine restarted.
	targetRest
	// targetPast: all batches, after targetRest returned none, not even the last batch. If that batch is among them now, the engine did not
	// restart. Other batches that were read, without the last, or with another fingerprint, show that it did.
	targetPast
	// targetSnapshot: no batches, but a snapshot.
	targetSnapshot
	// targetProof: a batch that arrived live, to find out whether the socket is the publisher's.
	targetProof
	// targetWhole: all batches, although some were read. If the first reply is early enough, everything is read again.
	targetWhole
)

// recheck is why another request has to follow a complete one.
type recheck uint8

const (
	recheckNone recheck = iota
	// recheckOverrun: live messages were dropped during the repair.
	recheckOverrun
	// recheckReconnect: the connection was replaced during the repair.
	recheckReconnect
)

// cut is why the machine ended a request before its end marker.
type cut uint8

const (
	cutNone cut = iota
	// cutHole: a batch is missing in the replies.
	cutHole
	// cutRestart: the replies are of another incarnation than the batches that were read.
	cutRestart
	// cutForgotten: the replay does not reach back to the batches that are missing. A snapshot is requested.
	cutForgotten
)

// repair fetches missing batches from the replay socket with one or more requests:
//
//  1. If no batch of the incarnation was read, all batches are requested (targetAll).
//  2. Otherwise the last batch and the later ones are requested (targetRest). If the replies begin
//     with a later batch, twice the same, the engine no longer has the batches before it.
//  3. If there is no reply, all batches are requested and compared with the batches that were read
//     (targetPast). If none has a seq that was read, a possible restart is reported.
//  4. Replies must be contiguous. At a hole the machine ends the request, and the next request
//     continues from the hole. A request also continues after an interruption, and after so many
//     replies that the last ones may have been dropped.
//  5. Then the buffered live batches are delivered. They may show another hole or a restart.
//  6. After maxFailures requests in a row that brought nothing, the missing batches are lost.
//  7. Before any batch is reported as lost, a snapshot is requested, if the engine has them.
type repair struct {
	Repair
	// since is the start of maxRepairTime.
	since time.Time
	// answered reports whether any request was answered.
	answered bool
	failures int // requests in a row that brought nothing
	recheck  recheck
	// comparePast reports whether the next request is for targetPast.
	comparePast bool
	// pastUnknown reports whether a request for targetPast returned no batch that was read.
	pastUnknown bool
	// final reports whether the request is the last one: holes in its replies are losses.
	final bool
	// forgottenTo is the first seq of the last replies that did not begin with the requested seq; 0 if all did.
	forgottenTo uint64
	retryAt     time.Time // of the next request; zero while a request is in progress
	// snapshotDue reports whether the next request is for a snapshot, after snapshotFailures in a row.
	snapshotDue      bool
	snapshotFailures int

	request request
}

// request is the request in progress, or the last one.
type request struct {
	id     uint64
	target target
	// connection is Machine.connections when the request was sent.
	connection uint32
	// sameIncarnation reports whether a reply shows that the engine did not restart.
	sameIncarnation bool
	// matchesPast reports whether a reply to targetPast is a batch that was read.
	matchesPast bool
	replies     int
	// advanced reports whether a reply was the next batch.
	advanced bool
	// proved and contradicted report whether the reply to targetProof is the live batch, or another with its seq.
	proved, contradicted bool
	cut                  cut
	// restoring reports whether a snapshot is being delivered, which includes the batches up to snapshotSeq.
	restoring   bool
	snapshotSeq uint64
}

// replayable reports whether a replay is in progress, or may be requested now.
func (m *Machine) replayable(now time.Time) bool {
	return m.repair != nil && !m.probing() || m.replayEndpoint != "" && !now.Before(m.restUntil) && m.proof.origin != originForeign
}

// retryAt returns when the next request is due; zero if no retry is pending.
func (m *Machine) retryAt() time.Time {
	if m.repair == nil {
		return time.Time{}
	}
	return m.repair.retryAt
}

// startRepair starts a repair. If one is in progress, a reconnect makes it send another request.
func (m *Machine) startRepair(now time.Time, cause Cause) {
	if m.proof.origin == originForeign && cause != CauseProof {
		return
	}
	if r := m.repair; r != nil && r.Cause == CauseProof && cause != CauseProof {
		m.endRepair() // the buffered batches wait for the other repair
	}
	m.endProbe()
	if r := m.repair; r != nil {
		if cause == CauseReconnect {
			r.recheck = recheckReconnect
			if r.Cause == CauseSilence {
				r.Cause = cause
			}
			m.state = m.repairState()
		}
		return
	}
	m.repair = &repair{Repair: Repair{Cause: cause, Began: now}, since: now}
	m.reportRepair(RepairStarted)
	m.sendRequest()
}

// reportRepair reports the progress of the repair.
func (m *Machine) reportRepair(k Kind) {
	report := m.repair.Repair
	m.emit(Action{Kind: k, Seq: m.order.last, Repair: &report})
}

// endRepair ends the repair in progress, if any. The caller sets the state.
func (m *Machine) endRepair() {
	if m.repair != nil {
		if m.repair.request.restoring {
			m.abortRestore()
		}
		m.emit(Action{Kind: CancelReplay})
		m.repair = nil
	}
}

// repairState returns the state during the repair in progress.
func (m *Machine) repairState() State {
	switch r := m.repair; {
	case r.Cause == CauseLoss:
		return m.state
	case m.state == Suspect && r.Cause == CauseSilence:
		return Suspect
	case r.Cause == CauseSilence, r.Cause == CauseProof:
		return Verifying
	case r.Cause == CauseStart, r.request.target == targetAll, m.order.progress == progressUnknown:
		return Starting
	default:
		return Repairing
	}
}

// sendRequest sends the repair's next request.
func (m *Machine) sendRequest() {
	r := m.repair
	if r.snapshotDue {
		m.sendSnapshotRequest()
		return
	}
	m.requestID++
	r.Requests++
	r.retryAt = time.Time{}
	r.request = request{id: m.requestID, target: targetRest, connection: m.connections}
	from := m.order.last
	switch {
	case r.Cause == CauseProof:
		r.request.target, from = targetProof, m.proof.seq
	case r.Cause == CauseLoss:
		r.request.target, from = targetWhole, m.order.first
	case !m.order.reading():
		r.request.target, from = targetAll, m.order.first
	case r.comparePast:
		r.request.target, from = targetPast, m.order.first
	}
	m.buffer.markRequested()
	m.state = m.repairState()
	m.emit(Action{Kind: RequestReplay, Request: &Request{
		ID: m.requestID, Cause: r.Cause, Endpoint: m.replayEndpoint, From: from, Answered: m.answered == ReplayAnswers,
		Failures: r.failures + int(min(m.loss.requests, maxFailures)),
	}})
}

// Sent is the input when a request has been sent. Its replies are newer than the batches that arrived before.
func (m *Machine) Sent(requestID uint64) {
	if !m.inProgress(requestID) {
		return
	}
	m.repair.request.connection = m.connections
	m.buffer.markRequested()
}

// Waited is the input when a request has waited for other requests. The wait does not count towards maxRepairTime.
func (m *Machine) Waited(requestID uint64, d time.Duration) {
	if m.inProgress(requestID) {
		m.repair.since = m.repair.since.Add(d)
	}
}

func (m *Machine) inProgress(requestID uint64) bool {
	return m.repair != nil && m.repair.request.id == requestID && m.repair.retryAt.IsZero()
}

// Reply is the input for the next reply to a request. more reports whether the caller should read further replies.
func (m *Machine) Reply(now time.Time, requestID uint64, b *Batch) (actions []Action, more bool) {
	m.begin()
	if !m.inProgress(requestID) || m.repair.request.target == targetSnapshot {
		return nil, false
	}
	b.Replayed, b.ReceivedAt = true, now
	m.heardAt = now
	r := m.repair
	r.answered = true
	r.request.replies++
	if r.request.target == targetProof {
		return m.actions, m.replyProof(b)
	}
	if r.request.target == targetWhole && !m.replyWhole(r, b) {
		return m.actions, false
	}
	m.comparePublisher(b)
	if m.order.reading() && m.incarnation.contradicts(b) {
		r.request.cut = cutRestart
		return m.actions, false
	}
	if m.compare(&r.request, b) {
		return m.actions, r.request.cut == cutNone
	}
	return m.actions, m.readReply(now, r, b)
}

// compare compares a reply with the batches that were read, and cuts the request if it shows a
// restart. It returns false for a batch after them.
func (m *Machine) compare(q *request, b *Batch) bool {
	known, remembered := m.order.history.find(b.Seq)
	switch {
	case q.target == targetPast && b.Seq <= m.order.last:
		switch {
		case remembered && known == b.Fingerprint:
			_, hasLast := m.order.history.find(m.order.last)
			q.matchesPast = true
			q.sameIncarnation = b.Seq == m.order.last || !hasLast
		case remembered, m.order.history.startsAfter(b.Seq):
			// The engine has a batch older than the history. If it had not restarted, it
			// would have the last batch, too, and targetPast would not have been requested.
			q.cut = cutRestart
		}
	case q.target == targetRest && b.Seq == m.order.last && !q.sameIncarnation:
		switch {
		case !remembered && m.confirms(b): // it is included in the snapshot
			q.sameIncarnation = true
		case !remembered: // it was reported as lost
			m.reportPossibleRestart()
			q.sameIncarnation = true
		case known != b.Fingerprint:
			q.cut = cutRestart
		default:
			q.sameIncarnation = true
			if m.proof.lastProved && m.proof.origin == originUnknown {
				m.prove()
			}
		}
	default:
		return q.target == targetRest && b.Seq < m.order.last // it was not requested
	}
	return true
}

// readReply reads a reply after the last batch read, and reports whether more replies are wanted.
func (m *Machine) readReply(now time.Time, r *repair, b *Batch) (more bool) {
	q := &r.request
	next, known := m.order.next()
	switch {
	case m.order.progress == progressUnknown && b.Seq > m.order.first && m.canRestore(now):
		q.cut = cutForgotten
		return false
	case m.order.progress == progressUnknown:
		if missing := m.beginIncarnation(b.Seq, rangeBetween(m.order.first, b.Seq), b); missing.count > 0 {
			m.reportGap(missing, feed.GapReplayForgotten, b)
		}
	case !known || b.Seq < next:
		return true
	case q.replies == 1 && (q.target != targetAll && !m.confirms(b) || b.Seq > next):
		// The first batch requested is missing. It may be buffered.
		q.sameIncarnation = q.sameIncarnation || m.confirms(b)
		if r.forgottenTo != b.Seq && !r.final {
			r.forgottenTo, q.cut = b.Seq, cutHole
			return false
		}
		if m.bufferContradicts() {
			q.cut = cutRestart
			return false
		}
		if m.canRestore(now) {
			q.cut = cutForgotten
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
	q.sameIncarnation = q.sameIncarnation || m.confirms(b)
	r.Batches++
	if b.Malformed {
		m.emit(Action{Kind: Reject, Batch: b})
		m.reportGap(seqRange{}.through(b.Seq), feed.GapReplayIncomplete, b)
	}
	m.read(b)
	return true
}

package sequence

import "time"

const (
	// minLossWait is the wait before the replay socket is asked whether it can repair a loss, from the last message
	// on. Each further such request doubles the wait, up to maxLossWait.
	minLossWait = time.Second
	maxLossWait = 10 * time.Minute
)

// loss is a reported loss that the replay socket may still repair, because the socket did not answer:
//
//  1. While nothing else is requested, all batches of the incarnation are, after a wait (CauseLoss, targetWhole). Live
//     batches are delivered meanwhile. Any other need for the socket ends the request.
//  2. If the first reply is the incarnation's first batch, or before the first one read, the view is emptied, and
//     everything is read again (BeginReread).
//  3. If it is a later one, the engine no longer has what is missing, and the loss is final.
//  4. Otherwise the socket is asked again after a longer wait.
//
// Batches that arrive while the first reply is on its way are not buffered. The last of them is then known to be missing,
// see Machine.unbuffered, and is requested after the others.
type loss struct {
	known    bool
	final    bool      // for this incarnation
	requests uint      // sent because of it
	at       time.Time // when the next is due
}

// noteLoss records a loss that was reported without an answer of the replay socket.
func (m *Machine) noteLoss() {
	if m.loss.known || m.loss.final {
		return
	}
	m.loss.known = true
	m.loss.at = m.heardAt.Add(lossWait(m.loss.requests))
}

func lossWait(requests uint) time.Duration {
	return min(minLossWait<<min(requests, 20), maxLossWait)
}

// lossAt returns when the replay socket is due to be asked for all batches because of a loss; zero if it is not.
func (m *Machine) lossAt() time.Time {
	if !m.loss.known || m.loss.final || m.repair != nil || !m.Connected() || m.replayEndpoint == "" ||
		m.proof.origin == originForeign || m.state != Live {
		return time.Time{}
	}
	return m.loss.at
}

// askForLoss asks the replay socket for all batches.
func (m *Machine) askForLoss(now time.Time) {
	m.loss.requests++
	m.loss.at = now.Add(lossWait(m.loss.requests))
	m.startRepair(now, CauseLoss)
}

// probing reports whether all batches are being requested because of a loss, and none has been returned yet.
func (m *Machine) probing() bool { return m.repair != nil && m.repair.Cause == CauseLoss }

// endProbe ends a request for all batches of which none has been returned.
func (m *Machine) endProbe() {
	if m.probing() {
		m.endRepair()
	}
}

// replyWhole handles the first reply to a request for all batches. It reports whether everything is read again, with this
// reply as the first batch.
func (m *Machine) replyWhole(r *repair, b *Batch) (reread bool) {
	known, remembered := m.order.history.find(b.Seq)
	switch {
	case m.incarnation.contradicts(b), remembered && known != b.Fingerprint:
		r.Cause, r.request.cut = CauseReconnect, cutRestart
		return false
	case b.Seq != m.order.first && b.Seq >= m.begun || b.Malformed:
		m.loss.final = true
		return false
	}
	m.emit(Action{Kind: BeginReread, Seq: b.Seq, Batch: b})
	m.unbuffered, m.hasUnbuffered = m.order.last, m.order.reading()
	m.order.reset()
	m.former = former{}
	m.possibleRestartReported, m.hasSnapshot = false, false
	m.overrunPending, m.overrunUntil = false, time.Time{}
	m.loss.known = false
	r.Cause, r.request.target = CauseStart, targetAll
	m.state = m.repairState()
	return true
}

// endWhole evaluates a request for all batches to which no reply was used.
func (m *Machine) endWhole(now time.Time, r *repair, outcome Outcome) {
	answered := r.request.replies > 0 || outcome == OutcomeComplete
	m.endRepair()
	if !answered {
		return
	}
	m.restUntil = time.Time{}
	if r.request.replies == 0 {
		m.startRepair(now, CauseReconnect) // an engine that did not restart would have its last batch
	}
}

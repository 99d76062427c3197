package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// maxContradictions is how many times in a row the replay socket must return another batch than the live one before it
	// counts as another publisher's. If the engine has restarted instead, its connection ends in the meantime.
	maxContradictions = 3
	contradictionWait = time.Second
)

// origin is what is known of the replay socket.
type origin uint8

const (
	// originUnknown: it may belong to another publisher.
	originUnknown origin = iota
	// originProved: it is the publisher's.
	originProved
	// originForeign: it is another publisher's. Nothing is read from it, and it is asked again after RestTime.
	originForeign
)

// proof shows whether the replay socket is the publisher's:
//
//  1. It is if it returns a batch that has arrived live, with the same fingerprint. Such a batch is the last one read, unless
//     it was replayed without proof, and the first live one of a connection.
//  2. Until then, replayed batches are delivered as Unproved. As soon as there is a live batch, and no repair is in progress,
//     it is requested, while it and later ones are buffered.
//  3. If the socket returns another batch with its seq, it is asked again, up to maxContradictions times: the engine may have
//     restarted, which the end of the connection shows. Then the socket is another publisher's, and all that was read is
//     discarded.
//  4. If the socket does not return the seq, nothing is known. The next live batch after RestTime is requested.
type proof struct {
	origin origin
	// seq and fingerprint are of the live batch to ask for, if known.
	known       bool
	seq         uint64
	fingerprint Fingerprint
	// notBefore is when another may be asked for, after the socket did not return this one; else zero.
	notBefore time.Time
	// unproved reports whether a batch of the incarnation was delivered as Unproved.
	unproved bool
	// lastProved reports whether the last batch read arrived live, or was replayed with proof.
	lastProved bool
	// contradictions is how often in a row the socket returned another batch.
	contradictions int
}

// resetProof forgets what another connection has shown.
func (m *Machine) resetProof() {
	if m.proof.origin == originProved {
		m.proof.origin = originUnknown
	}
	m.proof.known, m.proof.contradictions, m.proof.notBefore = false, 0, time.Time{}
}

// recordLive records a live batch to ask for, unless there is one.
func (m *Machine) recordLive(now time.Time, b *Batch) {
	p := &m.proof
	if p.origin == originProved || b.Malformed || b.connection != m.connections || m.replayEndpoint == "" {
		return
	}
	if p.known && (p.notBefore.IsZero() || now.Before(p.notBefore)) {
		return
	}
	if known, ok := m.order.history.find(b.Seq); ok && known == b.Fingerprint && p.origin == originUnknown {
		m.prove() // it was replayed before it arrived
		return
	}
	p.known, p.seq, p.fingerprint, p.notBefore = true, b.Seq, b.Fingerprint, time.Time{}
}

// isProof reports whether a buffered batch is the live one to ask for, and it is not known whose the replay socket is.
func (m *Machine) isProof(b *Batch) bool {
	p := &m.proof
	return p.origin == originUnknown && p.known && p.notBefore.IsZero() && b.Seq == p.seq && b.Fingerprint == p.fingerprint && b.connection == m.connections &&
		m.current.ID != 0
}

// wantsProof reports whether the recorded live batch is to be requested now.
func (m *Machine) wantsProof(now time.Time) bool {
	p := &m.proof
	return p.origin != originProved && p.known && m.repair == nil && m.state != Conflicted && m.current.ID != 0 &&
		m.replayEndpoint != "" && !now.Before(m.restUntil) && !now.Before(p.notBefore)
}

// prove records that the replay socket is the publisher's.
func (m *Machine) prove() {
	was := m.proof.origin
	m.proof.origin, m.proof.contradictions = originProved, 0
	if m.proof.unproved {
		m.proof.unproved = false
		m.emit(Action{Kind: ReportProved, Seq: m.order.last})
	}
	m.proof.lastProved = m.proof.lastProved || was == originUnknown
}

// comparePublisher records that the replay socket is the publisher's if a reply is the live batch of its seq. If it is
// another, the engine may have restarted meanwhile.
func (m *Machine) comparePublisher(b *Batch) {
	p := &m.proof
	if p.known && p.origin == originUnknown && b.Seq == p.seq && b.Fingerprint == p.fingerprint {
		m.prove()
	}
}

// requestProof starts to ask for the recorded live batch.
func (m *Machine) requestProof(now time.Time) { m.startRepair(now, CauseProof) }

// requestProofInstead makes a repair go on with a request for the recorded live batch, which the replies contradict.
func (m *Machine) requestProofInstead(r *repair) {
	r.Cause = CauseProof
	m.sendRequest()
}

// replyProof handles a reply to a request for the live batch, and reports whether more are wanted.
func (m *Machine) replyProof(b *Batch) (more bool) {
	p := &m.proof
	switch {
	case b.Seq < p.seq:
		return true
	case b.Seq == p.seq && b.Fingerprint == p.fingerprint:
		m.repair.request.proved = true
	case b.Seq == p.seq:
		m.repair.request.contradicted = true
	}
	return false
}

// endProof evaluates a request for the live batch, and goes on with the buffered batches.
func (m *Machine) endProof(now time.Time, r *repair) {
	p := &m.proof
	switch q := &r.request; {
	case q.proved && p.origin == originForeign:
		// The publisher's own socket has replaced the other's: what was not read can be.
		m.prove()
		m.endRepair()
		m.restart(EvidenceConflict, m.order.last)
		m.former = former{}
		m.startRepair(now, CauseReconnect)
		return
	case q.proved:
		m.prove()
	case q.contradicted && p.origin == originUnknown && p.contradictions+1 < maxContradictions:
		p.contradictions++
		r.retryAt = now.Add(contradictionWait)
		return
	case q.contradicted && p.origin == originUnknown:
		m.foreign(now)
		return
	case q.contradicted:
		m.restUntil = now.Add(RestTime)
		p.known = false
	default:
		p.notBefore = now.Add(RestTime)
	}
	m.endRepair()
	m.state = m.settledState()
	m.deliverBuffered(now)
}

// foreign discards what the replay socket of another publisher has returned, and continues with the live batches.
func (m *Machine) foreign(now time.Time) {
	m.emit(Action{Kind: ReportForeign, Reason: feed.GapReplayForeign})
	m.endRepair()
	m.forgetIncarnation()
	m.restarts = 0 // the batches before the first live one were published before kvcast connected, as far as it knows
	m.former, m.hasUnbuffered = former{}, false
	m.proof = proof{origin: originForeign}
	m.restUntil = now.Add(RestTime)
	m.state = m.settledState()
	m.deliverAllBuffered()
	m.state = m.settledState()
}

// deliverAllBuffered delivers the buffered batches, and reports those that are missing between them, since no replay socket can be asked.
func (m *Machine) deliverAllBuffered() {
	for m.bufferHead() != nil {
		m.flushWithoutReplay()
		if m.bufferHead() != nil {
			b := m.buffer.pop()
			v, missing := m.classify(b)
			m.deliverWithoutReplay(b, v, missing)
		}
	}
}

// deliverBuffered delivers the batches that were buffered during a request for one of them.
func (m *Machine) deliverBuffered(now time.Time) {
	for b := m.bufferHead(); b != nil; b = m.bufferHead() {
		if b.connection != m.connections {
			m.startRepair(now, CauseReconnect)
			return
		}
		if !m.replayable(now) {
			m.deliverAllBuffered()
			return
		}
		c := *b
		if !m.deliverInOrder(&c) {
			m.startRepair(now, CauseGap)
			return
		}
		m.buffer.pop()
	}
	if m.hasUnbuffered && m.replayable(now) {
		m.startRepair(now, CauseGap)
	}
}

// endProofRequest ends a request for a live batch without a result, and goes on with the buffered batches.
func (m *Machine) endProofRequest(now time.Time) {
	if m.repair == nil || m.repair.Cause != CauseProof {
		return
	}
	m.endRepair()
	m.state = m.settledState()
	m.deliverBuffered(now)
}

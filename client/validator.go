package client

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// delivered is the part of the state that has been delivered.
type delivered uint8

const (
	deliveredNothing delivered = iota // no stream has been accepted
	deliveredPart                     // a part of a snapshot
	deliveredAll                      // the state at a position
)

// streamPhase is the phase of a stream. It determines which messages are valid next.
type streamPhase uint8

const (
	phaseStart            streamPhase = iota // valid: Accepted
	phaseAwaitingSnapshot                    // valid: heartbeats and SnapshotBegin
	phaseSnapshot                            // valid: parts of a snapshot and heartbeats
	phaseFollowing                           // valid: entries, Progress and SnapshotBegin
)

// validator checks that no message is missing, duplicate or out of order, over all streams of a subscription:
//
//   - prev_seq is the seq of the previous position. Seqs of entries are contiguous; with a filter they grow.
//   - The event_ids of a worker are contiguous; with a filter by tier they grow.
//   - After a snapshot or the first entry, a worker has no event before its worker_added.
//   - A position has the seq of the last entry before it and the epoch of the stream.
//   - Accepted, SnapshotBegin and SnapshotEnd are in a message of their own, with a position at most.
//
// Before and within a snapshot, Progress without a position is a heartbeat.
//
// The event_ids of a worker that is removed and added again are not compared, since the server remembers the
// event_ids of a bounded number of removed workers. The seqs still show that no entry is missing.
type validator struct {
	filtered      bool // seqs may have holes
	tierFiltered  bool // event_ids may have holes
	failOnGap     bool // GapFail: a snapshot must not replace entries
	delivered     delivered
	epoch         string
	seq           uint64            // seq of the last position
	snapshotSeq   uint64            // seq of the last entry in a snapshot
	workersKnown  bool              // all existing workers were delivered
	lastEventIDs  map[string]uint64 // last event_id, by worker
	phase         streamPhase
	start         Start  // requested for the current stream
	acceptedEpoch string // epoch of the current stream's Accepted
}

func newValidator(f *kvcastv1.Filter, p GapPolicy) *validator {
	return &validator{
		filtered:     len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) > 0,
		tierFiltered: len(f.GetTiers()) > 0,
		failOnGap:    p == GapFail,
		lastEventIDs: make(map[string]uint64),
	}
}

// position returns the position from which to resume; zero if the delivered state is incomplete.
func (v *validator) position() Position {
	if v.delivered != deliveredAll {
		return Position{}
	}
	return Position{Epoch: v.epoch, Seq: v.seq}
}

// stored returns the position that the caller may store with its state: none while a snapshot is expected that replaces the state.
func (v *validator) stored() Position {
	if v.phase == phaseAwaitingSnapshot {
		return Position{}
	}
	return v.position()
}

// startStream makes an Accepted the only valid next message.
func (v *validator) startStream(s Start) { v.phase, v.start, v.acceptedEpoch = phaseStart, s, "" }

// validate checks the next message of the stream. The error is a *ViolationError.
func (v *validator) validate(m *kvcastv1.SubscribeResponse) error {
	at := v.position()
	if violation := v.message(m); violation != "" {
		return &ViolationError{At: at, What: violation}
	}
	return nil
}

// message checks a message and returns a description of its violation, as the methods below do; empty: none.
func (v *validator) message(m *kvcastv1.SubscribeResponse) string {
	switch {
	case v.phase != phaseStart && isUnknownKind(m):
		return ""
	case isMixed(m):
		return "Accepted, SnapshotBegin or SnapshotEnd in a message with other contents"
	case v.phase == phaseStart && m.GetAccepted() == nil:
		return "the first message has no Accepted"
	case v.phase == phaseStart:
		return v.accept(m)
	case m.GetAccepted() != nil:
		return "a second Accepted"
	case m.GetSnapshotBegin() != nil:
		return v.beginSnapshot(m.GetSnapshotBegin())
	case v.phase != phaseFollowing && isHeartbeat(m):
		return ""
	case v.phase == phaseAwaitingSnapshot:
		return "another message instead of the announced snapshot"
	case m.GetProgress() != nil && v.phase == phaseSnapshot:
		return "Progress within a snapshot that is not a heartbeat"
	case v.phase == phaseSnapshot:
		return v.snapshotPart(m)
	case m.GetSnapshotEnd() != nil, m.GetSnapshotWorker() != nil, len(m.GetSnapshotBlocks()) > 0:
		return "part of a snapshot that has not begun"
	}
	return v.follow(m)
}

// isMixed reports whether a message has an Accepted, SnapshotBegin or SnapshotEnd, and another field except for the position.
func isMixed(m *kvcastv1.SubscribeResponse) bool {
	accepted, begin, end := m.GetAccepted() != nil, m.GetSnapshotBegin() != nil, m.GetSnapshotEnd() != nil
	others := hasContents(m) || m.GetProgress() != nil
	return accepted && (begin || end || others) || begin && (end || others) || end && others
}

// hasContents reports whether a message has entries, or a worker or blocks of a snapshot.
func hasContents(m *kvcastv1.SubscribeResponse) bool {
	return len(m.GetEntries()) > 0 || m.GetSnapshotWorker() != nil || len(m.GetSnapshotBlocks()) > 0
}

// isUnknownKind reports whether a message has only fields of later versions of the contract. The message can be
// ignored since it has no position.
func isUnknownKind(m *kvcastv1.SubscribeResponse) bool {
	return len(m.ProtoReflect().GetUnknown()) > 0 && m.GetPosition() == nil && m.GetPrevSeq() == 0 &&
		m.GetAccepted() == nil && m.GetProgress() == nil && m.GetSnapshotBegin() == nil && m.GetSnapshotEnd() == nil && !hasContents(m)
}

// isHeartbeat reports whether a message is Progress without a position.
func isHeartbeat(m *kvcastv1.SubscribeResponse) bool {
	return m.GetProgress() != nil && m.GetPosition() == nil && m.GetPrevSeq() == 0 && !hasContents(m)
}

func (v *validator) accept(m *kvcastv1.SubscribeResponse) string {
	a, at := m.GetAccepted(), m.GetPosition()
	mode, want := a.GetMode(), v.start.acceptedMode()
	v.acceptedEpoch = a.GetEpoch()
	switch {
	case v.acceptedEpoch == "":
		return "an Accepted without an epoch"
	case mode == kvcastv1.Accepted_MODE_SNAPSHOT && (want == mode || want == kvcastv1.Accepted_MODE_RESUME && !v.failOnGap):
		v.phase = phaseAwaitingSnapshot
		return ""
	case mode != want:
		return fmt.Sprintf("requested %v, got %v", want, mode)
	case at.GetEpoch() != v.acceptedEpoch:
		return fmt.Sprintf("an Accepted of epoch %q with a position of epoch %q", v.acceptedEpoch, at.GetEpoch())
	}
	if after := v.start.after; want == kvcastv1.Accepted_MODE_RESUME &&
		(after.Epoch != "" && after.Epoch != v.acceptedEpoch || after.Seq != at.GetSeq()) {
		return fmt.Sprintf("requested to resume after %v, got %s:%d", after, at.GetEpoch(), at.GetSeq())
	}
	if v.delivered == deliveredNothing {
		v.workersKnown = at.GetSeq() == 0
	}
	v.delivered, v.epoch, v.seq = deliveredAll, v.acceptedEpoch, at.GetSeq()
	v.phase = phaseFollowing
	return ""
}

func (v *validator) beginSnapshot(b *kvcastv1.SnapshotBegin) string {
	switch {
	case b.GetEpoch() != v.acceptedEpoch:
		return fmt.Sprintf("a snapshot of epoch %q in a stream of epoch %q", b.GetEpoch(), v.acceptedEpoch)
	case v.phase == phaseFollowing && v.failOnGap:
		return "a snapshot in a stream that must continue or fail"
	}
	v.phase, v.delivered, v.epoch = phaseSnapshot, deliveredPart, v.acceptedEpoch
	v.seq, v.snapshotSeq, v.workersKnown = 0, 0, false
	clear(v.lastEventIDs)
	return ""
}

func (v *validator) snapshotPart(m *kvcastv1.SubscribeResponse) string {
	if w := m.GetSnapshotWorker(); w != nil {
		if _, ok := v.lastEventIDs[w.GetWorker()]; ok {
			return fmt.Sprintf("worker %q twice in a snapshot", w.GetWorker())
		}
		v.lastEventIDs[w.GetWorker()] = w.GetLastEventId()
	}
	for _, e := range m.GetEntries() {
		if e.GetSeq() <= v.snapshotSeq {
			return fmt.Sprintf("entry %d after %d", e.GetSeq(), v.snapshotSeq)
		}
		v.snapshotSeq = e.GetSeq()
		if violation := v.events(e); violation != "" {
			return violation
		}
	}
	if m.GetSnapshotEnd() == nil {
		return ""
	}
	at := m.GetPosition()
	switch {
	case at.GetEpoch() != v.epoch:
		return fmt.Sprintf("a snapshot of epoch %q ends in epoch %q", v.epoch, at.GetEpoch())
	case at.GetSeq() < v.snapshotSeq || m.GetPrevSeq() != at.GetSeq():
		return fmt.Sprintf("a snapshot with entry %d ends at %d with prev_seq %d", v.snapshotSeq, at.GetSeq(), m.GetPrevSeq())
	}
	v.phase, v.delivered, v.seq, v.workersKnown = phaseFollowing, deliveredAll, at.GetSeq(), true
	return ""
}

// follow checks entries and Progress.
func (v *validator) follow(m *kvcastv1.SubscribeResponse) string {
	at := m.GetPosition()
	switch {
	case at.GetEpoch() != v.epoch:
		return fmt.Sprintf("a message of epoch %q in a stream of epoch %q", at.GetEpoch(), v.epoch)
	case m.GetPrevSeq() != v.seq:
		return fmt.Sprintf("a message with prev_seq %d after one at %d: a message is missing", m.GetPrevSeq(), v.seq)
	}
	last := v.seq
	for _, e := range m.GetEntries() {
		if e.GetSeq() <= last || !v.filtered && e.GetSeq() != last+1 {
			return fmt.Sprintf("entry %d after %d", e.GetSeq(), last)
		}
		last = e.GetSeq()
		if violation := v.events(e); violation != "" {
			return violation
		}
	}
	if at.GetSeq() < last || !v.filtered && at.GetSeq() != last {
		return fmt.Sprintf("position %d after entry %d", at.GetSeq(), last)
	}
	v.seq = at.GetSeq()
	return ""
}

// events checks the event_ids of an entry.
func (v *validator) events(e *kvcastv1.Entry) string {
	name := e.GetWorker()
	last, known := v.lastEventIDs[name]
	for _, ev := range e.GetEvents() {
		added := ev.GetWorkerAdded() != nil
		switch id := ev.GetEventId(); {
		case !known && v.workersKnown && !added:
			return fmt.Sprintf("entry %d of unknown worker %q", e.GetSeq(), name)
		case known && id <= last:
			return fmt.Sprintf("event %d of worker %q in entry %d after event %d", id, name, e.GetSeq(), last)
		case known && id != last+1 && !v.tierFiltered && !added:
			return fmt.Sprintf("event %d of worker %q in entry %d instead of event %d", id, name, e.GetSeq(), last+1)
		}
		last, known = ev.GetEventId(), ev.GetWorkerRemoved() == nil
	}
	if known {
		v.lastEventIDs[name] = last
	} else {
		delete(v.lastEventIDs, name)
	}
	return ""
}

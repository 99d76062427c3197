package client

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// delivered is how much of the state has been delivered.
type delivered uint8

const (
	deliveredNothing delivered = iota // no stream has been accepted
	deliveredPart                     // a snapshot has begun and not ended
	deliveredAll                      // everything up to a position
)

// streamPhase is which messages are valid next in the current stream.
type streamPhase uint8

const (
	phaseStart            streamPhase = iota // Accepted
	phaseAwaitingSnapshot                    // SnapshotBegin, and heartbeats before it
	phaseSnapshot                            // parts of a snapshot, and heartbeats
	phaseFollowing                           // entries and Progress
)

// validator checks that each message continues what was delivered before, over all streams of a subscription:
//
//   - prev_seq is the seq of the previous position. Seqs of entries are contiguous; with a filter they grow.
//   - event_ids of a worker are contiguous, unless a filter by tier leaves events out.
//   - After a snapshot, or from the first entry on, workers have events only after they were added.
//   - A position is that of the last entry before it, and its epoch does not change.
//   - Accepted, SnapshotBegin and SnapshotEnd share their message with a position only.
//
// While a snapshot is announced or in progress, Progress without a position is a heartbeat.
//
// The event_ids of a removed worker say nothing about those after it is added again, since
// the server remembers a bounded number of workers. The seqs show that no entry is missing.
type validator struct {
	filtered      bool // seqs may have holes
	tierFiltered  bool // event_ids may have holes
	failOnGap     bool // no snapshot may replace entries
	delivered     delivered
	epoch         string
	seq           uint64            // of the last position
	snapshotSeq   uint64            // of the last entry of a snapshot
	workersKnown  bool              // all existing workers were delivered
	lastEventIDs  map[string]uint64 // by worker
	phase         streamPhase
	start         Start  // of the current stream
	acceptedEpoch string // of the current stream
}

func newValidator(f *kvcastv1.Filter, p GapPolicy) *validator {
	return &validator{
		filtered:     len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) > 0,
		tierFiltered: len(f.GetTiers()) > 0,
		failOnGap:    p == GapFail,
		lastEventIDs: make(map[string]uint64),
	}
}

// position returns where to resume; zero if the delivered state is incomplete.
func (v *validator) position() Position {
	if v.delivered != deliveredAll {
		return Position{}
	}
	return Position{Epoch: v.epoch, Seq: v.seq}
}

// startStream prepares for the first message of another stream.
func (v *validator) startStream(s Start) { v.phase, v.start, v.acceptedEpoch = phaseStart, s, "" }

// validate accepts the next message of the stream, or returns a *ViolationError.
func (v *validator) validate(m *kvcastv1.SubscribeResponse) error {
	at := v.position()
	if violation := v.message(m); violation != "" {
		return &ViolationError{At: at, What: violation}
	}
	return nil
}

// message accepts a message, or describes its violation. The other methods that return a string do the same.
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
		return "another message in place of the announced snapshot"
	case m.GetProgress() != nil && v.phase == phaseSnapshot:
		return "Progress within a snapshot that is no heartbeat"
	case v.phase == phaseSnapshot:
		return v.snapshotPart(m)
	case m.GetSnapshotEnd() != nil, m.GetSnapshotWorker() != nil, len(m.GetSnapshotBlocks()) > 0:
		return "part of a snapshot that has not begun"
	}
	return v.follow(m)
}

// isMixed reports whether an Accepted, SnapshotBegin or SnapshotEnd shares its message with
// anything but a position. Each changes the meaning of the rest.
func isMixed(m *kvcastv1.SubscribeResponse) bool {
	marks := 0
	for _, has := range [...]bool{m.GetAccepted() != nil, m.GetSnapshotBegin() != nil, m.GetSnapshotEnd() != nil} {
		if has {
			marks++
		}
	}
	return marks > 1 || marks == 1 && (hasContents(m) || m.GetProgress() != nil)
}

// hasContents reports whether a message has entries or contents of a snapshot.
func hasContents(m *kvcastv1.SubscribeResponse) bool {
	return len(m.GetEntries()) > 0 || m.GetSnapshotWorker() != nil || len(m.GetSnapshotBlocks()) > 0
}

// isUnknownKind reports whether a message is of a kind that only later versions of the
// contract have. It can be ignored since it has no position.
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
		return "a snapshot where the stream had to continue or fail"
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

// follow accepts entries and Progress.
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

// events accepts the event_ids of an entry.
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
			return fmt.Sprintf("event %d of worker %q in entry %d in place of event %d", id, name, e.GetSeq(), last+1)
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

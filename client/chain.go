package client

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// held is what has been delivered.
type held uint8

const (
	heldNothing held = iota // no stream has been accepted
	heldPart                // a snapshot has begun, and not ended
	heldWhole               // everything up to a position
)

// phase is what may come next in the current stream.
type phase uint8

const (
	phaseAsked     phase = iota // Accepted
	phaseAnnounced              // SnapshotBegin, and signs of life before
	phaseSnapshot               // parts of a snapshot, and signs of life
	phaseFollowing              // entries and progress
)

// chain checks that each message follows on what was delivered before it, over all
// streams of a subscription:
//
//   - prev_seq is the seq of the position before, and without a filter the seqs of
//     entries are contiguous; with one they grow;
//   - event_ids of a worker are contiguous, where no filter of tiers leaves events
//     out;
//   - after a snapshot, or from the first entry on, no worker has an event that was
//     not added;
//   - positions stand where their entries end, and epochs do not change;
//   - what begins or ends something stands alone in its message, but for a position.
//
// While a snapshot that was announced or has begun waits for its turn, Progress without
// a position says that the stream is alive, and nothing else.
//
// An event_id of a worker that was removed says nothing of the next, when it is added
// again: the server forgets it after others. That its removal and all between is there
// is known by the seqs.
type chain struct {
	filtered bool // seqs may have holes
	tiered   bool // event_ids may have holes
	fail     bool // no snapshot may take the place of entries

	held  held
	epoch string
	seq   uint64            // of the last position
	last  uint64            // of the last entry of a snapshot
	told  bool              // every worker that there is was told
	ids   map[string]uint64 // event_ids of workers' last events

	// The current stream.
	phase  phase
	start  Start
	server string // its epoch
}

func newChain(f *kvcastv1.Filter, p GapPolicy) *chain {
	return &chain{
		filtered: len(f.GetWorkers())+len(f.GetModels())+len(f.GetTiers()) > 0,
		tiered:   len(f.GetTiers()) > 0,
		fail:     p == GapFail,
		ids:      make(map[string]uint64),
	}
}

// position is where to resume: the zero Position where what is held is not whole.
func (c *chain) position() Position {
	if c.held != heldWhole {
		return Position{}
	}
	return Position{Epoch: c.epoch, Seq: c.seq}
}

// begin begins another stream.
func (c *chain) begin(s Start) { c.phase, c.start, c.server = phaseAsked, s, "" }

// check takes the next message of the stream, or returns a *ViolationError.
func (c *chain) check(m *kvcastv1.SubscribeResponse) error {
	at := c.position()
	if what := c.wrong(m); what != "" {
		return &ViolationError{At: at, What: what}
	}
	return nil
}

// wrong takes a message, or says what is wrong with it.
func (c *chain) wrong(m *kvcastv1.SubscribeResponse) string {
	switch {
	case c.phase != phaseAsked && foreign(m):
		return ""
	case mixed(m):
		return "what has to stand alone in a message does not"
	case c.phase == phaseAsked && m.GetAccepted() == nil:
		return "its first message is no Accepted"
	case c.phase == phaseAsked:
		return c.accept(m)
	case m.GetAccepted() != nil:
		return "a second Accepted"
	case m.GetSnapshotBegin() != nil:
		return c.snapshotBegin(m.GetSnapshotBegin())
	case c.phase != phaseFollowing && alive(m):
		return ""
	case c.phase == phaseAnnounced:
		return "a snapshot was to come, and something else did"
	case m.GetProgress() != nil && c.phase == phaseSnapshot:
		return "progress within a snapshot with more than a sign of life"
	case c.phase == phaseSnapshot:
		return c.snapshotPart(m)
	case m.GetSnapshotEnd() != nil, m.GetSnapshotWorker() != nil, len(m.GetSnapshotBlocks()) > 0:
		return "part of a snapshot that has not begun"
	}
	return c.follow(m)
}

// mixed tells that an Accepted, or the begin or end of a snapshot, is not all there is
// of a message beside its position: each changes what the rest would be part of.
func mixed(m *kvcastv1.SubscribeResponse) bool {
	marks := 0
	for _, has := range [...]bool{m.GetAccepted() != nil, m.GetSnapshotBegin() != nil, m.GetSnapshotEnd() != nil} {
		if has {
			marks++
		}
	}
	return marks > 1 || marks == 1 && (hasParts(m) || m.GetProgress() != nil)
}

// hasParts tells that a message has entries, or parts of a snapshot.
func hasParts(m *kvcastv1.SubscribeResponse) bool {
	return len(m.GetEntries()) > 0 || m.GetSnapshotWorker() != nil || len(m.GetSnapshotBlocks()) > 0
}

// foreign tells that a message is of a kind that later versions of the contract have,
// and that this one can do without: it has no position to go on from.
func foreign(m *kvcastv1.SubscribeResponse) bool {
	return len(m.ProtoReflect().GetUnknown()) > 0 && m.GetPosition() == nil && m.GetPrevSeq() == 0 &&
		m.GetAccepted() == nil && m.GetProgress() == nil && m.GetSnapshotBegin() == nil && m.GetSnapshotEnd() == nil && !hasParts(m)
}

// alive tells that a message is a sign of life, which tells nothing of a position.
func alive(m *kvcastv1.SubscribeResponse) bool {
	return m.GetProgress() != nil && m.GetPosition() == nil && m.GetPrevSeq() == 0 && !hasParts(m)
}

func (c *chain) accept(m *kvcastv1.SubscribeResponse) string {
	a, at := m.GetAccepted(), m.GetPosition()
	mode, want := a.GetMode(), c.start.mode()
	c.server = a.GetEpoch()
	switch {
	case c.server == "":
		return "an Accepted without an epoch"
	case mode == kvcastv1.Accepted_MODE_SNAPSHOT && (want == mode || want == kvcastv1.Accepted_MODE_RESUME && !c.fail):
		c.phase = phaseAnnounced
		return ""
	case mode != want:
		return fmt.Sprintf("asked for %v, got %v", want, mode)
	case at.GetEpoch() != c.server:
		return fmt.Sprintf("the position of an Accepted of epoch %q is of epoch %q", c.server, at.GetEpoch())
	}
	if want == kvcastv1.Accepted_MODE_RESUME {
		after := c.start.after
		if after.Epoch != "" && after.Epoch != c.server || after.Seq != at.GetSeq() {
			return fmt.Sprintf("asked to resume after %v, and it does after %s:%d", after, at.GetEpoch(), at.GetSeq())
		}
	}
	if c.held == heldNothing {
		c.told = at.GetSeq() == 0
	}
	c.held, c.epoch, c.seq = heldWhole, c.server, at.GetSeq()
	c.phase = phaseFollowing
	return ""
}

func (c *chain) snapshotBegin(b *kvcastv1.SnapshotBegin) string {
	switch {
	case b.GetEpoch() != c.server:
		return fmt.Sprintf("a snapshot of epoch %q in a stream of epoch %q", b.GetEpoch(), c.server)
	case c.phase == phaseFollowing && c.fail:
		return "a snapshot where the stream had to go on or to fail"
	}
	c.phase, c.held, c.epoch = phaseSnapshot, heldPart, c.server
	c.seq, c.last, c.told = 0, 0, false
	clear(c.ids)
	return ""
}

func (c *chain) snapshotPart(m *kvcastv1.SubscribeResponse) string {
	if w := m.GetSnapshotWorker(); w != nil {
		if _, ok := c.ids[w.GetWorker()]; ok {
			return fmt.Sprintf("worker %q twice in a snapshot", w.GetWorker())
		}
		c.ids[w.GetWorker()] = w.GetLastEventId()
	}
	for _, e := range m.GetEntries() {
		if e.GetSeq() <= c.last {
			return fmt.Sprintf("entry %d after %d", e.GetSeq(), c.last)
		}
		c.last = e.GetSeq()
		if what := c.events(e); what != "" {
			return what
		}
	}
	if m.GetSnapshotEnd() == nil {
		return ""
	}
	at := m.GetPosition()
	switch {
	case at.GetEpoch() != c.epoch:
		return fmt.Sprintf("a snapshot of epoch %q ends in epoch %q", c.epoch, at.GetEpoch())
	case at.GetSeq() < c.last || m.GetPrevSeq() != at.GetSeq():
		return fmt.Sprintf("a snapshot that has entry %d ends at %d with prev_seq %d", c.last, at.GetSeq(), m.GetPrevSeq())
	}
	c.phase, c.held, c.seq, c.told = phaseFollowing, heldWhole, at.GetSeq(), true
	return ""
}

// follow takes entries and progress.
func (c *chain) follow(m *kvcastv1.SubscribeResponse) string {
	at := m.GetPosition()
	switch {
	case at.GetEpoch() != c.epoch:
		return fmt.Sprintf("a message of epoch %q in a stream of epoch %q", at.GetEpoch(), c.epoch)
	case m.GetPrevSeq() != c.seq:
		return fmt.Sprintf("a message that follows on %d after one at %d: one is missing", m.GetPrevSeq(), c.seq)
	}
	last := c.seq
	for _, e := range m.GetEntries() {
		if e.GetSeq() <= last || !c.filtered && e.GetSeq() != last+1 {
			return fmt.Sprintf("entry %d after %d", e.GetSeq(), last)
		}
		last = e.GetSeq()
		if what := c.events(e); what != "" {
			return what
		}
	}
	if at.GetSeq() < last || !c.filtered && at.GetSeq() != last {
		return fmt.Sprintf("position %d after entry %d", at.GetSeq(), last)
	}
	c.seq = at.GetSeq()
	return ""
}

// events takes the event_ids of an entry.
func (c *chain) events(e *kvcastv1.Entry) string {
	name := e.GetWorker()
	id, known := c.ids[name]
	for _, ev := range e.GetEvents() {
		added := ev.GetWorkerAdded() != nil
		switch next := ev.GetEventId(); {
		case !known && c.told && !added:
			return fmt.Sprintf("entry %d is of worker %q, of which nothing was told", e.GetSeq(), name)
		case known && next <= id:
			return fmt.Sprintf("event %d of worker %q in entry %d after event %d", next, name, e.GetSeq(), id)
		case known && next != id+1 && !c.tiered && !added:
			return fmt.Sprintf("event %d of worker %q in entry %d, where %d was to come", next, name, e.GetSeq(), id+1)
		}
		id, known = ev.GetEventId(), ev.GetWorkerRemoved() == nil
	}
	if known {
		c.ids[name] = id
	} else {
		delete(c.ids, name)
	}
	return ""
}

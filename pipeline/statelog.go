package pipeline

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// stateVersion is the version of the stored messages EntryState and Checkpoint.
const stateVersion = 1

// stateLog collects what recovery needs beside the events of a lane's entries: a kvcast.state.v1.EntryState for each
// entry. What changes without an event waits for the lane's next entry. The changes are numbered, so that recovery
// skips those that a checkpoint already has. A nil stateLog records nothing: the journal is not durable.
type stateLog struct {
	// changes are the waiting changes, as encoded fields EntryState.changes. first is the number of the lane's
	// changes in earlier entries, waiting the number in changes.
	changes        []byte
	first, waiting uint64
	// cursors are those of the publishers that have one since the last entry.
	cursors []publisherCursor
	rawIDs  []uint64 // as recovery knows them, by source
	// ranks are those whose sources have changed since the last entry.
	ranks map[uint32]struct{}
	// worker is set until the worker is logged, continues if the last entry is partial.
	worker, continues bool
	removes           suppressedRemoves
	trackers          consolidate.Recorder
	position          checkpointPosition

	body, state []byte // reused

	maxWaitingBytes int // of changes
}

// publisherCursor is the last cursor of a publisher.
type publisherCursor struct {
	publisher feed.Publisher
	cursor    []byte // reused
}

// suppressedRemoves are successive removes of one run that were suppressed, with the same operation.
type suppressedRemoves struct {
	op     copies.Op
	hashes []uint64
}

func newStateLog(totals *checkpointTotals, maxWaitingBytes int) *stateLog {
	return &stateLog{maxWaitingBytes: maxWaitingBytes, ranks: make(map[uint32]struct{}), position: checkpointPosition{totals: totals}}
}

// progress records what a call contains of ingest's state.
func (s *stateLog) progress(p *feed.Progress) {
	if s == nil {
		return
	}
	if len(p.Cursor) > 0 {
		c := s.cursor(p.Publisher)
		c.cursor = append(c.cursor[:0], p.Cursor...)
	}
	if len(p.Learned) > 0 {
		s.body = append(encode.AppendLength(s.body[:0], statev1.ChangeLearnedField, len(p.Learned)), p.Learned...)
		s.addChange(0)
	}
}

// cursor returns the element of a publisher.
func (s *stateLog) cursor(p feed.Publisher) *publisherCursor {
	for i := range s.cursors {
		if s.cursors[i].publisher == p {
			return &s.cursors[i]
		}
	}
	n := len(s.cursors)
	s.cursors = slices.Grow(s.cursors, 1)[:n+1] // reuses the memory of an earlier cursor
	s.cursors[n].publisher = p
	return &s.cursors[n]
}

// suppress records a suppressed remove. The caller must call endSuppressed after the last of a run.
func (s *stateLog) suppress(key *runKey, eventsBefore int, op copies.Op, hash uint64) {
	if s == nil {
		return
	}
	if op != s.removes.op {
		s.endSuppressed(key, eventsBefore)
	}
	s.removes.op = op
	s.removes.hashes = append(s.removes.hashes, hash)
}

// endSuppressed adds the change of the suppressed removes, if there are any.
func (s *stateLog) endSuppressed(key *runKey, eventsBefore int) {
	if s == nil || len(s.removes.hashes) == 0 {
		return
	}
	hashes := 8 * len(s.removes.hashes)
	size := encode.SizeUint(uint64(key.rank)) + encode.SizeUint(uint64(key.tier)) + encode.SizeUint(uint64(s.removes.op)) + encode.SizeLength(hashes) + encode.SizeUint(uint64(key.group))
	b := encode.AppendLength(s.body[:0], statev1.ChangeSuppressedRemovesField, size)
	b = encode.AppendUint(b, statev1.SuppressedRemovesDpRankField, uint64(key.rank))
	b = encode.AppendUint(b, statev1.SuppressedRemovesTierField, uint64(key.tier))
	b = encode.AppendUint(b, statev1.SuppressedRemovesOpField, uint64(s.removes.op))
	b = encode.AppendHashes(b, statev1.SuppressedRemovesBlockHashesField, s.removes.hashes)
	b = encode.AppendUint(b, statev1.SuppressedRemovesGroupField, uint64(key.group))
	s.body = b
	s.addChange(eventsBefore)
	s.removes.hashes = s.removes.hashes[:0]
}

// storeOps records the operations of a stored event, the last of the entry.
func (s *stateLog) storeOps(eventsBefore int, ops []copies.Op) {
	if s == nil || !slices.ContainsFunc(ops, func(op copies.Op) bool { return op != copies.Add }) {
		return
	}
	lengths, values := 0, 0 // sizes
	for n, op := range runsOf(ops) {
		lengths += protowire.SizeVarint(uint64(n))
		values += protowire.SizeVarint(uint64(op))
	}
	b := encode.AppendLength(s.body[:0], statev1.ChangeStoreOpsField, encode.SizeLength(lengths)+encode.SizeLength(values))
	b = encode.AppendLength(b, statev1.CopyOpsLengthsField, lengths)
	for n := range runsOf(ops) {
		b = protowire.AppendVarint(b, uint64(n))
	}
	b = encode.AppendLength(b, statev1.CopyOpsOpsField, values)
	for _, op := range runsOf(ops) {
		b = protowire.AppendVarint(b, uint64(op))
	}
	s.body = b
	s.addChange(eventsBefore)
}

// storeOp records the operation of all blocks of a stored event, the last of the entry.
func (s *stateLog) storeOp(eventsBefore int, op copies.Op, blocks int) {
	if s != nil && op != copies.Add {
		s.storeOps(eventsBefore, slices.Repeat([]copies.Op{op}, blocks))
	}
}

// runsOf yields the lengths of the runs of equal operations, and the operations.
func runsOf(ops []copies.Op) func(yield func(int, copies.Op) bool) {
	return func(yield func(int, copies.Op) bool) {
		for first, i := 0, 1; i <= len(ops); i++ {
			if i == len(ops) || ops[i] != ops[first] {
				if !yield(i-first, ops[first]) {
					return
				}
				first = i
			}
		}
	}
}

// staleTiers records tiers of a rank whose blocks became stale without a gap of the engine. Bit n is tier n.
func (s *stateLog) staleTiers(eventsBefore int, rank, tiers uint32) {
	if s == nil {
		return
	}
	b := encode.AppendLength(s.body[:0], statev1.ChangeStaleTiersField, encode.SizeUint(uint64(rank))+encode.SizeUint(uint64(tiers)))
	b = encode.AppendUint(b, statev1.StaleTiersDpRankField, uint64(rank))
	s.body = encode.AppendUint(b, statev1.StaleTiersTiersField, uint64(tiers))
	s.addChange(eventsBefore)
}

// recordTracker records the calls of the tracker of a rank.
func (s *stateLog) recordTracker(t *consolidate.Tracker, rank uint32) {
	if s != nil {
		t.RecordTo(&s.trackers, rank)
	}
}

// addTrackerCalls adds the recorded calls as a change, if there are any.
func (s *stateLog) addTrackerCalls() {
	if s == nil {
		return
	}
	calls := s.trackers.Calls()
	if len(calls) == 0 {
		return
	}
	s.body = encode.AppendString(s.body[:0], statev1.ChangeTrackerCallsField, calls)
	s.addChange(0) // trackers and tables do not depend on each other
	if cap(s.body) > maxIdleBytes {
		s.body = nil
	}
}

// addChange adds the change in body to the waiting changes.
func (s *stateLog) addChange(eventsBefore int) {
	s.changes = encode.AppendLength(s.changes, statev1.EntryStateChangesField, encode.SizeUint(uint64(eventsBefore))+len(s.body))
	s.changes = encode.AppendUint(s.changes, statev1.ChangeEventsBeforeField, uint64(eventsBefore))
	s.changes = append(s.changes, s.body...)
	s.waiting++
	if len(s.changes) > s.maxWaitingBytes {
		s.dropWaiting(len(s.changes), s.waiting)
	}
}

// dropWaiting drops the first n of the waiting changes, which have size bytes.
func (s *stateLog) dropWaiting(size int, n uint64) {
	s.changes = slices.Delete(s.changes, 0, size)
	s.first += n
	s.waiting -= n
	s.position.offset = 0
}

// sourcesChanged records that the sources of a rank have changed.
func (s *stateLog) sourcesChanged(rank uint32) {
	if s != nil {
		s.ranks[rank] = struct{}{}
	}
}

// appendHead appends the fields of an EntryState that all parts of a batch have.
func (s *stateLog) appendHead(b []byte, partial bool) []byte {
	b = encode.AppendUint(b, statev1.EntryStateVersionField, stateVersion)
	b = encode.AppendBool(b, statev1.EntryStatePartialField, partial)
	b = encode.AppendBool(b, statev1.EntryStateContinuesField, s.continues)
	b = encode.AppendUint(b, statev1.EntryStateFirstChangeField, s.first)
	return append(b, s.changes...)
}

// partialState returns the EntryState of an entry that is not the last of its batch.
func (s *stateLog) partialState() []byte {
	if s == nil {
		return nil
	}
	s.addTrackerCalls()
	s.state = s.appendHead(s.state[:0], true)
	return s.state
}

// appended drops what an entry has logged. size is the entry's size in bytes.
func (s *stateLog) appended(partial bool, a journal.Pending, size int) {
	if s == nil {
		return
	}
	if cap(s.changes) > maxIdleBytes {
		s.changes = nil
	}
	if cap(s.state) > maxIdleBytes {
		s.state = nil
	}
	s.first += s.waiting
	s.changes, s.waiting = s.changes[:0], 0
	s.continues = partial
	s.position.entryAppended(a, size)
	if !partial {
		s.cursors = s.cursors[:0]
		s.worker = false
		clear(s.ranks)
	}
}

// state returns the EntryState of the current entry, which is the last of its batch; nil if the journal is not durable.
// It is valid until the next entry.
func (l *Lane) state() []byte {
	s := l.log
	if s == nil {
		return nil
	}
	b := s.appendHead(s.state[:0], false)
	for i := range s.cursors {
		b = appendCursor(b, &s.cursors[i])
	}
	for source, id := range l.lastRawIDs {
		if source >= len(s.rawIDs) {
			s.rawIDs = append(s.rawIDs, 0)
		}
		if id != s.rawIDs[source] {
			s.rawIDs[source] = id
			b = appendRawID(b, uint32(source), id)
		}
	}
	for a := range l.announcements.Changes() {
		b = appendMessage(b, statev1.EntryStateAnnouncementsField, a)
	}
	if len(s.ranks) > 0 {
		for _, rank := range slices.Sorted(maps.Keys(s.ranks)) {
			b = appendMessage(b, statev1.EntryStateSourcesField, l.rankSourcesState(rank))
		}
	}
	if !l.pending.empty() {
		b = appendMessage(b, statev1.EntryStatePendingField, l.pending.state())
	}
	if s.worker {
		b = appendMessage(b, statev1.EntryStateWorkerField, workerState(&l.desc))
	}
	s.state = b
	return b
}

func appendCursor(b []byte, c *publisherCursor) []byte {
	source, rank := uint32(c.publisher.Source), c.publisher.Rank
	b = encode.AppendLength(b, statev1.EntryStateCursorsField, encode.SizeUint(uint64(source))+encode.SizeUint(uint64(rank))+encode.SizeLength(len(c.cursor)))
	b = encode.AppendUint(b, statev1.CursorSourceField, uint64(source))
	b = encode.AppendUint(b, statev1.CursorDpRankField, uint64(rank))
	return append(encode.AppendLength(b, statev1.CursorCursorField, len(c.cursor)), c.cursor...)
}

func appendRawID(b []byte, source uint32, id uint64) []byte {
	b = encode.AppendLength(b, statev1.EntryStateRawEventIDsField, encode.SizeUint(uint64(source))+1+protowire.SizeVarint(id))
	b = encode.AppendUint(b, statev1.RawEventIDSourceField, uint64(source))
	return encode.AppendOptional(b, statev1.RawEventIDIDField, id)
}

// appendMessage appends a message of a rare kind.
func appendMessage(b []byte, field protowire.Number, m proto.Message) []byte {
	b = encode.AppendLength(b, field, proto.Size(m))
	return appendState(b, m)
}

// appendState appends an encoded message.
func appendState(b []byte, m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, m)
	if err != nil {
		// The only cause is a string that is not UTF-8, which ingest and AddWorker prevent.
		panic("pipeline: encode state: " + err.Error())
	}
	return b
}

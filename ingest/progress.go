package ingest

import (
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/feed"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// stateVersion is the version of the stored messages.
const stateVersion = 1

// progress returns what a call of the lane stores: the state after the publisher's present action. complete is false if
// other calls for the same action follow: the action would be lost to them if kvcast ended in between, so that the call
// stores the previous state, and the action is executed again. Only the action of the last call counts.
func (p *publisher) progress(complete bool) (s feed.Progress) {
	if !p.worker.shared.config.Durable {
		return s
	}
	s.Publisher = feed.Publisher{Source: p.source, Rank: p.rank}
	if complete {
		p.encoded = p.appendCursor(p.encoded[:0])
		s.Learned = p.learned()
	}
	s.Cursor = p.encoded
	return s
}

// appendCursor appends the publisher's statev1.IngestCursor. It is encoded by hand because it is stored with each batch.
func (p *publisher) appendCursor(b []byte) []byte {
	c := &p.cursor
	b = encode.AppendUint(b, statev1.IngestCursorVersionField, stateVersion)
	if c.Started {
		b = encode.AppendOptional(b, statev1.IngestCursorSeqField, c.Seq)
	}
	if c.Delivered {
		b = encode.AppendOptional(b, statev1.IngestCursorBatchAgeField, c.Seq-c.Batch)
		b = encode.AppendFixed64(b, statev1.IngestCursorBatchTimeField, c.Fingerprint.Time)
		b = encode.AppendFixed64(b, statev1.IngestCursorBatchHashField, c.Fingerprint.Hash)
	}
	b = encode.AppendUint(b, statev1.IngestCursorRawEventIDField, p.rules.RawID())
	if c.EpochKnown { // also an empty one
		b = append(encode.AppendLength(b, statev1.IngestCursorEpochField, len(c.Epoch)), c.Epoch...)
	}
	b = encode.AppendString(b, statev1.IngestCursorPublisherIDField, c.Publisher)
	b = encode.AppendBool(b, statev1.IngestCursorRestartedField, c.Restarted)
	b = encode.AppendBool(b, statev1.IngestCursorPossibleRestartField, c.PossibleRestart)
	b = encode.AppendBool(b, statev1.IngestCursorConflictedField, c.Conflicted)
	b = encode.AppendBool(b, statev1.IngestCursorHasReplayField, p.machine.ReplayEndpoint() != "")
	b = encode.AppendBool(b, statev1.IngestCursorIncompleteField, p.incomplete)
	b = encode.AppendUint32s(b, statev1.IngestCursorRanksField, p.ranks)
	b = encode.AppendUint(b, statev1.IngestCursorBeforeFirstField, p.before.first)
	b = encode.AppendUint(b, statev1.IngestCursorBeforeLastField, p.before.last)
	b = encode.AppendBool(b, statev1.IngestCursorRestoringField, c.Restoring)
	b = encode.AppendBool(b, statev1.IngestCursorProvedField, c.Proved)
	b = encode.AppendBool(b, statev1.IngestCursorUnprovedField, c.Unproved)
	return encode.AppendBool(b, statev1.IngestCursorLostField, c.Lost)
}

// learned returns what has changed of the worker's state beside the cursors since the last call: an encoded
// statev1.IngestWorker, or nil for most calls.
func (p *publisher) learned() []byte {
	w := p.worker
	described := p.described || p.replayOf == nil
	resized := w.blockSize != w.storedBlockSize
	if described && !resized && !p.rules.Changed() {
		return nil
	}
	m := &statev1.IngestWorker{Version: stateVersion}
	if resized {
		m.BlockSize = w.blockSize.State()
		w.storedBlockSize = w.blockSize
	}
	if p.rules.Changed() {
		s := p.rules.Changes()
		s.Source = uint32(p.source)
		m.Sources = []*statev1.IngestSource{s}
	}
	if !described {
		m.Listener = w.listener
		m.Publishers = []*statev1.IngestPublisher{p.describe()}
		p.described = true
	}
	w.changes = marshal(w.changes[:0], m)
	return w.changes
}

// describe returns where the publisher comes from.
func (p *publisher) describe() *statev1.IngestPublisher {
	s := &statev1.IngestPublisher{Source: uint32(p.source), Rank: p.rank, Topic: []byte(p.topic)}
	if p.address.IsValid() {
		s.Address = p.address.String()
	}
	return s
}

// Checkpoint calls do with the state of a worker, an encoded message that is valid until do returns. Meanwhile the
// worker's lane is not called. It may be called after Run has returned. It returns false without calling do if the worker is not in the stream, or the Config is
// not durable.
func (in *Ingest) Checkpoint(worker string, do func(state []byte)) bool {
	w := in.shared.inStream(worker)
	if w == nil || !in.shared.config.Durable {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lane == nil {
		return false
	}
	do(w.state())
	return true
}

// state returns the worker's state: an encoded statev1.IngestWorker.
func (w *worker) state() []byte {
	m := &statev1.IngestWorker{Version: stateVersion, Listener: w.listener, BlockSize: w.blockSize.State()}
	for i, rules := range w.rules {
		if s := rules.State(); len(s.Ranks) > 0 {
			s.Source = uint32(i)
			m.Sources = append(m.Sources, s)
		}
	}
	for _, p := range w.publishers {
		if p.cursor == (sequence.Cursor{}) {
			continue // nothing was read
		}
		s := p.describe()
		s.Cursor = new(statev1.IngestCursor)
		if err := proto.Unmarshal(p.appendCursor(nil), s.Cursor); err != nil {
			panic("cursor is not a statev1.IngestCursor: " + err.Error())
		}
		m.Publishers = append(m.Publishers, s)
	}
	return marshal(nil, m)
}

// marshal appends an encoded message, whose strings are UTF-8.
func marshal(b []byte, m proto.Message) []byte {
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		panic("state cannot be encoded: " + err.Error())
	}
	return b
}

// resume continues where the publisher of an earlier Ingest ended.
func (p *publisher) resume(s *recoveredPublisher) {
	p.cursor, p.incomplete = s.cursor, s.incomplete
	p.before = s.before
	p.machine.Resume(s.at, &p.cursor, s.replay)
	p.rules.RestoreRawID(min(s.rawID, math.MaxUint64-1))
	for _, r := range s.ranks {
		p.worker.restoreRank(r)
	}
	p.setRanks(s.ranks)
	p.described = true
	p.encoded = p.appendCursor(nil)
	if p.cursor.Started {
		p.recordSeq(p.cursor.Seq)
	}
}

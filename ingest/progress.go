package ingest

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
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
	b = appendUint(b, statev1.IngestCursorVersionField, stateVersion)
	if c.Started {
		b = appendUint(b, statev1.IngestCursorSeqField, c.Seq)
	}
	if c.Delivered {
		b = appendUint(b, statev1.IngestCursorBatchAgeField, c.Seq-c.Batch)
		b = appendFixed(b, statev1.IngestCursorBatchTimeField, c.Fingerprint.Time)
		b = appendFixed(b, statev1.IngestCursorBatchHashField, c.Fingerprint.Hash)
	}
	if id := p.rules.RawID(); id != 0 {
		b = appendUint(b, statev1.IngestCursorRawEventIDField, id)
	}
	if c.EpochKnown {
		b = appendText(b, statev1.IngestCursorEpochField, c.Epoch)
	}
	if c.Publisher != "" {
		b = appendText(b, statev1.IngestCursorPublisherIDField, c.Publisher)
	}
	b = appendFlag(b, statev1.IngestCursorRestartedField, c.Restarted)
	b = appendFlag(b, statev1.IngestCursorPossibleRestartField, c.PossibleRestart)
	b = appendFlag(b, statev1.IngestCursorConflictedField, c.Conflicted)
	b = appendFlag(b, statev1.IngestCursorHasReplayField, p.machine.ReplayEndpoint() != "")
	b = appendFlag(b, statev1.IngestCursorIncompleteField, p.incomplete)
	if len(p.ranks) > 0 {
		size := 0
		for _, r := range p.ranks {
			size += protowire.SizeVarint(uint64(r))
		}
		b = protowire.AppendTag(b, statev1.IngestCursorRanksField, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(size))
		for _, r := range p.ranks {
			b = protowire.AppendVarint(b, uint64(r))
		}
	}
	if p.before.first != 0 {
		b = appendUint(b, statev1.IngestCursorBeforeFirstField, p.before.first)
	}
	if p.before.last != 0 {
		b = protowire.AppendTag(b, statev1.IngestCursorBeforeLastField, protowire.VarintType)
		b = protowire.AppendVarint(b, p.before.last)
	}
	for _, flag := range [...]struct {
		field protowire.Number
		set   bool
	}{
		{statev1.IngestCursorRestoringField, c.Restoring},
		{statev1.IngestCursorProvedField, c.Proved},
		{statev1.IngestCursorUnprovedField, c.Unproved},
		{statev1.IngestCursorLostField, c.Lost},
	} {
		if flag.set {
			b = protowire.AppendVarint(protowire.AppendTag(b, flag.field, protowire.VarintType), 1)
		}
	}
	return b
}

// appendUint appends a varint field whose number is below 16, so that its tag has one byte. So do the functions below.
func appendUint(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(append(b, byte(field)<<3|byte(protowire.VarintType)), v)
}

// appendFixed appends a fixed64 unless it is 0.
func appendFixed(b []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendFixed64(append(b, byte(field)<<3|byte(protowire.Fixed64Type)), v)
}

// appendFlag appends a bool if it is set.
func appendFlag(b []byte, field protowire.Number, set bool) []byte {
	if !set {
		return b
	}
	return append(b, byte(field)<<3|byte(protowire.VarintType), 1)
}

func appendText(b []byte, field protowire.Number, s string) []byte {
	return protowire.AppendString(append(b, byte(field)<<3|byte(protowire.BytesType)), s)
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
	p.ranks = s.ranks
	p.described = true
	p.encoded = p.appendCursor(nil)
	if p.cursor.Started {
		p.recordSeq(p.cursor.Seq)
	}
}

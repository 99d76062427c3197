package simulator

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvcast/kvcast/internal/wire"
)

// BatchConfig configures the encoding of batches. The zero value encodes as vLLM does for one dp rank.
type BatchConfig struct {
	// Rank is the dp rank of batches, unless OmitRank is set.
	Rank     uint32
	OmitRank bool
	// BatchForm and EventForm are the encodings; 0 means arrays.
	BatchForm, EventForm wire.Form
	// FirstSeq is the seq of the first batch: 0 in vLLM, 1 in llm-d-inference-sim.
	FirstSeq uint64
	// Now is the clock of batches; nil means time.Now. The time of a batch is at least a
	// microsecond after the previous one's, whatever the clock returns.
	Now func() time.Time
}

// encoder encodes batches.
type encoder struct {
	cfg  BatchConfig
	wire wire.Encoder
	last time.Time
	size int // of the last payload, an estimate for the next one
	// publisher is the publisher id; nil for none.
	publisher []byte
}

// newEncoder returns an encoder, or the reason why the configuration cannot be encoded.
func newEncoder(cfg BatchConfig) (encoder, error) {
	if cfg.BatchForm == 0 {
		cfg.BatchForm = wire.FormArray
	}
	if cfg.EventForm == 0 {
		cfg.EventForm = wire.FormArray
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if max(cfg.BatchForm, cfg.EventForm) > wire.FormMap {
		return encoder{}, fmt.Errorf("unknown forms: %d of batches, %d of events", cfg.BatchForm, cfg.EventForm)
	}
	return encoder{cfg: cfg, wire: wire.Encoder{BatchForm: cfg.BatchForm, EventForm: cfg.EventForm}}, nil
}

// encode returns an encoded batch of events in memory of its own.
func (e *encoder) encode(events []wire.Event) []byte {
	now := e.cfg.Now().Truncate(time.Microsecond)
	if !now.After(e.last) {
		now = e.last.Add(time.Microsecond)
	}
	payload := e.wire.AppendBatch(make([]byte, 0, e.size), &wire.Batch{
		Time:    float64(now.UnixMicro()) / 1e6,
		HasTime: true,
		Rank:    e.cfg.Rank,
		HasRank: !e.cfg.OmitRank,
		Events:  events,

		PublisherID: e.publisher,
	})
	e.last, e.size = now, len(payload)
	return payload
}

// feed numbers, encodes, buffers, sends and delays the batches of an engine. Only the goroutine that owns the sockets
// uses it.
type feed struct {
	*sockets
	encoder encoder
	next    uint64  // seq of the next batch
	delayed []batch // in the order of the calls of delay
	// snapshot is what a snapshot includes; nil without them.
	snapshot *snapshot
}

// newFeed returns the feed of an engine.
func newFeed(s *sockets, e encoder) *feed {
	f := &feed{sockets: s, encoder: e, next: e.cfg.FirstSeq}
	if s.cfg.Snapshot != "" {
		f.snapshot = &snapshot{}
		f.snapshot.restart(f)
		s.answerSnapshot = f.makeSnapshot
	}
	return f
}

// add encodes events as the batch with the next seq, and optionally buffers it for replay.
func (f *feed) add(events []wire.Event, buffer bool) batch {
	b := batch{f.next, f.encoder.encode(events)}
	f.next++
	f.snapshot.apply(events)
	if buffer {
		f.replayBuffer.add(b.seq, b.payload)
	}
	return b
}

// transmit sends a batch live.
func (f *feed) transmit(b batch) { f.publish(b.seq, b.payload) }

// delay keeps a batch until sendDelayed.
func (f *feed) delay(b batch) { f.delayed = append(f.delayed, b) }

// sendDelayed sends the delayed batches with the given seqs, in the given order; without seqs, all delayed batches in
// the order of the calls of delay. It sends nothing if a seq is not delayed.
func (f *feed) sendDelayed(seqs ...uint64) error {
	out, left := slices.Clone(f.delayed), []batch(nil)
	if len(seqs) > 0 {
		out, left = nil, slices.Clone(f.delayed)
		for _, seq := range seqs {
			i := slices.IndexFunc(left, func(b batch) bool { return b.seq == seq })
			if i < 0 {
				return fmt.Errorf("send batch %d: it is not delayed", seq)
			}
			out, left = append(out, left[i]), slices.Delete(left, i, i+1)
		}
	}
	f.delayed = left
	for _, b := range out {
		f.transmit(b)
	}
	return nil
}

// restart restarts the engine without closing its sockets.
func (f *feed) restart(seq uint64) {
	f.replayBuffer.clear()
	f.next = seq
	f.snapshot.restart(f)
	f.silent, f.faults = false, ReplayFaults{}
}

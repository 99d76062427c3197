package simulator

import (
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// BatchConfig says what batches look like. The zero value is that of a vLLM with one
// dp rank.
type BatchConfig struct {
	// Rank is the dp rank that batches name, unless OmitRank is set.
	Rank     uint32
	OmitRank bool
	// BatchForm and EventForm are how they are encoded; 0 means arrays.
	BatchForm, EventForm wire.Form
	// FirstSeq is the seq of the first batch: 0 at vLLM, 1 at llm-d-inference-sim.
	FirstSeq uint64
	// Now is the clock of batches; nil means time.Now. A batch is at least a
	// microsecond later than the one before, whatever the clock says.
	Now func() time.Time
}

// encoder makes payloads.
type encoder struct {
	cfg  BatchConfig
	wire wire.Encoder
	last time.Time
	size int // of the last payload, as a guess at the next one
}

func newEncoder(cfg BatchConfig) encoder {
	if cfg.BatchForm == 0 {
		cfg.BatchForm = wire.FormArray
	}
	if cfg.EventForm == 0 {
		cfg.EventForm = wire.FormArray
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return encoder{cfg: cfg, wire: wire.Encoder{BatchForm: cfg.BatchForm, EventForm: cfg.EventForm}}
}

// encode returns a batch of events in memory of its own.
func (e *encoder) encode(events []wire.Event) []byte {
	now := e.cfg.Now().Truncate(time.Microsecond)
	if !now.After(e.last) {
		now = e.last.Add(time.Microsecond)
	}
	e.last = now
	payload := e.wire.AppendBatch(make([]byte, 0, e.size), &wire.Batch{
		Time:    float64(now.UnixMicro()) / 1e6,
		HasTime: true,
		Rank:    e.cfg.Rank,
		HasRank: !e.cfg.OmitRank,
		Events:  events,
	})
	e.size = len(payload)
	return payload
}

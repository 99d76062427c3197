package pipeline

import (
	"context"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// entry is the entry being built: an encoded kvcast.v1.Entry without its seq, to which events are appended.
type entry struct {
	ctx     context.Context // of appends
	mu      *sync.Mutex     // of the lane, not held while an append waits
	journal Journal
	source  *journal.Source
	head    []byte // worker and model, the same in all entries of a lane
	buf     []byte
	start   int           // where the events begin in buf
	tiers   kvblock.Tiers // of the events
	// appended is the last append. err is the error of a failed append, after which the entry appends nothing more.
	appended journal.Pending
	err      error
	// appending reports whether an append waits, so that appended does not include it yet, though it may be visible.
	appending bool
	// onFailure is called when an append fails asynchronously.
	onFailure func(error)
	// events is the number of events in buf.
	events int
	// maxBytes is the size above which the events of one batch become several entries.
	maxBytes int
	log      *stateLog
}

func newEntry(ctx context.Context, mu *sync.Mutex, j Journal, worker, model string, maxBytes int) entry {
	head := append(encode.AppendLength(nil, kvcastv1.EntryWorkerField, len(worker)), worker...)
	head = encode.AppendString(head, kvcastv1.EntryModelField, model)
	return entry{ctx: ctx, mu: mu, journal: j, source: &journal.Source{Worker: worker, Model: model}, head: head, maxBytes: maxBytes}
}

// begin starts a new entry; times are nanoseconds since the Unix epoch, or 0.
func (e *entry) begin(engineTime, ingestTime int64) {
	e.buf = append(e.buf[:0], e.head...)
	e.buf = encode.AppendFixed64(e.buf, kvcastv1.EntryEngineTimeUnixNanoField, uint64(engineTime))
	e.buf = encode.AppendFixed64(e.buf, kvcastv1.EntryIngestTimeUnixNanoField, uint64(ingestTime))
	e.start, e.tiers, e.events = len(e.buf), 0, 0
}

func (e *entry) stored(h encode.Head, r *run) {
	s := encode.Stored{
		Parent: r.parent, HasParent: r.hasParent, BlockHashes: r.hashes, TokensHashes: r.tokensHashes,
		BlockSize: r.key.blockSize, LoRA: r.key.lora, TokenIDs: r.tokens, SessionID: r.key.note,
	}
	e.added(encode.AppendStored(e.buf, kvcastv1.EntryEventsField, h, &s), kvblock.TierBit(uint8(h.Tier)))
}

// other adds an event of a rare kind.
func (e *entry) other(event *kvcastv1.RouterEvent) {
	b := encode.AppendLength(e.buf, kvcastv1.EntryEventsField, proto.Size(event))
	// Equal entries encode to equal bytes, independent of map order.
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, event)
	if err != nil {
		// The only cause is a string that is not UTF-8, which ingest and AddWorker prevent.
		panic("pipeline: encode event: " + err.Error())
	}
	e.added(b, kvblock.TierBit(0))
}

// added sets the buffer to b, which has one more event. If b is too large for an entry, it appends
// the events before to the journal as an entry of their own.
func (e *entry) added(b []byte, tier kvblock.Tiers) {
	before := len(e.buf)
	e.buf = b
	if len(b) <= e.maxBytes || before == e.start {
		e.tiers |= tier
		e.events++
		return
	}
	e.append(b[:before], e.log.partialState())
	e.log.appended(true, e.appended, before)
	e.buf, e.tiers, e.events = slices.Delete(b, e.start, before), tier, 1
}

func (e *entry) append(body, state []byte) {
	if e.err != nil {
		return
	}
	e.appending = true
	e.mu.Unlock()
	appended, err := e.journal.Append(e.ctx, journal.Record{Source: e.source, Tiers: e.tiers, Body: body, State: state})
	e.mu.Lock()
	e.appending = false
	if err != nil {
		e.err = err
		return
	}
	e.appended = appended
	appended.OnFailure(e.onFailure)
}

// empty reports whether the entry has no event.
func (e *entry) empty() bool { return len(e.buf) == e.start }

// commit appends the entry to the journal, with the lane's state, if it has any event. It returns the error of this append
// or of an earlier append.
func (e *entry) commit(state []byte) error {
	if e.empty() {
		return e.err
	}
	e.append(e.buf, state)
	e.log.appended(false, e.appended, len(e.buf)+len(state))
	if cap(e.buf) > maxIdleBytes {
		e.buf = nil
	}
	e.buf, e.start = e.buf[:0], 0
	return e.err
}

// maxIdleBytes is the largest buffer that a lane keeps between two entries.
const maxIdleBytes = 64 << 10

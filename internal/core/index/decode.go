package index

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// decoder is the memory for applying encoded entries without allocations. TestEncodedEntriesApplyLikeMessages compares it with ApplyEntry.
type decoder struct {
	blocks, tokens []uint64
	ids            []uint32
	queue          []operation
	prefetch       []uint64 // reused by applyQueue
	lora           string   // the adapter of the last stored event that had one
	// observe is called with each event that is neither Stored nor Removed; nil: not. origin is that of the event.
	observe func(Origin, *kvcastv1.RouterEvent)
	origin  Origin
}

// operation is a decoded Stored or Removed that is not applied yet. All operations have their hashes in decoder.blocks and decoder.tokens, one after the
// other: blocks and tokens are where those of this one end.
type operation struct {
	rank           *rank
	tier           int
	removes        bool
	stored         radix.Stored // without hashes
	blocks, tokens int
	// sweeps is how many entries end between this operation and the next: after each, the index sweeps once.
	sweeps int
}

// Bounds of the operations that are applied together, so that their cache misses overlap. The last one may exceed maxQueueBlocks.
const (
	maxQueue       = 32
	maxQueueBlocks = 64
)

// applyQueue applies the queued operations. It must be called before anything else changes or reads the state.
func (x *Index) applyQueue() {
	d := &x.decoder
	if len(d.queue) > 1 {
		d.prefetchQueue()
	}
	blocks, tokens := 0, 0
	for i := range d.queue {
		o := &d.queue[i]
		if o.removes {
			x.blocks.Remove(o.rank.blocks, o.tier, d.blocks[blocks:o.blocks])
		} else {
			o.stored.Blocks, o.stored.Tokens = d.blocks[blocks:o.blocks], d.tokens[tokens:o.tokens]
			x.store(o.rank, o.tier, &o.stored)
		}
		blocks, tokens = o.blocks, o.tokens
		for range o.sweeps {
			x.blocks.Sweep()
		}
	}
	clear(d.queue)
	d.queue = d.queue[:0]
	d.reset()
}

// reset drops the hashes of events that are applied, and frees memory that only a very large event needed.
func (d *decoder) reset() {
	d.blocks, d.tokens, d.ids = d.blocks[:0], d.tokens[:0], d.ids[:0]
	if cap(d.blocks) > maxHashesKept || cap(d.ids) > 16*maxHashesKept {
		d.blocks, d.tokens, d.ids = nil, nil, nil
	}
	if cap(d.prefetch) > maxHashesKept {
		d.prefetch = nil
	}
}

// sweep releases blocks after an entry, whose operations may be queued.
func (x *Index) sweep() {
	if n := len(x.decoder.queue); n > 0 {
		x.decoder.queue[n-1].sweeps++
	} else {
		x.blocks.Sweep()
	}
}

// prefetchQueue loads what the queued operations read of the tables of their ranks.
func (d *decoder) prefetchQueue() {
	blocks := 0
	for i := 0; i < len(d.queue); {
		r := d.queue[i].rank
		d.prefetch = d.prefetch[:0]
		for ; i < len(d.queue) && d.queue[i].rank == r; i++ {
			o := &d.queue[i]
			if o.stored.HasParent {
				d.prefetch = append(d.prefetch, o.stored.Parent)
			}
			d.prefetch = append(d.prefetch, d.blocks[blocks:o.blocks]...)
			blocks = o.blocks
		}
		r.blocks.Prefetch(d.prefetch)
	}
}

// enqueue queues an operation, after its hashes were appended to decoder.blocks and decoder.tokens. It sets where they end.
func (x *Index) enqueue(o operation) {
	d := &x.decoder
	o.blocks, o.tokens = len(d.blocks), len(d.tokens)
	d.queue = append(d.queue, o)
	if len(d.queue) == maxQueue || len(d.blocks) >= maxQueueBlocks || len(d.ids) > 0 {
		x.applyQueue()
	}
}

// Origin is the entry of an event.
type Origin struct {
	Worker string
	Seq    uint64
	// IngestTime is in nanoseconds since the Unix epoch; 0 if the entry has none.
	IngestTime int64
}

// maxHashesKept is how many hashes of each kind the decoder keeps memory for.
const maxHashesKept = 64 << 10

// EntryTimes are the times in an entry, in nanoseconds since the Unix epoch; 0 if it has none.
type EntryTimes struct{ Engine, Ingest int64 }

// Observe makes ApplyEncoded call a function with each event that is neither Stored nor Removed, while it holds the index's lock. The
// function must not call the index, and must not keep the event.
func (x *Index) Observe(observe func(Origin, *kvcastv1.RouterEvent)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.decoder.observe = observe
}

// ApplyEncoded applies entries in the encoding of a journal's chunk: the fields entries of a kvcast.v1.SubscribeResponse. It appends
// their times. It calls applied, unless that is nil, before a reader of the index sees the entries. After an error the state is outdated, and applied is not called.
func (x *Index) ApplyEncoded(entries []byte, times []EntryTimes, applied func()) ([]EntryTimes, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	times, err := x.applyEncoded(entries, times)
	x.applyQueue()
	if err == nil && applied != nil {
		applied()
	}
	return times, err
}

// applyEncoded is ApplyEncoded for callers that hold the lock.
func (x *Index) applyEncoded(entries []byte, times []EntryTimes) ([]EntryTimes, error) {
	var f encode.Field
	for len(entries) > 0 {
		rest, err := f.Next(entries)
		if err == nil && (f.Number != kvcastv1.ResponseEntriesField || f.Type != protowire.BytesType) {
			err = fmt.Errorf("field %d is not an entry", f.Number)
		}
		var t EntryTimes
		if err == nil {
			t, err = x.applyEncodedEntry(0, f.Bytes)
		}
		if err != nil {
			return times, fmt.Errorf("entry after seq %d: %w", x.seq, err)
		}
		times = append(times, t)
		entries = rest
	}
	return times, nil
}

// applyEncodedEntry applies an encoded kvcast.v1.Entry whose events are its last fields. Its field seq replaces the given seq.
func (x *Index) applyEncodedEntry(seq uint64, b []byte) (times EntryTimes, err error) {
	var (
		name, modelName []byte
		w               *worker
	)
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err != nil {
			return EntryTimes{}, err
		}
		b = rest
		switch f.Number {
		case kvcastv1.EntrySeqField:
			seq = f.Value
		case kvcastv1.EntryWorkerField:
			name = f.Bytes
		case kvcastv1.EntryModelField:
			modelName = f.Bytes
		case kvcastv1.EntryEngineTimeUnixNanoField:
			times.Engine = int64(f.Value)
		case kvcastv1.EntryIngestTimeUnixNanoField:
			times.Ingest = int64(f.Value)
		case kvcastv1.EntryEventsField:
			if w == nil {
				w = x.encodedWorker(name, modelName)
				x.decoder.origin = Origin{w.name, seq, times.Ingest}
			}
			if w, err = x.applyEncodedEvent(w, f.Bytes); err != nil {
				return EntryTimes{}, err
			}
		default: // a field of a later version
		}
	}
	if w == nil { // no events
		w = x.encodedWorker(name, modelName)
	}
	x.entryApplied(w, seq)
	return times, nil
}

// encodedWorker is Index.worker for encoded names, without an allocation for a known worker.
func (x *Index) encodedWorker(name, modelName []byte) *worker {
	if w := x.workers[string(name)]; w != nil {
		return w
	}
	return x.worker(string(name), string(modelName))
}

// applyEncodedEvent applies an encoded RouterEvent, and returns the worker or its replacement. Stored and Removed are
// decoded here, all other kinds by generated code.
func (x *Index) applyEncodedEvent(w *worker, event []byte) (*worker, error) {
	var id, rankNumber, tierNumber uint64
	var f encode.Field
	for b := event; len(b) > 0; {
		rest, err := f.Next(b)
		if err != nil {
			return nil, err
		}
		b = rest
		switch f.Number {
		case kvcastv1.RouterEventEventIDField:
			id = f.Value
		case kvcastv1.RouterEventDpRankField:
			rankNumber = f.Value
		case kvcastv1.RouterEventTierField:
			tierNumber = f.Value
		case kvcastv1.RouterEventStoredField, kvcastv1.RouterEventRemovedField:
			w.lastEventID = max(w.lastEventID, id)
			r := x.rank(w, uint32(rankNumber))
			tier, ok := tierIndex(tierNumber)
			if !ok {
				return w, nil
			}
			if f.Number == kvcastv1.RouterEventStoredField {
				return w, x.storeEncoded(r, tier, f.Bytes)
			}
			return w, x.removeEncoded(r, tier, f.Bytes)
		case kvcastv1.RouterEventGroupStoredField, kvcastv1.RouterEventGroupRemovedField:
			w.lastEventID = max(w.lastEventID, id)
			r := x.rank(w, uint32(rankNumber))
			tier, ok := tierIndex(tierNumber)
			if !ok {
				return w, nil
			}
			x.applyQueue()
			return w, x.groupEncoded(r, tier, f.Bytes, f.Number == kvcastv1.RouterEventGroupStoredField)
		default:
			x.applyQueue()
			var ev kvcastv1.RouterEvent
			if err := proto.Unmarshal(event, &ev); err != nil {
				return nil, err
			}
			if x.decoder.observe != nil {
				x.decoder.observe(x.decoder.origin, &ev)
			}
			return x.applyEvent(w, &ev), nil
		}
	}
	w.lastEventID = max(w.lastEventID, id)
	return w, nil // a kind that this version does not know
}

func (x *Index) storeEncoded(r *rank, tier int, b []byte) error {
	var s radix.Stored
	d := &x.decoder
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err != nil {
			return err
		}
		b = rest
		switch f.Number {
		case kvcastv1.StoredParentHashField:
			s.Parent, s.HasParent = f.Value, true
		case kvcastv1.StoredBlockHashesField:
			d.blocks, err = f.AppendFixed64s(d.blocks)
		case kvcastv1.StoredTokensHashesField:
			d.tokens, err = f.AppendFixed64s(d.tokens)
		case kvcastv1.StoredBlockSizeField:
			s.BlockSize = uint32(f.Value)
		case kvcastv1.StoredLoraNameField:
			if string(f.Bytes) != d.lora {
				d.lora = string(f.Bytes)
			}
			s.LoRA = d.lora
		case kvcastv1.StoredTokenIDsField:
			if x.blocks.RetainsTokenIDs() {
				d.ids, err = f.AppendUint32s(d.ids)
			}
		default: // a field of a later version
		}
		if err != nil {
			return err
		}
	}
	s.TokenIDs = d.ids
	x.enqueue(operation{rank: r, tier: tier, stored: s})
	return nil
}

func (x *Index) removeEncoded(r *rank, tier int, b []byte) error {
	d := &x.decoder
	r.removed = x.seq + 1
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err == nil && f.Number == kvcastv1.RemovedBlockHashesField {
			d.blocks, err = f.AppendFixed64s(d.blocks)
		}
		if err != nil {
			return err
		}
		b = rest
	}
	x.enqueue(operation{rank: r, tier: tier, removes: true})
	return nil
}

package pipeline

import (
	"context"
	"encoding/binary"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxEntryBytes is the size above which the events of one batch become several entries, since gRPC
// clients accept messages of 4 MiB by default.
const maxEntryBytes = 3 << 20

// entry is the entry being built: an encoded kvcast.v1.Entry without its seq, to which events are
// appended.
type entry struct {
	ctx     context.Context // of appends
	journal Journal
	source  *journal.Source
	head    []byte // worker and model, the same in all entries of a lane
	buf     []byte
	start   int           // where the events begin in buf
	tiers   journal.Tiers // of the events
	// appended is the last append. err is the error of a failed append, after which the entry
	// appends nothing more.
	appended journal.Pending
	err      error
	// onFailure is called when an append fails asynchronously.
	onFailure func(error)
}

func newEntry(ctx context.Context, j Journal, worker, model string) entry {
	var head []byte
	head = protowire.AppendTag(head, kvcastv1.EntryWorkerField, protowire.BytesType)
	head = protowire.AppendString(head, worker)
	if model != "" {
		head = protowire.AppendTag(head, kvcastv1.EntryModelField, protowire.BytesType)
		head = protowire.AppendString(head, model)
	}
	return entry{ctx: ctx, journal: j, source: &journal.Source{Worker: worker, Model: model}, head: head}
}

// begin starts a new entry; times are nanoseconds since the Unix epoch, or 0.
func (e *entry) begin(engineTime, ingestTime int64) {
	e.buf = append(e.buf[:0], e.head...)
	e.buf = appendTime(e.buf, kvcastv1.EntryEngineTimeUnixNanoField, engineTime)
	e.buf = appendTime(e.buf, kvcastv1.EntryIngestTimeUnixNanoField, ingestTime)
	e.start, e.tiers = len(e.buf), 0
}

func appendTime(b []byte, field protowire.Number, t int64) []byte {
	if t == 0 {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.Fixed64Type)
	return binary.LittleEndian.AppendUint64(b, uint64(t))
}

func (e *entry) stored(h eventHead, r *run) {
	e.added(appendStored(e.buf, kvcastv1.EntryEventsField, h, r), journal.TierBit(uint8(h.tier)))
}

func (e *entry) removed(h eventHead, hashes []uint64) {
	e.added(appendRemoved(e.buf, h, hashes), journal.TierBit(uint8(h.tier)))
}

// other adds an event of a rare kind.
func (e *entry) other(event *kvcastv1.RouterEvent) {
	b := protowire.AppendTag(e.buf, kvcastv1.EntryEventsField, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(proto.Size(event)))
	// Equal entries encode to equal bytes, independent of map order.
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, event)
	if err != nil {
		// The only cause is a string that is not UTF-8, which ingest and AddWorker prevent.
		panic("pipeline: encode event: " + err.Error())
	}
	e.added(b, journal.TierBit(0))
}

// added sets the buffer to b, which has one more event. If b is too large for an entry, it appends
// the events before to the journal as an entry of their own.
func (e *entry) added(b []byte, tier journal.Tiers) {
	before := len(e.buf)
	e.buf = b
	if len(b) <= maxEntryBytes || before == e.start {
		e.tiers |= tier
		return
	}
	e.append(b[:before])
	e.buf, e.tiers = slices.Delete(b, e.start, before), tier
}

func (e *entry) append(body []byte) {
	if e.err != nil {
		return
	}
	appended, err := e.journal.Append(e.ctx, journal.Record{Source: e.source, Tiers: e.tiers, Body: body})
	if err != nil {
		e.err = err
		return
	}
	e.appended = appended
	appended.OnFailure(e.onFailure)
}

// commit appends the entry to the journal if it has any event. It returns the error of this append
// or of an earlier append.
func (e *entry) commit() error {
	if len(e.buf) == e.start {
		return e.err
	}
	e.append(e.buf)
	if cap(e.buf) > maxIdleBytes {
		e.buf = nil
	}
	e.buf, e.start = e.buf[:0], 0
	return e.err
}

// maxIdleBytes is the largest buffer that a lane keeps between two entries.
const maxIdleBytes = 64 << 10

// tagSize is the encoded size of a field's tag, in bytes: all field numbers here are below 16.
const tagSize = 1

// eventHead has the fields that stored and removed events share.
type eventHead struct {
	id   uint64 // 0 in a snapshot
	rank uint32
	tier wire.Tier
}

func (h eventHead) size() int {
	size := tagSize + protowire.SizeVarint(uint64(h.rank)) +
		tagSize + protowire.SizeVarint(uint64(h.tier))
	if h.id != 0 {
		size += tagSize + protowire.SizeVarint(h.id)
	}
	return size
}

func (h eventHead) append(b []byte) []byte {
	if h.id != 0 {
		b = protowire.AppendTag(b, kvcastv1.RouterEventEventIDField, protowire.VarintType)
		b = protowire.AppendVarint(b, h.id)
	}
	b = protowire.AppendTag(b, kvcastv1.RouterEventDpRankField, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(h.rank))
	b = protowire.AppendTag(b, kvcastv1.RouterEventTierField, protowire.VarintType)
	return protowire.AppendVarint(b, uint64(h.tier))
}

// appendStored appends a stored event, as an element of the repeated field with that number.
func appendStored(b []byte, events protowire.Number, h eventHead, r *run) []byte {
	tokens := tokensSize(r.tokens)
	body := hashesSize(r.hashes) + hashesSize(r.tokensHashes)
	if r.hasParent {
		body += tagSize + 8
	}
	if r.key.blockSize != 0 {
		body += tagSize + protowire.SizeVarint(uint64(r.key.blockSize))
	}
	if r.key.lora != "" {
		body += tagSize + protowire.SizeBytes(len(r.key.lora))
	}
	if tokens != 0 {
		body += tagSize + protowire.SizeBytes(tokens)
	}
	b = appendEventStart(b, events, h, kvcastv1.RouterEventStoredField, body)
	if r.hasParent {
		b = protowire.AppendTag(b, kvcastv1.StoredParentHashField, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, r.parent)
	}
	b = appendHashes(b, kvcastv1.StoredBlockHashesField, r.hashes)
	b = appendHashes(b, kvcastv1.StoredTokensHashesField, r.tokensHashes)
	if r.key.blockSize != 0 {
		b = protowire.AppendTag(b, kvcastv1.StoredBlockSizeField, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(r.key.blockSize))
	}
	if r.key.lora != "" {
		b = protowire.AppendTag(b, kvcastv1.StoredLoraNameField, protowire.BytesType)
		b = protowire.AppendString(b, r.key.lora)
	}
	if tokens != 0 {
		b = protowire.AppendTag(b, kvcastv1.StoredTokenIDsField, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(tokens))
		for _, t := range r.tokens {
			b = protowire.AppendVarint(b, uint64(t))
		}
	}
	return b
}

// appendRemoved appends a removed event, as an element of Entry.events.
func appendRemoved(b []byte, h eventHead, hashes []uint64) []byte {
	b = appendEventStart(b, kvcastv1.EntryEventsField, h, kvcastv1.RouterEventRemovedField, hashesSize(hashes))
	return appendHashes(b, kvcastv1.RemovedBlockHashesField, hashes)
}

// appendEventStart appends an event up to the body of its kind, which has body bytes and follows.
func appendEventStart(b []byte, events protowire.Number, h eventHead, kind protowire.Number, body int) []byte {
	b = protowire.AppendTag(b, events, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(h.size()+tagSize+protowire.SizeBytes(body)))
	b = h.append(b)
	b = protowire.AppendTag(b, kind, protowire.BytesType)
	return protowire.AppendVarint(b, uint64(body))
}

func hashesSize(hashes []uint64) int {
	if len(hashes) == 0 {
		return 0
	}
	return tagSize + protowire.SizeBytes(8*len(hashes))
}

func appendHashes(b []byte, field protowire.Number, hashes []uint64) []byte {
	if len(hashes) == 0 {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(8*len(hashes)))
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

func tokensSize(tokens []uint32) (n int) {
	for _, t := range tokens {
		n += protowire.SizeVarint(uint64(t))
	}
	return n
}

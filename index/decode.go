package index

import (
	"encoding/binary"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// decoder is the memory for applying encoded entries without allocations. TestEncodedEntriesApplyLikeMessages compares
// it with ApplyEntry.
type decoder struct {
	blocks, tokens []uint64
	lora           string // the adapter of the last stored event that had one
}

// maxHashesKept is how many hashes of each kind the decoder keeps memory for.
const maxHashesKept = 64 << 10

// applyEncoded applies entries in the encoding of journal.Chunk: the fields entries of a kvcast.v1.SubscribeResponse.
// It returns the ingest time of the first entry that has one, in nanoseconds since the Unix epoch. The caller must hold
// the lock.
func (x *Index) applyEncoded(entries []byte) (ingestTime int64, err error) {
	for len(entries) > 0 {
		number, kind, n := protowire.ConsumeTag(entries)
		if n < 0 || number != kvcastv1.ResponseEntriesField || kind != protowire.BytesType {
			return ingestTime, fmt.Errorf("entry after seq %d: field %d is not an entry", x.seq, number)
		}
		entry, m := protowire.ConsumeBytes(entries[n:])
		if m < 0 {
			return ingestTime, fmt.Errorf("entry after seq %d: %w", x.seq, protowire.ParseError(m))
		}
		t, err := x.applyEncodedEntry(entry)
		if err != nil {
			return ingestTime, fmt.Errorf("entry after seq %d: %w", x.seq, err)
		}
		if ingestTime == 0 {
			ingestTime = t
		}
		entries = entries[n+m:]
	}
	return ingestTime, nil
}

// applyEncodedEntry applies an encoded kvcast.v1.Entry whose events are its last fields.
func (x *Index) applyEncodedEntry(b []byte) (ingestTime int64, err error) {
	var (
		name, modelName []byte
		seq             uint64
		w               *worker
	)
	for len(b) > 0 {
		f, rest, err := consumeField(b)
		if err != nil {
			return 0, err
		}
		b = rest
		switch f.number {
		case kvcastv1.EntrySeqField:
			seq = f.fixed
		case kvcastv1.EntryWorkerField:
			name = f.bytes
		case kvcastv1.EntryModelField:
			modelName = f.bytes
		case kvcastv1.EntryIngestTimeUnixNanoField:
			ingestTime = int64(f.fixed)
		case kvcastv1.EntryEventsField:
			if w == nil {
				w = x.encodedWorker(name, modelName)
			}
			if w, err = x.applyEncodedEvent(w, f.bytes); err != nil {
				return 0, err
			}
		default: // the engine's time, or a field of a later version
		}
	}
	if w == nil { // no events
		w = x.encodedWorker(name, modelName)
	}
	x.entryApplied(w, seq)
	return ingestTime, nil
}

// encodedWorker is Index.worker for encoded names, without an allocation for a known worker.
func (x *Index) encodedWorker(name, modelName []byte) *worker {
	if w := x.workers[string(name)]; w != nil {
		return w
	}
	return x.worker(string(name), string(modelName))
}

// field is a field of an encoded message. Which of the values is valid follows from its type.
type field struct {
	number        protowire.Number
	varint, fixed uint64
	bytes         []byte
}

func consumeField(b []byte) (f field, rest []byte, err error) {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field{}, nil, protowire.ParseError(n)
	}
	f.number = number
	b = b[n:]
	switch kind {
	case protowire.VarintType:
		f.varint, n = protowire.ConsumeVarint(b)
	case protowire.Fixed64Type:
		f.fixed, n = protowire.ConsumeFixed64(b)
	case protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(b)
	default:
		n = protowire.ConsumeFieldValue(number, kind, b)
	}
	if n < 0 {
		return field{}, nil, protowire.ParseError(n)
	}
	return f, b[n:], nil
}

// applyEncodedEvent applies an encoded RouterEvent, and returns the worker or its replacement. Stored and Removed are
// decoded here, all other kinds by generated code.
func (x *Index) applyEncodedEvent(w *worker, event []byte) (*worker, error) {
	var id, rankNumber, tierNumber uint64
	for b := event; len(b) > 0; {
		f, rest, err := consumeField(b)
		if err != nil {
			return nil, err
		}
		b = rest
		switch f.number {
		case kvcastv1.RouterEventEventIDField:
			id = f.varint
		case kvcastv1.RouterEventDpRankField:
			rankNumber = f.varint
		case kvcastv1.RouterEventTierField:
			tierNumber = f.varint
		case kvcastv1.RouterEventStoredField, kvcastv1.RouterEventRemovedField:
			w.lastEventID = max(w.lastEventID, id)
			r := x.rank(w, uint32(rankNumber))
			tier, ok := tierIndex(tierNumber)
			if !ok {
				return w, nil
			}
			if f.number == kvcastv1.RouterEventStoredField {
				return w, x.storeEncoded(r, tier, f.bytes)
			}
			return w, x.removeEncoded(r, tier, f.bytes)
		default:
			var ev kvcastv1.RouterEvent
			if err := proto.Unmarshal(event, &ev); err != nil {
				return nil, err
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
	d.blocks, d.tokens = d.blocks[:0], d.tokens[:0]
	for len(b) > 0 {
		f, rest, err := consumeField(b)
		if err != nil {
			return err
		}
		b = rest
		switch f.number {
		case kvcastv1.StoredParentHashField:
			s.Parent, s.HasParent = f.fixed, true
		case kvcastv1.StoredBlockHashesField:
			d.blocks = appendHashes(d.blocks, f.bytes)
		case kvcastv1.StoredTokensHashesField:
			d.tokens = appendHashes(d.tokens, f.bytes)
		case kvcastv1.StoredBlockSizeField:
			s.BlockSize = uint32(f.varint)
		case kvcastv1.StoredLoraNameField:
			if string(f.bytes) != d.lora {
				d.lora = string(f.bytes)
			}
			s.LoRA = d.lora
		default: // token ids, or a field of a later version
		}
	}
	s.Blocks, s.Tokens = d.blocks, d.tokens
	x.store(r, tier, &s)
	d.release()
	return nil
}

func (x *Index) removeEncoded(r *rank, tier int, b []byte) error {
	d := &x.decoder
	d.blocks = d.blocks[:0]
	for len(b) > 0 {
		f, rest, err := consumeField(b)
		if err != nil {
			return err
		}
		b = rest
		if f.number == kvcastv1.RemovedBlockHashesField {
			d.blocks = appendHashes(d.blocks, f.bytes)
		}
	}
	x.blocks.Remove(r.blocks, tier, d.blocks)
	d.release()
	return nil
}

// appendHashes appends packed fixed64 values.
func appendHashes(hashes []uint64, b []byte) []uint64 {
	hashes = slices.Grow(hashes, len(b)/8)
	for ; len(b) >= 8; b = b[8:] {
		hashes = append(hashes, binary.LittleEndian.Uint64(b))
	}
	return hashes
}

// release frees memory that only a very large event needed.
func (d *decoder) release() {
	if cap(d.blocks) > maxHashesKept {
		d.blocks, d.tokens = nil, nil
	}
}

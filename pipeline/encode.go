package pipeline

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"

	"github.com/kvcast/kvcast/ingest/wire"
)

// tagSize is that of every field number used here: all are below 16.
const tagSize = 1

// eventHead is what stands before the kind of an event.
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

// appendStored appends an element of the field events.
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

// appendRemoved appends an element of Entry.events.
func appendRemoved(b []byte, h eventHead, hashes []uint64) []byte {
	b = appendEventStart(b, kvcastv1.EntryEventsField, h, kvcastv1.RouterEventRemovedField, hashesSize(hashes))
	return appendHashes(b, kvcastv1.RemovedBlockHashesField, hashes)
}

// appendEventStart appends all of an element of the field events up to the body
// of its kind.
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

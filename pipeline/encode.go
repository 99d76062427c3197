package pipeline

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Field numbers of kvcast.v1, for the messages that are encoded by hand: the two
// kinds of event that an engine sends all the time, and the entry around them.
const (
	entryWorker     protowire.Number = 2
	entryModel      protowire.Number = 3
	entryEngineTime protowire.Number = 4
	entryIngestTime protowire.Number = 5
	entryEvents     protowire.Number = 6

	snapshotWorker protowire.Number = 1 // of SnapshotBlocks
	snapshotEvents protowire.Number = 2

	eventID      protowire.Number = 1
	eventRank    protowire.Number = 2
	eventTier    protowire.Number = 3
	eventStored  protowire.Number = 4
	eventRemoved protowire.Number = 5

	storedParent       protowire.Number = 1
	storedBlockHashes  protowire.Number = 2
	storedTokensHashes protowire.Number = 3
	storedBlockSize    protowire.Number = 4
	storedLoRAName     protowire.Number = 5
	storedTokenIDs     protowire.Number = 6

	removedBlockHashes protowire.Number = 1
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
		b = protowire.AppendTag(b, eventID, protowire.VarintType)
		b = protowire.AppendVarint(b, h.id)
	}
	b = protowire.AppendTag(b, eventRank, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(h.rank))
	b = protowire.AppendTag(b, eventTier, protowire.VarintType)
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
	b = appendEventStart(b, events, h, eventStored, body)
	if r.hasParent {
		b = protowire.AppendTag(b, storedParent, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, r.parent)
	}
	b = appendHashes(b, storedBlockHashes, r.hashes)
	b = appendHashes(b, storedTokensHashes, r.tokensHashes)
	if r.key.blockSize != 0 {
		b = protowire.AppendTag(b, storedBlockSize, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(r.key.blockSize))
	}
	if r.key.lora != "" {
		b = protowire.AppendTag(b, storedLoRAName, protowire.BytesType)
		b = protowire.AppendString(b, r.key.lora)
	}
	if tokens != 0 {
		b = protowire.AppendTag(b, storedTokenIDs, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(tokens))
		for _, t := range r.tokens {
			b = protowire.AppendVarint(b, uint64(t))
		}
	}
	return b
}

// appendRemoved appends an element of Entry.events.
func appendRemoved(b []byte, h eventHead, hashes []uint64) []byte {
	b = appendEventStart(b, entryEvents, h, eventRemoved, hashesSize(hashes))
	return appendHashes(b, removedBlockHashes, hashes)
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

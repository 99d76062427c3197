// Package encode encodes the events of kvcast.v1 that carry blocks, and reads the fields of encoded messages, without
// generated code. The pipeline encodes the events of entries, and the index those of snapshots.
package encode

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// tagSize is the encoded size of a field's tag, in bytes: all field numbers here are below 16.
const tagSize = 1

// Head has the fields that stored and removed events share.
type Head struct {
	ID   uint64 // 0 in a snapshot
	Rank uint32
	Tier kvcastv1.Tier
}

func (h Head) size() int {
	size := tagSize + protowire.SizeVarint(uint64(h.Rank)) + tagSize + protowire.SizeVarint(uint64(h.Tier))
	if h.ID != 0 {
		size += tagSize + protowire.SizeVarint(h.ID)
	}
	return size
}

func (h Head) append(b []byte) []byte {
	if h.ID != 0 {
		b = protowire.AppendTag(b, kvcastv1.RouterEventEventIDField, protowire.VarintType)
		b = protowire.AppendVarint(b, h.ID)
	}
	b = protowire.AppendTag(b, kvcastv1.RouterEventDpRankField, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(h.Rank))
	b = protowire.AppendTag(b, kvcastv1.RouterEventTierField, protowire.VarintType)
	return protowire.AppendVarint(b, uint64(h.Tier))
}

// Stored is a kvcast.v1.Stored. LoRA must be UTF-8; empty: none.
type Stored struct {
	Parent                    uint64
	HasParent                 bool
	BlockHashes, TokensHashes []uint64
	BlockSize                 uint32
	LoRA                      string
	TokenIDs                  []uint32
}

// AppendStored appends a stored event, as an element of the repeated field with that number.
func AppendStored(b []byte, events protowire.Number, h Head, s *Stored) []byte {
	tokens := tokensSize(s.TokenIDs)
	body := hashesSize(s.BlockHashes) + hashesSize(s.TokensHashes)
	if s.HasParent {
		body += tagSize + 8
	}
	if s.BlockSize != 0 {
		body += tagSize + protowire.SizeVarint(uint64(s.BlockSize))
	}
	if s.LoRA != "" {
		body += tagSize + protowire.SizeBytes(len(s.LoRA))
	}
	if tokens != 0 {
		body += tagSize + protowire.SizeBytes(tokens)
	}
	b = appendStart(b, events, h, kvcastv1.RouterEventStoredField, body)
	if s.HasParent {
		b = protowire.AppendTag(b, kvcastv1.StoredParentHashField, protowire.Fixed64Type)
		b = protowire.AppendFixed64(b, s.Parent)
	}
	b = AppendHashes(b, kvcastv1.StoredBlockHashesField, s.BlockHashes)
	b = AppendHashes(b, kvcastv1.StoredTokensHashesField, s.TokensHashes)
	if s.BlockSize != 0 {
		b = protowire.AppendTag(b, kvcastv1.StoredBlockSizeField, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(s.BlockSize))
	}
	if s.LoRA != "" {
		b = protowire.AppendTag(b, kvcastv1.StoredLoraNameField, protowire.BytesType)
		b = protowire.AppendString(b, s.LoRA)
	}
	if tokens != 0 {
		b = protowire.AppendTag(b, kvcastv1.StoredTokenIDsField, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(tokens))
		for _, t := range s.TokenIDs {
			b = protowire.AppendVarint(b, uint64(t))
		}
	}
	return b
}

// AppendRemoved appends a removed event, as an element of the repeated field with that number.
func AppendRemoved(b []byte, events protowire.Number, h Head, hashes []uint64) []byte {
	b = appendStart(b, events, h, kvcastv1.RouterEventRemovedField, hashesSize(hashes))
	return AppendHashes(b, kvcastv1.RemovedBlockHashesField, hashes)
}

// AppendGroup appends an event of blocks of an attention group other than the main group, GroupStored or GroupRemoved as the field kind
// says, as an element of the repeated field with the number events.
func AppendGroup(b []byte, events protowire.Number, h Head, kind protowire.Number, group uint32, hashes []uint64) []byte {
	body := hashesSize(hashes)
	if group != 0 {
		body += tagSize + protowire.SizeVarint(uint64(group))
	}
	b = appendStart(b, events, h, kind, body)
	if group != 0 {
		b = protowire.AppendTag(b, kvcastv1.GroupStoredGroupField, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(group))
	}
	return AppendHashes(b, kvcastv1.GroupStoredBlockHashesField, hashes)
}

// appendStart appends an event up to the body of its kind, which has body bytes and follows.
func appendStart(b []byte, events protowire.Number, h Head, kind protowire.Number, body int) []byte {
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

// AppendHashes appends a packed field of fixed64 values; nothing if there are none.
func AppendHashes(b []byte, field protowire.Number, hashes []uint64) []byte {
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

// Package encode encodes the events of kvcast.v1 that carry blocks, and reads the fields of encoded messages, without
// generated code. The pipeline encodes the events of entries, and the index those of snapshots.
package encode

import (
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
	return SizeUint(h.ID) + tagSize + protowire.SizeVarint(uint64(h.Rank)) + tagSize + protowire.SizeVarint(uint64(h.Tier))
}

func (h Head) append(b []byte) []byte {
	b = AppendUint(b, kvcastv1.RouterEventEventIDField, h.ID)
	b = AppendOptional(b, kvcastv1.RouterEventDpRankField, uint64(h.Rank))
	return AppendOptional(b, kvcastv1.RouterEventTierField, uint64(h.Tier))
}

// Stored is a kvcast.v1.Stored. LoRA must be UTF-8; empty: none.
type Stored struct {
	Parent                    uint64
	HasParent                 bool
	BlockHashes, TokensHashes []uint64
	BlockSize                 uint32
	LoRA                      string
	TokenIDs                  []uint32
	SessionID                 string
}

// AppendStored appends a stored event, as an element of the repeated field with that number.
func AppendStored(b []byte, events protowire.Number, h Head, s *Stored) []byte {
	tokens := tokensSize(s.TokenIDs)
	body := SizeHashes(s.BlockHashes) + SizeHashes(s.TokensHashes) + SizeUint(uint64(s.BlockSize)) + SizeString(s.LoRA) + SizeString(s.SessionID)
	if s.HasParent {
		body += tagSize + 8
	}
	if tokens != 0 {
		body += SizeLength(tokens)
	}
	b = appendStart(b, events, h, kvcastv1.RouterEventStoredField, body)
	if s.HasParent {
		b = AppendOptionalFixed64(b, kvcastv1.StoredParentHashField, s.Parent)
	}
	b = AppendHashes(b, kvcastv1.StoredBlockHashesField, s.BlockHashes)
	b = AppendHashes(b, kvcastv1.StoredTokensHashesField, s.TokensHashes)
	b = AppendUint(b, kvcastv1.StoredBlockSizeField, uint64(s.BlockSize))
	b = AppendString(b, kvcastv1.StoredLoraNameField, s.LoRA)
	if tokens != 0 {
		b = AppendLength(b, kvcastv1.StoredTokenIDsField, tokens)
		for _, t := range s.TokenIDs {
			b = appendVarint(b, uint64(t))
		}
	}
	return AppendString(b, kvcastv1.StoredSessionIDField, s.SessionID)
}

// AppendRemoved appends a removed event, as an element of the repeated field with that number.
func AppendRemoved(b []byte, events protowire.Number, h Head, hashes []uint64, reason string) []byte {
	b = appendStart(b, events, h, kvcastv1.RouterEventRemovedField, SizeHashes(hashes)+SizeString(reason))
	b = AppendHashes(b, kvcastv1.RemovedBlockHashesField, hashes)
	return AppendString(b, kvcastv1.RemovedReasonField, reason)
}

// AppendGroup appends an event of blocks of an attention group other than the main group, GroupStored or GroupRemoved as the field kind
// says, as an element of the repeated field with the number events.
func AppendGroup(b []byte, events protowire.Number, h Head, kind protowire.Number, group uint32, hashes []uint64) []byte {
	b = appendStart(b, events, h, kind, SizeHashes(hashes)+SizeUint(uint64(group)))
	b = AppendUint(b, kvcastv1.GroupStoredGroupField, uint64(group))
	return AppendHashes(b, kvcastv1.GroupStoredBlockHashesField, hashes)
}

// appendStart appends an event up to the body of its kind, which has body bytes and follows.
func appendStart(b []byte, events protowire.Number, h Head, kind protowire.Number, body int) []byte {
	b = AppendLength(b, events, h.size()+SizeLength(body))
	return AppendLength(h.append(b), kind, body)
}

func tokensSize(tokens []uint32) (n int) {
	for _, t := range tokens {
		n += protowire.SizeVarint(uint64(t))
	}
	return n
}

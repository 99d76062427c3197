package wire

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// key identifies a field of events. Of several bad fields in a map event, the first in
// this order is reported.
type key uint8

const (
	keyUnknown key = iota
	keyHashes
	keyParent
	keyEagle
	keyOpaque
	keyTokens
	keyBlockSize
	keyLoRAID
	keyMedium
	keyLoRAName
	keyMetadata
	keyExtraKeys
	keyGroupIdx
	keySpecKind
	keySlidingWindow
	keyLocality
	keyOwnership
	keySessionID
	keyCacheSalt
	keyTime
	keyModelName
	keyMMInfos
	keyMMKeys
	keyOrigin
	keyRemainingCopies
	// Keys of map events that are not fields of Event.
	keyType
	keyEventType
	keySeqHashes

	numKeys = iota
)

// keySet is a set of keys, one bit each.
type keySet uint32

func (s keySet) has(k key) bool { return s&(1<<(k&31)) != 0 }
func (s *keySet) add(k key)     { *s |= 1 << (k & 31) }

// field declares a field of events. Its positions in array events are in forms.go.
type field struct {
	// mapKey is the key in map events, jsonKey that in the output of AppendJSON, and
	// goName the name in an EncodeError.
	mapKey, jsonKey, goName string
	// kinds are the kinds of events that have the field.
	kinds    kinds
	presence presence
	codec    codec
}

// kinds is a set of kinds of events, one bit each.
type kinds uint8

const (
	stores  kinds = 1 << KindStored
	removes kinds = 1 << KindRemoved
	anyKind kinds = stores | removes | 1<<KindCleared
)

// presence is when a field is written.
type presence uint8

const (
	// optional fields are written where set.
	optional presence = iota
	// nullable fields are written in map events always, and in JSON where set.
	nullable
	// required fields are always written.
	required
)

// fields are the fields of events.
var fields = [numKeys]field{
	keyHashes: {"block_hashes", "block_hashes", "BlockHashes", stores | removes, required, hashList{}},
	keyParent: {"parent_block_hash", "parent", "Parent", stores, required, scalar{
		set: func(_ *Decoder, ev *Event, v value) bool {
			ev.Parent, ev.HasParent = v.hash()
			return ev.HasParent
		},
		get: func(dst []byte, e *Encoder, ev *Event) []byte {
			if !ev.HasParent {
				return msgp.AppendNil(dst)
			}
			return e.Hashes.append(dst, ev.Parent)
		},
		isSetFunc: func(ev *Event) bool { return ev.HasParent },
	}},
	keyEagle:  {"", "is_eagle", "Eagle", stores, optional, flag(func(ev *Event) bool { return ev.Eagle })},
	keyOpaque: {"", "opaque_tokens", "OpaqueTokens", stores, optional, flag(func(ev *Event) bool { return ev.OpaqueTokens })},
	keyTokens: {"token_ids", "token_ids", "Tokens", stores, required, tokenList{}},
	keyBlockSize: {"block_size", "block_size", "BlockSize", stores, required, scalar{
		set: func(_ *Decoder, ev *Event, v value) (ok bool) {
			ev.BlockSize, ok = v.uint32()
			return ok
		},
		get: func(dst []byte, e *Encoder, ev *Event) []byte {
			if e.Producer == ProducerMooncake && ev.hashOnly() {
				return msgp.AppendNil(dst)
			}
			return msgp.AppendUint32(dst, ev.BlockSize)
		},
		isSetFunc: func(ev *Event) bool { return ev.BlockSize != 0 },
		checkFunc: checkBlockSize,
	}},
	keyLoRAID: {"lora_id", "lora_id", "LoRAID", stores, nullable,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.LoRAID, &ev.HasLoRAID }}},
	keyMedium: {"medium", "medium", "Medium", stores | removes, nullable,
		text{get: func(ev *Event) *string { return &ev.Medium }}},
	keyLoRAName: {"lora_name", "lora_name", "LoRAName", stores, nullable,
		loraName{text{get: func(ev *Event) *string { return &ev.LoRAName }}}},
	keyMetadata: {codec: metadata{}},
	keyExtraKeys: {"extra_keys", "extra_keys", "Raw.ExtraKeys", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.ExtraKeys }}},
	keyGroupIdx: {"group_idx", "group_idx", "GroupIdx", stores | removes, optional,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.GroupIdx, &ev.HasGroupIdx }}},
	keySpecKind: {"kv_cache_spec_kind", "spec_kind", "SpecKind", stores | removes, optional,
		text{get: func(ev *Event) *string { return &ev.SpecKind }}},
	keySlidingWindow: {"kv_cache_spec_sliding_window", "sliding_window", "Rare.SlidingWindow", stores | removes, optional,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.rare().SlidingWindow, &ev.rare().HasSlidingWindow }, rare: true}},
	keyLocality: {"locality", "locality", "Rare.Locality", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().Locality }, rare: true}},
	keyOwnership: {"ownership", "ownership", "Rare.Ownership", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().Ownership }, rare: true}},
	keySessionID: {"session_id", "session_id", "Rare.SessionID", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().SessionID }, rare: true, perRequest: true}},
	keyCacheSalt: {"cache_salt", "cache_salt", "CacheSalt", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.CacheSalt }, perRequest: true}},
	keyTime: {"timestamp", "ts", "Rare.Time", anyKind, optional, scalar{
		set: func(d *Decoder, ev *Event, v value) bool {
			t, ok := v.float()
			if ok {
				t, ok = seconds(t)
			}
			if ok {
				rare := d.rareOf(ev)
				rare.Time, rare.HasTime = t, true
			}
			return ok
		},
		get:       func(dst []byte, _ *Encoder, ev *Event) []byte { return msgp.AppendFloat64(dst, ev.rare().Time) },
		isSetFunc: func(ev *Event) bool { return ev.rare().HasTime },
		checkFunc: func(_ *Encoder, ev *Event) string { return checkTime(ev.rare().Time) },
	}},
	keyModelName: {"model_name", "model_name", "Rare.ModelName", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().ModelName }, rare: true}},
	keyMMInfos: {"block_mm_infos", "block_mm_infos", "Raw.BlockMMInfos", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.BlockMMInfos }}},
	keyMMKeys: {"mm_keys", "mm_keys", "Raw.MMKeys", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.MMKeys }}},
	keyOrigin: {"origin", "origin", "Origin", stores, optional, scalar{
		set: func(_ *Decoder, ev *Event, v value) bool {
			ev.Origin = originOf(v)
			return true
		},
		get:       func(dst []byte, _ *Encoder, ev *Event) []byte { return msgp.AppendString(dst, ev.Origin.String()) },
		isSetFunc: func(ev *Event) bool { return ev.Origin != OriginUnknown },
		checkFunc: func(_ *Encoder, ev *Event) string {
			if ev.Origin > OriginReused {
				return fmt.Sprintf("is %d, want OriginUnknown, OriginNew or OriginReused", ev.Origin)
			}
			return ""
		},
	}},
	keyRemainingCopies: {"remaining_copy_counts", "remaining_copy_counts", "Rare.RemainingCopies", removes, optional, copyCounts{}},
	keyType:            {mapKey: "type"},
	keyEventType:       {mapKey: "event_type"},
	keySeqHashes:       {mapKey: "seq_hashes"},
}

// jsonOrder is the order of the fields in JSON.
var jsonOrder = [...]key{
	keyHashes, keyRemainingCopies, keyParent, keyTokens, keyEagle, keyOpaque, keyBlockSize, keyLoRAID, keyOrigin, keyMedium,
	keyLoRAName, keyExtraKeys, keyGroupIdx, keySpecKind, keySlidingWindow, keyLocality, keyOwnership, keyCacheSalt,
	keySessionID, keyMMInfos, keyMMKeys, keyTime, keyModelName,
}

// Indexes over fields.
var (
	// kindFields are the fields of each kind, allFields those of any.
	kindFields [KindCleared + 1]keySet
	allFields  keySet
	// keysByName are the keys of map events by their names.
	keysByName = make(map[string]key)
)

func init() {
	for k := range key(numKeys) {
		f := &fields[k]
		for kind := KindStored; kind <= KindCleared; kind++ {
			if f.kinds&(1<<kind) != 0 {
				kindFields[kind].add(k)
				allFields.add(k)
			}
		}
		if f.mapKey != "" {
			keysByName[f.mapKey] = k
		}
	}
}

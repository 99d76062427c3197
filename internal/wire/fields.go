package wire

import (
	"github.com/tinylib/msgp/msgp"
)

// key identifies a field of events. Map events and JSON are written in this order, and of
// several bad fields in a map event, the first in this order is reported.
type key uint8

const (
	keyUnknown key = iota
	keyHashes
	keyRemainingCopies
	keyParent
	keyTokens
	keyEagle
	keyOpaque
	keyBlockSize
	keyLoRAID
	keyOrigin
	keyMedium
	keyLoRAName
	keyExtraKeys
	keyGroupIdx
	keySpecKind
	keySlidingWindow
	keyLocality
	keyOwnership
	keyCacheSalt
	keySessionID
	keyReason
	keyMMInfos
	keyMMKeys
	keyTime
	keyModelName
	keyObjectKey
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
	// mapKey is the key in map events, jsonKey the key in the output of AppendJSON.
	mapKey, jsonKey string
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
	// optional fields are written if they are set.
	optional presence = iota
	// nullable fields are always written in map events, and in JSON if they are set.
	nullable
	// required fields are always written.
	required
)

// fields are the fields of events.
var fields = [numKeys]field{
	keyHashes:          {"block_hashes", "block_hashes", stores | removes, required, hashList{}},
	keyRemainingCopies: {"remaining_copy_counts", "remaining_copy_counts", removes, optional, copyCounts{}},
	keyParent: {"parent_block_hash", "parent", stores, required, scalar{
		setFunc: func(_ *Decoder, ev *Event, v value) bool {
			ev.Parent, ev.HasParent = v.hash()
			return ev.HasParent
		},
		isSetFunc: func(ev *Event) bool { return ev.HasParent },
		appendFunc: func(dst []byte, ev *Event) []byte {
			if !ev.HasParent {
				return msgp.AppendNil(dst)
			}
			return msgp.AppendUint64(dst, ev.Parent)
		},
	}},
	keyTokens: {"token_ids", "token_ids", stores, required, tokenList{}},
	keyEagle:  {"", "is_eagle", stores, optional, flag(func(ev *Event) bool { return ev.Eagle })},
	keyOpaque: {"", "opaque_tokens", stores, optional, flag(func(ev *Event) bool { return ev.OpaqueTokens })},
	keyBlockSize: {"block_size", "block_size", stores, required, scalar{
		setFunc: func(_ *Decoder, ev *Event, v value) (ok bool) {
			ev.BlockSize, ok = v.uint32()
			return ok
		},
		isSetFunc:  func(ev *Event) bool { return ev.BlockSize != 0 },
		appendFunc: func(dst []byte, ev *Event) []byte { return msgp.AppendUint32(dst, ev.BlockSize) },
	}},
	keyLoRAID: {"lora_id", "lora_id", stores, nullable,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.LoRAID, &ev.HasLoRAID }}},
	keyOrigin: {"origin", "origin", stores, optional, scalar{
		setFunc: func(_ *Decoder, ev *Event, v value) bool {
			ev.Origin = originOf(v)
			return true
		},
		isSetFunc:  func(ev *Event) bool { return ev.Origin != OriginUnknown },
		appendFunc: func(dst []byte, ev *Event) []byte { return msgp.AppendString(dst, originNames[ev.Origin]) },
	}},
	keyMedium: {"medium", "medium", anyKind, nullable,
		text{get: func(ev *Event) *string { return &ev.Medium }}},
	keyLoRAName: {"lora_name", "lora_name", stores, nullable,
		loraName{text{get: func(ev *Event) *string { return &ev.LoRAName }}}},
	keyExtraKeys: {"extra_keys", "extra_keys", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.ExtraKeys }}},
	keyGroupIdx: {"group_idx", "group_idx", stores | removes, optional,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.GroupIdx, &ev.HasGroupIdx }}},
	keySpecKind: {"kv_cache_spec_kind", "spec_kind", stores | removes, optional,
		text{get: func(ev *Event) *string { return &ev.SpecKind }}},
	keySlidingWindow: {"kv_cache_spec_sliding_window", "sliding_window", stores | removes, optional,
		number{field: func(ev *Event) (*int64, *bool) { return &ev.rare().SlidingWindow, &ev.rare().HasSlidingWindow }, rare: true}},
	keyLocality: {"locality", "locality", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().Locality }, rare: true}},
	keyOwnership: {"ownership", "ownership", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.rare().Ownership }, rare: true}},
	keyCacheSalt: {"cache_salt", "cache_salt", anyKind, optional,
		text{get: func(ev *Event) *string { return &ev.CacheSalt }, perRequest: true}},
	keySessionID: {"session_id", "session_id", stores, optional,
		unused{note{text{get: func(ev *Event) *string { return &ev.rare().Note }, rare: true, perRequest: true}, KindStored}}},
	keyReason: {"reason", "reason", removes, optional,
		unused{note{text{get: func(ev *Event) *string { return &ev.rare().Note }, rare: true}, KindRemoved}}},
	keyMMInfos: {"block_mm_infos", "block_mm_infos", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.BlockMMInfos }}},
	keyMMKeys: {"mm_keys", "mm_keys", stores, optional,
		rawList{get: func(r *Raw) *[]byte { return &r.MMKeys }}},
	keyTime: {"timestamp", "ts", anyKind, optional, unused{scalar{
		setFunc: func(d *Decoder, ev *Event, v value) bool {
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
		isSetFunc:  func(ev *Event) bool { return ev.rare().HasTime },
		appendFunc: func(dst []byte, ev *Event) []byte { return msgp.AppendFloat64(dst, ev.rare().Time) },
	}}},
	keyModelName: {"model_name", "model_name", anyKind, optional,
		unused{text{get: func(ev *Event) *string { return &ev.rare().ModelName }, rare: true}}},
	keyObjectKey: {"object_key", "has_object_key", stores | removes, optional, scalar{
		setFunc: func(d *Decoder, ev *Event, _ value) bool {
			d.rareOf(ev).HasObjectKey = true
			return true
		},
		isSetFunc:  func(ev *Event) bool { return ev.rare().HasObjectKey },
		appendFunc: func(dst []byte, _ *Event) []byte { return msgp.AppendBool(dst, true) },
	}},
	keyType:      {mapKey: "type"},
	keyEventType: {mapKey: "event_type"},
	keySeqHashes: {mapKey: "seq_hashes"},
}

// kindFields are the fields of each kind of events.
var kindFields = func() (all [KindCleared + 1]keySet) {
	for kind := KindStored; kind <= KindCleared; kind++ {
		for k := range key(numKeys) {
			if fields[k].kinds&(1<<kind) != 0 {
				all[kind].add(k)
			}
		}
	}
	return all
}()

// allFields are the fields of any kind of events.
var allFields = kindFields[KindStored] | kindFields[KindRemoved] | kindFields[KindCleared]

// keysByName are the keys of map events by their names.
var keysByName = func() map[string]key {
	all := make(map[string]key)
	for k := range key(numKeys) {
		if name := fields[k].mapKey; name != "" {
			all[name] = k
		}
	}
	return all
}()

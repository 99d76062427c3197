package wire

import (
	"encoding/binary"
	"math/bits"
)

// key is a field of an event.
type key uint8

const (
	keyUnknown key = iota
	keyHashes
	keyParent
	keyTokens
	keyBlockSize
	keyLoRAID
	keyMedium
	keyLoRAName
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
	keyType
	keyEventType
	keySeqHashes

	numKeys = iota
)

// keySet is a set of keys, one bit each.
type keySet uint32

// first returns the key in the set that comes first in array events.
func (s keySet) first() key { return key(bits.TrailingZeros32(uint32(s))) }

const (
	clearedKeys = 1<<keyLocality | 1<<keyOwnership | 1<<keySessionID | 1<<keyCacheSalt | 1<<keyTime | 1<<keyModelName
	removeKeys  = clearedKeys | 1<<keyHashes | 1<<keyMedium | 1<<keyGroupIdx | 1<<keySpecKind | 1<<keySlidingWindow | 1<<keyRemainingCopies
)

// kindKeys are the fields that an event of each kind has.
var kindKeys = [...]keySet{
	KindStored:  (1<<numKeys - 1) &^ (1 << keyRemainingCopies),
	KindRemoved: removeKeys,
	KindCleared: clearedKeys,
}

// keyOf returns the key that map events call so.
func keyOf(name []byte) key {
	switch string(name) {
	case "type":
		return keyType
	case "block_hashes":
		return keyHashes
	case "parent_block_hash":
		return keyParent
	case "token_ids":
		return keyTokens
	case "block_size":
		return keyBlockSize
	case "lora_id":
		return keyLoRAID
	case "medium":
		return keyMedium
	case "lora_name":
		return keyLoRAName
	case "extra_keys":
		return keyExtraKeys
	case "group_idx":
		return keyGroupIdx
	case "kv_cache_spec_kind":
		return keySpecKind
	case "kv_cache_spec_sliding_window":
		return keySlidingWindow
	case "locality":
		return keyLocality
	case "ownership":
		return keyOwnership
	case "session_id":
		return keySessionID
	case "cache_salt":
		return keyCacheSalt
	case "timestamp":
		return keyTime
	case "model_name":
		return keyModelName
	case "block_mm_infos":
		return keyMMInfos
	case "mm_keys":
		return keyMMKeys
	case "origin":
		return keyOrigin
	case "remaining_copy_counts":
		return keyRemainingCopies
	case "event_type":
		return keyEventType
	case "seq_hashes":
		return keySeqHashes
	default:
		return keyUnknown
	}
}

// keyHead is a key as it stands in a map event, the code of its length included:
// its first 16 bytes as two words, those of which it has fewer masked, and the rest.
//
// To find out which of all keys one is takes much longer than to find out whether it
// is the one that an event like this has there.
type keyHead struct {
	words, masks [2]uint64
	rest         string
	size         int
}

// keyHeads are the known keys. In the place of keyUnknown stands the code that is
// never used: whether it is found to be a key or not, it is bad.
var keyHeads = func() (t [numKeys]keyHead) {
	for k, name := range [numKeys]string{
		keyType:            "type",
		keyHashes:          "block_hashes",
		keyParent:          "parent_block_hash",
		keyTokens:          "token_ids",
		keyBlockSize:       "block_size",
		keyLoRAID:          "lora_id",
		keyMedium:          "medium",
		keyLoRAName:        "lora_name",
		keyExtraKeys:       "extra_keys",
		keyGroupIdx:        "group_idx",
		keySpecKind:        "kv_cache_spec_kind",
		keySlidingWindow:   "kv_cache_spec_sliding_window",
		keyLocality:        "locality",
		keyOwnership:       "ownership",
		keySessionID:       "session_id",
		keyCacheSalt:       "cache_salt",
		keyTime:            "timestamp",
		keyModelName:       "model_name",
		keyMMInfos:         "block_mm_infos",
		keyMMKeys:          "mm_keys",
		keyOrigin:          "origin",
		keyRemainingCopies: "remaining_copy_counts",
		keyEventType:       "event_type",
		keySeqHashes:       "seq_hashes",
	} {
		if key(k) == keyUnknown {
			t[k].words[0], t[k].masks[0] = 0xc1, 0xff
			continue
		}
		var head, mask [16]byte
		for j, c := range append([]byte{0xa0 | byte(len(name))}, name...) {
			if j < len(head) {
				head[j], mask[j] = c, 0xff
			} else {
				t[k].rest += string(c)
			}
		}
		for j := range 2 {
			t[k].words[j] = binary.LittleEndian.Uint64(head[8*j:])
			t[k].masks[j] = binary.LittleEndian.Uint64(mask[8*j:])
		}
		t[k].size = 1 + len(name)
	}
	return t
}()

// begins tells whether the key stands at i, of which the caller must compare the
// rest. It may say no near the payload's end.
func (h *keyHead) begins(p []byte, i int) bool {
	if i+16 > len(p) {
		return false
	}
	b := p[i : i+16 : i+16]
	return (binary.LittleEndian.Uint64(b)^h.words[0])&h.masks[0]|
		(binary.LittleEndian.Uint64(b[8:])^h.words[1])&h.masks[1] == 0
}

// readKey returns the key at i, and where it ends: keyUnknown if it is no string.
func readKey(p []byte, i, depth int) (key, int, fault) {
	name, i, f := readString(p, i, depth)
	return keyOf(name), i, f
}

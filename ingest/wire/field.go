package wire

import (
	"encoding/binary"
	"math"
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
	removeKeys  = clearedKeys | 1<<keyHashes | 1<<keyMedium | 1<<keyGroupIdx | 1<<keySpecKind | 1<<keySlidingWindow
)

// kindKeys are the fields that an event of each kind has.
var kindKeys = [...]keySet{
	KindStored:  1<<numKeys - 1,
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
	case "event_type":
		return keyEventType
	case "seq_hashes":
		return keySeqHashes
	default:
		return keyUnknown
	}
}

// readField reads the value at i, which is not nil, as the event's field k, and
// returns where it ends.
func (d *Decoder) readField(ev *Event, k key, i int) (int, fault) {
	switch k {
	case keyHashes:
		return d.readHashes(ev, i)
	case keyTokens:
		return d.readTokens(ev, i)
	case keyExtraKeys:
		return d.readRaw(&ev.ExtraKeys, i)
	case keyMMInfos:
		return d.readRaw(&ev.BlockMMInfos, i)
	case keyMMKeys:
		return d.readRaw(&ev.MMKeys, i)
	default:
		return d.readScalar(ev, k, i)
	}
}

// readScalar is readField for those that are no list.
func (d *Decoder) readScalar(ev *Event, k key, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	switch k {
	case keyParent:
		ev.Parent, ev.HasParent = v.hash(d.p)
		if !ev.HasParent {
			return i, badType
		}
		return v.at + v.n, 0
	case keyBlockSize:
		if v.class != classUint || v.bits > math.MaxUint32 {
			return i, badType
		}
		ev.BlockSize = uint32(v.bits)
		return v.at, 0
	case keyLoRAID:
		ev.LoRAID, ev.HasLoRAID = v.int()
		return v.at, typed(ev.HasLoRAID)
	case keyGroupIdx:
		ev.GroupIdx, ev.HasGroupIdx = v.int()
		return v.at, typed(ev.HasGroupIdx)
	case keySlidingWindow:
		ev.SlidingWindow, ev.HasSlidingWindow = v.int()
		return v.at, typed(ev.HasSlidingWindow)
	case keyTime:
		t, ok := v.float()
		if ok {
			ev.Time, ev.HasTime = seconds(t)
		}
		return v.at, typed(ok && ev.HasTime)
	case keyLoRAName:
		if v.class == classMap {
			return d.readMetadata(ev, v)
		}
		return d.readName(&ev.LoRAName, k, v)
	case keyMedium:
		return d.readName(&ev.Medium, k, v)
	case keySpecKind:
		return d.readName(&ev.SpecKind, k, v)
	case keyLocality:
		return d.readName(&ev.Locality, k, v)
	case keyOwnership:
		return d.readName(&ev.Ownership, k, v)
	case keyModelName:
		return d.readName(&ev.ModelName, k, v)
	case keySessionID:
		return d.readID(&ev.SessionID, v)
	default:
		return d.readID(&ev.CacheSalt, v)
	}
}

func typed(ok bool) fault {
	if ok {
		return 0
	}
	return badType
}

// readRaw keeps a list as it stands.
func (d *Decoder) readRaw(raw *[]byte, i int) (int, fault) {
	end, f := skip(d.p, i, 3)
	if f != 0 {
		return i, f
	}
	if codes[d.p[i]].class != classArray {
		return i, badType
	}
	*raw = d.p[i:end:end]
	return end, 0
}

// readName reads one of a few strings that come over and over.
func (d *Decoder) readName(s *string, k key, v value) (int, fault) {
	if v.class != classStr {
		return v.at, badType
	}
	end := v.at + v.n
	b := d.p[v.at:end]
	if d.last[k] == string(b) {
		*s = d.last[k]
		return end, 0
	}
	name, ok := d.names.string(b)
	if !ok {
		return end, badUTF8
	}
	if len(name) <= maxLast {
		d.last[k] = name
	}
	*s = name
	return end, 0
}

// readID reads a string that may be another with each request.
func (d *Decoder) readID(s *string, v value) (int, fault) {
	if v.class != classStr {
		return v.at, badType
	}
	end := v.at + v.n
	id, ok := d.ids.string(d.p[v.at:end])
	if !ok {
		return end, badUTF8
	}
	*s = id
	return end, 0
}

// readMetadata reads the map that SGLang 0.5.18 puts in the place of lora_name.
func (d *Decoder) readMetadata(ev *Event, v value) (int, fault) {
	i := v.at
	for range v.n {
		name, f := readValue(d.p, i)
		if f != 0 {
			return i, f
		}
		k := keyUnknown
		if name.class == classStr {
			i = name.at + name.n
			k = keyOf(d.p[name.at:i])
		} else if i, f = skip(d.p, i, 4); f != 0 {
			return i, f
		}
		if k == keyCacheSalt || k == keySessionID {
			var seen keySet
			i, f = d.readPresent(ev, k, i, &seen)
		} else {
			i, f = skip(d.p, i, 4)
		}
		if f != 0 {
			return i, f
		}
	}
	return i, 0
}

// hash returns a block hash: an integer by two's complement, bytes by their last
// eight.
func (v value) hash(p []byte) (uint64, bool) {
	switch v.class {
	case classUint, classInt:
		return v.bits, true
	case classBin:
		b := p[v.at : v.at+v.n]
		if len(b) >= 8 {
			return binary.BigEndian.Uint64(b[len(b)-8:]), true
		}
		var h uint64
		for _, c := range b {
			h = h<<8 | uint64(c)
		}
		return h, len(b) > 0
	default:
		return 0, false
	}
}

func (d *Decoder) readHashes(ev *Event, i int) (int, fault) {
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	if v.class != classArray {
		return i, badType
	}
	p := d.p
	i = v.at
	hashes := d.hashes.reserve(min(v.n, len(p)-i))
	for k := range v.n {
		// Nearly all hashes are large, and positive.
		if i+9 <= len(p) && p[i] == 0xcf {
			hashes[k] = binary.BigEndian.Uint64(p[i+1:])
			i += 9
			continue
		}
		h, f := readValue(p, i)
		if f != 0 {
			return i, f
		}
		var ok bool
		if hashes[k], ok = h.hash(p); !ok {
			return i, badType
		}
		i = h.at + h.n
	}
	ev.BlockHashes = d.hashes.take(v.n)
	return i, 0
}

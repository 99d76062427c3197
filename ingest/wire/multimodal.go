package wire

import (
	"bytes"
	"encoding/hex"
	"strconv"

	"github.com/zeebo/xxh3"
)

// saltPrefix marks a cache salt among extra keys.
const saltPrefix = "dynamo-cache-salt:"

// MMHash returns the mm_hash of a multimodal input from the identifier its
// engine gave it.
func MMHash(identifier []byte) uint64 {
	if len(identifier) == 64 {
		var digest [32]byte
		if _, err := hex.Decode(digest[:], identifier); err == nil {
			h, _ := strconv.ParseUint(string(identifier[:16]), 16, 64)
			return h
		}
	}
	return xxh3.Hash(identifier)
}

// extras is what a store's extra keys, block_mm_infos and mm_keys say of
// multimodal inputs in its blocks, in memory that it reuses.
type extras struct {
	// blocks are the mm_hashes of each block; none where no block has any.
	blocks [][]uint64

	hashes arena[uint64]
	list   []uint64
}

// release gives back what is more than to be kept for the next batch.
func (x *extras) release() {
	had := x.hashes.buf != nil
	x.hashes.release(maxRulesKept / 8)
	x.list = reuse(x.list, maxRulesKept/8)
	x.blocks = reuse(x.blocks, maxRulesKept/24)
	if had && x.hashes.buf == nil {
		x.blocks = nil // its elements of before would keep what hashes has let go
	}
}

// read returns the mm_hashes of each of the event's blocks, which may be fewer
// than there are blocks, in memory that is good until the next read. The values
// are those of a decoded event: well formed. What has another shape than expected
// is passed over, because engines put much into extra keys that is none of ours.
func (x *extras) read(ev *Event) [][]uint64 {
	// Producers that send several of them say the same in each.
	switch {
	case ev.raw().BlockMMInfos != nil:
		x.readBlocks(ev.raw().BlockMMInfos, len(ev.BlockHashes), x.addInfo)
	case ev.raw().MMKeys != nil:
		x.readBlocks(ev.raw().MMKeys, len(ev.BlockHashes), x.addKeys)
	case ev.raw().ExtraKeys != nil && !allNil(ev.raw().ExtraKeys):
		x.readBlocks(ev.raw().ExtraKeys, len(ev.BlockHashes), x.addExtraKeys)
	default:
		return nil
	}
	if len(x.hashes.buf) == 0 {
		return nil
	}
	return x.blocks
}

// allNil tells whether p is a list of nothing but nils, as vLLM sends it for
// plain text.
func allNil(p []byte) bool {
	list, f := readValue(p, 0)
	if f != 0 {
		return false
	}
	for _, c := range p[list.at:] {
		if c != 0xc0 {
			return false
		}
	}
	return true
}

// readBlocks has add read what the list p holds for each block, up to the last of
// n blocks.
func (x *extras) readBlocks(p []byte, n int, add func(p []byte, i int)) {
	x.blocks = x.blocks[:0]
	x.hashes.reset()
	list, f := readValue(p, 0)
	if f != 0 || list.class != classArray {
		return
	}
	n = min(n, list.n)
	if cap(x.blocks) < n {
		x.blocks = make([][]uint64, 0, n)
	}
	i := list.at
	for range n {
		x.list = x.list[:0]
		add(p, i)
		kept := x.hashes.reserve(len(x.list))
		copy(kept, x.list)
		x.blocks = append(x.blocks, x.hashes.take(len(x.list)))
		if i, f = skip(p, i, 0); f != 0 {
			return
		}
	}
}

// addInfo reads {"mm_objects": [{"mm_hash": number or identifier, ...}]}, or the
// same with arrays in place of the maps: [[[number or identifier, ...]]].
func (x *extras) addInfo(p []byte, i int) {
	eachMember(p, i, "mm_objects", func(i int) {
		eachElement(p, i, func(i int) {
			eachMember(p, i, "mm_hash", func(i int) {
				if v, f := readValue(p, i); f == 0 && (v.class == classUint || v.class == classInt) {
					x.list = append(x.list, v.bits)
				} else {
					x.addIdentifier(p, i)
				}
			})
		})
	})
}

// eachMember calls fn with where the value of this key begins in the map at i, or
// the first element of the array at i.
func eachMember(p []byte, i int, key string, fn func(i int)) {
	v, f := readValue(p, i)
	switch {
	case f != 0:
	case v.class == classArray && v.n > 0:
		fn(v.at)
	default:
		eachField(p, i, func(name []byte, i int) {
			if string(name) == key {
				fn(i)
			}
		})
	}
}

// addKeys reads [{"type": "mm_key", "hash": identifier, ...}].
func (x *extras) addKeys(p []byte, i int) {
	eachElement(p, i, func(i int) { x.addTagged(p, i) })
}

// addTagged reads a map of type "mm" or "mm_key".
func (x *extras) addTagged(p []byte, i int) {
	multimodal := false
	hash := -1
	eachField(p, i, func(name []byte, i int) {
		switch string(name) {
		case "type":
			if v, f := readValue(p, i); f == 0 && v.class == classStr {
				tag := p[v.at : v.at+v.n]
				multimodal = string(tag) == "mm" || string(tag) == "mm_key"
			}
		case "hash", "identifier":
			hash = i
		}
	})
	if hash >= 0 && multimodal {
		x.addIdentifier(p, hash)
	}
}

// addExtraKeys reads a block's list of extra keys: of its elements, the pairs of
// an identifier and an offset, and maps of type "mm", are multimodal.
func (x *extras) addExtraKeys(p []byte, i int) {
	eachElement(p, i, func(i int) {
		v, f := readValue(p, i)
		if f != 0 {
			return
		}
		switch v.class {
		case classMap:
			x.addTagged(p, i)
		case classArray:
			if v.n != 2 {
				return
			}
			id, f := readValue(p, v.at)
			if f != 0 || id.class != classStr {
				return
			}
			offset, f := readValue(p, id.at+id.n)
			if f == 0 && (offset.class == classUint || offset.class == classInt) {
				x.addIdentifier(p, v.at)
			}
		default:
		}
	})
}

// saltOf returns the cache salt among the extra keys p, which is part of p; nil
// if there is none. It is a string with saltPrefix, or a map of type "cache_salt".
// Engines name it with the first block of a request; here the first one counts,
// whatever block it stands with. A string equal to lora is the adapter's name,
// once a block, whatever it begins with.
func saltOf(p []byte, lora string) (salt []byte) {
	if allNil(p) {
		return nil
	}
	eachElement(p, 0, func(i int) {
		named := lora == ""
		eachElement(p, i, func(i int) {
			v, f := readValue(p, i)
			if f != 0 || len(salt) > 0 {
				return
			}
			switch v.class {
			case classMap:
				salt, _ = bytes.CutPrefix(taggedSalt(p, i), []byte(saltPrefix))
			case classStr:
				b := p[v.at : v.at+v.n]
				if !named && string(b) == lora {
					named = true
					return
				}
				if b, ok := bytes.CutPrefix(b, []byte(saltPrefix)); ok {
					salt = b
				}
			default:
			}
		})
	})
	return salt
}

// taggedSalt reads {"type": "cache_salt", "salt": string}.
func taggedSalt(p []byte, i int) (salt []byte) {
	tagged := false
	eachField(p, i, func(name []byte, i int) {
		v, f := readValue(p, i)
		if f != 0 || v.class != classStr {
			return
		}
		switch b := p[v.at : v.at+v.n]; string(name) {
		case "type":
			tagged = string(b) == "cache_salt"
		case "salt":
			salt = b
		}
	})
	if !tagged {
		return nil
	}
	return salt
}

// addIdentifier adds the mm_hash of the identifier at i. An empty one is none.
func (x *extras) addIdentifier(p []byte, i int) {
	if v, f := readValue(p, i); f == 0 && v.class == classStr && v.n > 0 {
		x.list = append(x.list, MMHash(p[v.at:v.at+v.n]))
	}
}

// eachElement calls fn with where each element of the list at i begins. Anything
// but a list has none.
func eachElement(p []byte, i int, fn func(i int)) {
	v, f := readValue(p, i)
	if f != 0 || v.class != classArray {
		return
	}
	i = v.at
	for range v.n {
		fn(i)
		if i, f = skip(p, i, 0); f != 0 {
			return
		}
	}
}

// eachField calls fn with each string key of the map at i and where its value
// begins. Anything but a map has none.
func eachField(p []byte, i int, fn func(name []byte, i int)) {
	v, f := readValue(p, i)
	if f != 0 || v.class != classMap {
		return
	}
	i = v.at
	for range v.n {
		name, f := readValue(p, i)
		if f != 0 {
			return
		}
		if i, f = skip(p, i, 0); f != 0 {
			return
		}
		if name.class == classStr {
			fn(p[name.at:i], i)
		}
		if i, f = skip(p, i, 0); f != 0 {
			return
		}
	}
}

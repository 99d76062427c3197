package wire

import (
	"encoding/binary"
	"encoding/hex"
	"iter"

	"github.com/zeebo/xxh3"
)

// MMHash returns the mm_hash of a multimodal input from the engine's identifier: the first 16
// of 64 hexadecimal digits as a number, or the XXH3-64 of any other identifier.
func MMHash(identifier []byte) uint64 {
	if len(identifier) == 64 {
		var digest [32]byte
		if _, err := hex.Decode(digest[:], identifier); err == nil {
			return binary.BigEndian.Uint64(digest[:])
		}
	}
	return xxh3.Hash(identifier)
}

// mmReader reads the mm_hashes in a store's extra_keys, block_mm_infos or mm_keys. It reuses its memory. It skips unknown values, because
// engines use extra keys for other purposes as well.
type mmReader struct {
	// hashes are the mm_hashes of all blocks.
	hashes []uint64
	// blocks are the mm_hashes of each block: views of hashes, or of its earlier, smaller memory.
	blocks [][]uint64
}

// release frees memory beyond maxRulesKept bytes of each kind.
func (r *mmReader) release() {
	clear(r.blocks) // otherwise they would keep the memory of hashes
	r.hashes = reuse(r.hashes, maxRulesKept/8)
	r.blocks = reuse(r.blocks, maxRulesKept/24)
}

// read returns the mm_hashes of each of the event's blocks, valid until the next read. There may be fewer than there are blocks.
func (r *mmReader) read(ev *Event) [][]uint64 {
	// Producers that send several of the lists send the same mm_hashes in each.
	switch raw := ev.raw(); {
	case raw.BlockMMInfos != nil:
		return r.readBlocks(raw.BlockMMInfos, len(ev.BlockHashes), r.addInfo)
	case raw.MMKeys != nil:
		return r.readBlocks(raw.MMKeys, len(ev.BlockHashes), r.addKeys)
	case raw.ExtraKeys != nil && !allNil(raw.ExtraKeys):
		return r.readBlocks(raw.ExtraKeys, len(ev.BlockHashes), r.addExtraKeys)
	default:
		return nil
	}
}

// readBlocks calls add for the elements of the list p, which are about one block each, up to n blocks.
func (r *mmReader) readBlocks(p []byte, n int, add func(p []byte, i int)) [][]uint64 {
	r.release()
	for i := range elements(p, 0) {
		if len(r.blocks) == n {
			break
		}
		start := len(r.hashes)
		add(p, i)
		r.blocks = append(r.blocks, r.hashes[start:])
	}
	return r.blocks
}

// addInfo reads {"mm_objects": [{"mm_hash": number or identifier, ...}]}, or arrays instead of the maps: [[[number or identifier, ...]]].
func (r *mmReader) addInfo(p []byte, i int) {
	for i := range membersNamed(p, i, "mm_objects") {
		for i := range elements(p, i) {
			for i := range membersNamed(p, i, "mm_hash") {
				if v, f := readValue(p, i); f == 0 && (v.class == classUint || v.class == classInt) {
					r.hashes = append(r.hashes, v.bits)
				} else {
					r.addIdentifier(p, i)
				}
			}
		}
	}
}

// addKeys reads [{"type": "mm_key", "hash": identifier, ...}].
func (r *mmReader) addKeys(p []byte, i int) {
	for i := range elements(p, i) {
		r.addTagged(p, i)
	}
}

// addTagged reads a map of type "mm" or "mm_key".
func (r *mmReader) addTagged(p []byte, i int) {
	if identifier, multimodal := taggedInput(p, i); multimodal {
		r.addIdentifier(p, identifier)
	}
}

// addExtraKeys reads the multimodal inputs in a block's list of extra keys.
func (r *mmReader) addExtraKeys(p []byte, i int) {
	for i := range elements(p, i) {
		switch v, _ := readValue(p, i); {
		case v.class == classMap:
			r.addTagged(p, i)
		case isPair(p, v):
			r.addIdentifier(p, v.end)
		}
	}
}

// addIdentifier adds the mm_hash of the identifier at i, unless the identifier is empty.
func (r *mmReader) addIdentifier(p []byte, i int) {
	if id, _, f := readText(p, i); f == 0 && len(id) > 0 {
		r.hashes = append(r.hashes, MMHash(id))
	}
}

// elements yields where each element of the list at i begins. It yields nothing for other values.
func elements(p []byte, i int) iter.Seq[int] {
	return func(yield func(int) bool) {
		list, f := readValue(p, i)
		if list.class != classArray {
			return
		}
		i := list.end
		for n := list.n; n > 0 && f == 0 && yield(i); n-- {
			i, f = skip(p, i, 0)
		}
	}
}

// members yields each string key of the map at i, and where its value begins. It yields nothing for other values.
func members(p []byte, i int) iter.Seq2[[]byte, int] {
	return func(yield func([]byte, int) bool) {
		m, f := readValue(p, i)
		if m.class != classMap {
			return
		}
		i := m.end
		for n := m.n; n > 0 && f == 0; n-- {
			name, _ := readValue(p, i)
			if i, f = skip(p, i, 0); f == 0 && name.class == classStr && !yield(name.bytes, i) {
				return
			}
			if f == 0 {
				i, f = skip(p, i, 0)
			}
		}
	}
}

// membersNamed yields where each value of a key in the map at i begins. For an array, it yields where the first element begins.
func membersNamed(p []byte, i int, key string) iter.Seq[int] {
	return func(yield func(int) bool) {
		if v, f := readValue(p, i); f == 0 && v.class == classArray && v.n > 0 {
			yield(v.end)
			return
		}
		for name, i := range members(p, i) {
			if string(name) == key && !yield(i) {
				return
			}
		}
	}
}

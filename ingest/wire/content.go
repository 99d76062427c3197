package wire

import (
	"encoding/binary"
	"encoding/hex"
	"iter"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// hashSeed is the seed of sequence hashes, and the base of the seeds of tokens hashes. Dynamo's
// routers use the same seed to compute the same hashes from requests.
const hashSeed = 1337

// littleEndian reports whether the machine stores a []uint32 as the bytes to hash.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// BlockSeed returns the seed of the tokens hashes of blocks with a LoRA adapter and a cache
// salt. Each is empty if the blocks have none.
func BlockSeed(lora, salt string) uint64 {
	seed := uint64(hashSeed)
	if lora != "" {
		seed += xxh3.HashString(lora)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, 1)
	}
	return seed
}

// AppendTokensHashes appends the tokens hash of each whole block of tokens to dst. Blocks have
// blockSize tokens; if that is not positive, there are no blocks. EAGLE blocks have one token
// more, which is also the first token of the next block. mm are the mm_hashes of each block,
// in any order. mm may be shorter than the number of blocks.
func AppendTokensHashes(dst []uint64, tokens []uint32, blockSize int, seed uint64, eagle bool, mm [][]uint64) []uint64 {
	window := blockSize
	if eagle {
		window++
	}
	for n := 0; blockSize > 0 && len(tokens) >= window; n++ {
		switch {
		case n < len(mm) && len(mm[n]) > 0:
			dst = append(dst, hashCopied(tokens[:window], mm[n], seed))
		case littleEndian:
			dst = append(dst, hashInPlace(tokens[:window], seed))
		default:
			dst = append(dst, hashCopied(tokens[:window], nil, seed))
		}
		tokens = tokens[blockSize:]
	}
	return dst
}

// SequenceHash returns the sequence hash of a block from its tokens hash and the sequence hash
// of its parent. The sequence hash of a block without parent is its tokens hash.
func SequenceHash(parent, tokens uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], parent)
	binary.LittleEndian.PutUint64(b[8:], tokens)
	return xxh3.HashSeed(b[:], hashSeed)
}

// hashInPlace hashes tokens on a little-endian machine.
func hashInPlace(tokens []uint32, seed uint64) uint64 {
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
	return xxh3.HashSeed(b, seed)
}

// hashCopied hashes tokens and mm_hashes on any machine.
func hashCopied(tokens []uint32, mm []uint64, seed uint64) uint64 {
	var (
		room   [1024]byte
		sorted [16]uint64
	)
	b := room[:0]
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	hashes := append(sorted[:0], mm...)
	slices.Sort(hashes)
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return xxh3.HashSeed(b, seed)
}

// BlockDigest returns the digest of a block. The digest of a set of blocks is the XOR of their
// digests (kvcast.v1.WorkerDigest). A digest is the first output of the generator splitmix64
// with the block hash as seed, https://prng.di.unimi.it/splitmix64.c.
func BlockDigest(blockHash uint64) uint64 {
	x := blockHash + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

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

// mmReader reads the mm_hashes in a store's extra_keys, block_mm_infos or mm_keys. It reuses
// its memory. It skips unknown values, because engines use extra keys for other purposes as
// well.
type mmReader struct {
	// hashes are the mm_hashes of all blocks.
	hashes []uint64
	// blocks are the mm_hashes of each block: views of hashes, or of its earlier, smaller
	// memory.
	blocks [][]uint64
}

// release frees memory beyond maxRulesKept bytes of each kind.
func (r *mmReader) release() {
	clear(r.blocks) // otherwise they would keep the memory of hashes
	r.hashes = reuse(r.hashes, maxRulesKept/8)
	r.blocks = reuse(r.blocks, maxRulesKept/24)
}

// read returns the mm_hashes of each of the event's blocks, valid until the next read.
// There may be fewer than there are blocks.
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

// readBlocks calls add for the elements of the list p, which are about one block each, up to n
// blocks.
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

// addInfo reads {"mm_objects": [{"mm_hash": number or identifier, ...}]}, or arrays instead of
// the maps: [[[number or identifier, ...]]].
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

// elements yields where each element of the list at i begins. It yields nothing for other
// values.
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

// members yields each string key of the map at i, and where its value begins. It yields
// nothing for other values.
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

// membersNamed yields where each value of a key in the map at i begins. For an array, it
// yields where the first element begins.
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

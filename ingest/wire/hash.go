package wire

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// hashSeed is the seed of every hash of blocks, and what their own seeds start
// from. It is Dynamo's, whose routers compute the same hashes from requests.
const hashSeed = 1337

// littleEndian tells whether a []uint32 lies in memory as it is hashed.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// BlockSeed returns the seed of the tokens hashes of blocks that belong to a
// LoRA adapter and a cache salt, each empty where there is none.
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

// AppendTokensHashes appends the tokens hash of each whole block of tokens to
// dst. Blocks are blockSize tokens long, none if it is not positive; eagle
// blocks are one longer and overlap by that one. mm holds the mm_hashes of each block, in
// any order, and may be shorter than there are blocks.
func AppendTokensHashes(dst []uint64, tokens []uint32, blockSize int, seed uint64, eagle bool, mm [][]uint64) []uint64 {
	window := blockSize
	if eagle {
		window++
	}
	for n := 0; blockSize > 0 && len(tokens) >= window; n++ {
		var h uint64
		if n < len(mm) && len(mm[n]) > 0 {
			h = hashMultimodal(tokens[:window], mm[n], seed)
		} else {
			h = hashTokens(tokens[:window], seed)
		}
		dst = append(dst, h)
		tokens = tokens[blockSize:]
	}
	return dst
}

// SequenceHash returns the sequence hash of a block that has this tokens hash
// and continues the block of sequence hash parent. That of a block without
// parent is its tokens hash.
func SequenceHash(parent, tokens uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], parent)
	binary.LittleEndian.PutUint64(b[8:], tokens)
	return xxh3.HashSeed(b[:], hashSeed)
}

func hashTokens(tokens []uint32, seed uint64) uint64 {
	if !littleEndian {
		return hashTokensPortable(tokens, seed)
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
	return xxh3.HashSeed(b, seed)
}

// hashTokensPortable is hashTokens on any machine.
func hashTokensPortable(tokens []uint32, seed uint64) uint64 {
	var room [1024]byte
	return xxh3.HashSeed(appendTokens(room[:0], tokens), seed)
}

func hashMultimodal(tokens []uint32, mm []uint64, seed uint64) uint64 {
	var (
		room   [1024]byte
		sorted [16]uint64
	)
	b := appendTokens(room[:0], tokens)
	hashes := append(sorted[:0], mm...)
	slices.Sort(hashes)
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return xxh3.HashSeed(b, seed)
}

func appendTokens(b []byte, tokens []uint32) []byte {
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}

// BlockDigest is what a block adds to the digest of those that a place holds, which is
// the XOR of it over all (kvcast.v1.WorkerDigest): splitmix64, the first output of
// Vigna's generator of that name seeded with the block hash,
// https://prng.di.unimi.it/splitmix64.c.
func BlockDigest(blockHash uint64) uint64 {
	x := blockHash + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

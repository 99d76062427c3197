// Package kvblock has what names a block and says where it is: the hashes of its tokens, digests of sets of blocks, and tiers of memory. Servers and clients share it.
package kvblock

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// hashSeed is the seed of sequence hashes, and the base of the seeds of tokens hashes. Dynamo's
// routers use the same seed to compute the same hashes from requests.
const hashSeed = 1337

// littleEndian reports whether the machine stores a []uint32 as the bytes to hash.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// Seed returns the seed of the tokens hashes of blocks with a LoRA adapter and a cache salt. Each is empty if the blocks have none.
func Seed(lora, salt string) uint64 {
	seed := uint64(hashSeed)
	if lora != "" {
		seed += xxh3.HashString(lora)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, 1)
	}
	return seed
}

// AppendTokensHashes appends the tokens hash of each whole block of tokens to dst. Blocks have blockSize tokens; if that is not positive,
// there are no blocks. EAGLE blocks have one token more, which is also the first token of the next block. mm are the mm_hashes of each
// block, in any order. mm may be shorter than the number of blocks.
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

// Digest returns the digest of a block. The digest of a set of blocks is the XOR of their digests (kvcast.v1.WorkerDigest). A digest is the
// first output of the generator splitmix64 with the block hash as seed, https://prng.di.unimi.it/splitmix64.c.
func Digest(blockHash uint64) uint64 {
	x := blockHash + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// GroupDigest returns the digest of a block that an attention group holds (kvcast.v1.WorkerDigest.group_digest).
func GroupDigest(group, blockHash uint64) uint64 { return Digest(blockHash ^ Digest(group)) }

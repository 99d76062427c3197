package wire

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Connectors keep chunks of several blocks below device memory, under hashes of their own: LMCache's have 256 tokens. A chunk
// becomes blocks of the worker's size, so that prompts match it like other blocks. The last one has the chunk's hash, which is
// the parent of the next chunk, and the others have names that follow from it: see PartBefore.

// partSeed is the seed of the names of blocks in chunks.
const partSeed = 0x6368756e6b

// PartBefore returns the name of the block before the one with this name in a chunk; the first one has none.
func PartBefore(name uint64) uint64 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], name)
	return xxh3.HashSeed(b[:], partSeed)
}

// isChunk reports whether a store is of chunks of the worker's blocks.
func (r *Rules) isChunk(ev *Event) bool {
	size := r.blockSize
	return ev.Tier > kvblock.TierDevice && size.Tokens > 0 && !size.offDevice &&
		ev.BlockSize > size.Tokens && ev.BlockSize <= MaxBlockSize && ev.BlockSize%size.Tokens == 0 &&
		ev.raw().isNil() && !ev.Eagle && !ev.OpaqueTokens
}

// isNil reports whether all fields are absent, or lists of nil.
func (r *Raw) isNil() bool {
	return r.BlockMMInfos == nil && r.MMKeys == nil && (r.ExtraKeys == nil || allNil(r.ExtraKeys))
}

// splitChunks makes a store of blocks of a store of chunks, of which the last one may be cut. known is the number of the first chunks
// whose content is known. It returns that of the first blocks: all of them or none.
func (r *Rules) splitChunks(ev *Event, known int, counts *Counts) int {
	r.doubt(ReasonChunks, ev.Tier, counts)
	r.ChunkSize = ev.BlockSize
	chunks, parts, whole := len(ev.BlockHashes), int(ev.BlockSize/r.blockSize.Tokens), len(ev.Tokens)/int(r.blockSize.Tokens)
	if whole <= (chunks-1)*parts { // a chunk has no whole block
		r.doubt(ReasonTokensShort, ev.Tier, counts)
	}
	names := r.hashes.reserve(min(whole, chunks*parts))[:0]
	for _, hash := range ev.BlockHashes {
		n := min(parts, whole-len(names))
		names = names[:len(names)+n]
		for i := len(names) - 1; i >= len(names)-n; i-- {
			names[i] = hash
			hash = PartBefore(hash)
		}
	}
	if known == chunks {
		known = len(names)
	} else {
		known = 0
	}
	ev.Raw = nil // has an element for each chunk
	ev.BlockHashes, ev.BlockSize = r.hashes.allocate(len(names)), r.blockSize.Tokens
	return known
}

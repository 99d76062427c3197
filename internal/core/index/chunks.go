package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// A connector, such as LMCache, may keep chunks of several blocks in a tier. The index has the blocks of each chunk, which prompts match by
// content, but an engine loads whole chunks, from the first one on.

// setChunk sets the number of tokens in a chunk of a tier; 0: it has none of several blocks.
func (r *rank) setChunk(tier int, tokens uint32) {
	r.chunks[tier] = tokens
	r.hasChunks = r.chunks != [NumTiers]uint32{}
}

// wholeChunks cuts a match of a rank with chunks to whole ones, and reports whether anything is left. A connector looks up a prompt from its
// beginning, so that the prefix in its tier does not continue that in another one: the longest one is left.
func (r *rank) wholeChunks(f *radix.Match) bool {
	for tier, tokens := range r.chunks {
		if size := r.worker.blockSize; tokens > 0 && size > 0 && tokens >= size {
			f.TierBlocks[tier] -= f.TierBlocks[tier] % int(tokens/size)
		}
	}
	f.Blocks = slices.Max(f.TierBlocks[:])
	return f.Blocks > 0
}

// wholeChunks is rank.wholeChunks for a match of m.matcher.Found, and its walk.
func (m *Matches) wholeChunks(i int) bool {
	f := &m.matcher.Found[i]
	left := f.Rank.Owner.(*rank).wholeChunks(f)
	if len(m.matcher.Walks) > 0 {
		ends, longest := &m.matcher.Walks[i].Ends, 0
		for tier, blocks := range f.TierBlocks {
			longest = max(longest, blocks)
			ends[tier] = longest
		}
	}
	return left
}

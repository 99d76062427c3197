package client

import (
	"cmp"
	"slices"
	"sync"

	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Prompt is a prompt to match, given by its tokens or by the hashes of its blocks.
type Prompt struct {
	// Model restricts the match to workers of the model; empty: all workers. It should be set if there are
	// several models, since equal token ids of different models are different text.
	Model string
	// Tokens are the token ids. Tokens after the last full block are ignored.
	Tokens []uint32
	// BlockSize is the number of tokens per block; 0: the prompt is matched with the block size of each worker.
	BlockSize int
	// LoRA is the name of the LoRA adapter, and Salt the cache salt; empty: none.
	LoRA, Salt string
	// Eagle must be set for SGLang engines with EAGLE decoding: the hash of a block then includes the next token.
	Eagle bool
	// TokensHashes are the tokens hashes of the blocks. If set, only TokensHashes and Model are used.
	TokensHashes []uint64
}

// TokensHashes returns the tokens hashes of a prompt's full blocks, as Stored.tokens_hashes of the contract
// describes. An empty lora or salt means none.
func TokensHashes(tokens []uint32, blockSize int, lora, salt string) []uint64 {
	return wire.AppendTokensHashes(nil, tokens, blockSize, wire.BlockSeed(lora, salt), false, nil)
}

// Match is the longest prefix of a prompt that one dp rank of a worker holds.
type Match struct {
	// Worker is the worker's name, Model its model, and Endpoint the configured address for requests.
	Worker, Model, Endpoint string
	// Rank is the dp rank.
	Rank uint32
	// Blocks is the number of blocks in the longest prefix. Each block is held in at least one tier.
	Blocks int
	// TierBlocks is the number of blocks in the longest prefix held in one tier, by kvcastv1.Tier. The engine
	// does not need to load the blocks of TierBlocks[kvcastv1.Tier_TIER_DEVICE].
	TierBlocks [numTiers + 1]int
	// Tokens is the number of tokens in Blocks; 0 if the prompt was given as hashes and the
	// worker's block size is unknown.
	Tokens int
	// Incomplete reports whether the rank's blocks may differ from the engine's.
	Incomplete bool
}

// Match returns the dp ranks that hold at least the first block of a prompt, ordered by the length of the prefix,
// then by the length of the prefix in the device tier, both descending, then by worker and rank.
//
// Blocks are matched by sequence hash, which covers the contents of the block and of all blocks before it. Blocks
// with unknown content are not matched. A prefix ends at the first missing block, even if later blocks are held.
func (v *View) Match(p Prompt) []Match {
	var out []Match
	if p.TokensHashes != nil {
		out = v.appendMatches(nil, p.Model, p.TokensHashes, 0)
	} else {
		sizes := []int{p.BlockSize}
		if p.BlockSize == 0 {
			sizes = v.blockSizes(p.Model)
		}
		seed := wire.BlockSeed(p.LoRA, p.Salt)
		for _, size := range sizes {
			out = v.appendMatches(out, p.Model, wire.AppendTokensHashes(nil, p.Tokens, size, seed, p.Eagle, nil), size)
		}
	}
	slices.SortFunc(out, func(a, b Match) int {
		return cmp.Or(
			b.Blocks-a.Blocks,
			b.TierBlocks[kvcastv1.Tier_TIER_DEVICE]-a.TierBlocks[kvcastv1.Tier_TIER_DEVICE],
			cmp.Compare(a.Worker, b.Worker),
			cmp.Compare(a.Rank, b.Rank),
		)
	})
	return out
}

// blockSizes returns the distinct block sizes of a model's workers.
func (v *View) blockSizes(model string) []int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	var sizes []int
	for _, w := range v.state.workers {
		size := int(w.blockSize)
		if size > 0 && (model == "" || w.model == model) && !slices.Contains(sizes, size) {
			sizes = append(sizes, size)
		}
	}
	return sizes
}

// candidate is a rank that holds a prefix of a prompt.
type candidate struct {
	rank       *rank
	holder     uint32
	live       tiers         // tiers that hold all blocks matched so far
	blocks     int           // length of the prefix, when it has ended
	tierBlocks [numTiers]int // lengths of the prefixes by tier, when they have ended
}

// candidatePool reuses slices of candidates, so that Match allocates only its result.
var candidatePool = sync.Pool{New: func() any { return new([]candidate) }}

// appendMatches appends the matches of blocks with size tokens; 0: the size is unknown.
func (v *View) appendMatches(out []Match, model string, hashes []uint64, size int) []Match {
	buf := candidatePool.Get().(*[]candidate)
	defer candidatePool.Put(buf)
	v.mu.RLock()
	defer v.mu.RUnlock()
	found := v.state.match((*buf)[:0], model, hashes)
	*buf = found
	out = slices.Grow(out, len(found))
	for i := range found {
		out = append(out, found[i].match(size))
		found[i].rank = nil
	}
	return out
}

func (c *candidate) match(size int) Match {
	w := c.rank.worker
	if size == 0 {
		size = int(w.blockSize)
	}
	m := Match{
		Worker: w.name, Model: w.model, Endpoint: w.added.GetEndpoint(), Rank: c.rank.number,
		Blocks: c.blocks, Tokens: c.blocks * size, Incomplete: c.rank.incomplete,
	}
	copy(m.TierBlocks[1:], c.tierBlocks[:])
	return m
}

// match looks up the blocks of a prompt in the index:
//
//  1. The holders of the first block become candidates, ordered by holder.
//  2. It looks up each further block once. Most blocks have the same holders as the block before, which changes
//     nothing.
//  3. Otherwise, the prefixes of candidates and tiers that do not hold the block end.
//
// The result uses the memory of found.
func (st *state) match(found []candidate, model string, hashes []uint64) []candidate {
	var (
		buf   [1]member
		seq   uint64
		last  uint64 // holders of the previous block
		ended []candidate
	)
	for i, tokens := range hashes {
		if i == 0 {
			seq = tokens
		} else {
			seq = wire.SequenceHash(seq, tokens)
		}
		segment, slot, ok := st.index.Find(seq) // Get would also load the tag
		current := uint64(0)
		if ok {
			current = segment.Slots[slot].Value
		}
		switch {
		case ok && current == last:
			continue
		case !ok:
			return append(endAll(found, i), ended...)
		}
		last = current
		members := st.sets.members(holders(current), &buf)
		if i == 0 {
			if found = st.appendCandidates(found, model, members); len(found) == 0 {
				return found
			}
			continue
		}
		live := 0
		for j := range found {
			c := &found[j]
			for len(members) > 0 && members[0].holder() < c.holder {
				members = members[1:]
			}
			if len(members) == 0 || members[0].holder() != c.holder {
				c.end(c.live, i)
				c.blocks = i
				ended = append(ended, *c)
				continue
			}
			c.end(c.live&^members[0].tiers(), i)
			found[live] = *c
			live++
		}
		if found = found[:live]; live == 0 {
			return append(found, ended...)
		}
	}
	return append(endAll(found, len(hashes)), ended...)
}

// appendCandidates appends the holders of the first block.
func (st *state) appendCandidates(found []candidate, model string, members []member) []candidate {
	for _, m := range members {
		r := st.ranks[m.holder()]
		if r == nil || model != "" && r.worker.model != model {
			continue
		}
		found = append(found, candidate{rank: r, holder: m.holder(), live: m.tiers()})
	}
	return found
}

// endAll ends the prefixes of all candidates after a number of blocks.
func endAll(found []candidate, blocks int) []candidate {
	for i := range found {
		found[i].end(found[i].live, blocks)
		found[i].blocks = blocks
	}
	return found
}

// end ends the prefixes of a candidate in tiers t after a number of blocks.
func (c *candidate) end(t tiers, blocks int) {
	for i := range numTiers {
		if t&(1<<i) != 0 {
			c.tierBlocks[i] = blocks
		}
	}
	c.live &^= t
}

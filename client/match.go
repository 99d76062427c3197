package client

import (
	"cmp"
	"slices"
	"sync"

	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Prompt is what to find the longest prefixes of: tokens, or the hashes of their
// blocks.
type Prompt struct {
	// Model restricts the answer to its workers; empty means all. Tokens mean
	// nothing at another model, so it should be set where there are several.
	Model string
	// Tokens are hashed as engines' blocks are. What does not fill a block is left
	// out.
	Tokens []uint32
	// BlockSize is the tokens in a block; 0 means those of the model's workers, each
	// size that there is.
	BlockSize int
	// LoRA is the name of the adapter, and Salt the cache salt; empty for none.
	LoRA, Salt string
	// Eagle is for engines that decode with EAGLE as SGLang does: their blocks are
	// hashed with one token more.
	Eagle bool
	// TokensHashes are the hashes of the blocks, in order, in the place of Tokens and
	// all that says how to hash them. They need not be hashed for each match of the
	// same prompt.
	TokensHashes []uint64
}

// TokensHashes hashes a prompt's blocks, for Prompt.TokensHashes, as the contract
// does: XXH3-64 of each block's tokens. Blocks are blockSize tokens long; lora and salt
// are empty where there is none.
func TokensHashes(tokens []uint32, blockSize int, lora, salt string) []uint64 {
	return wire.AppendTokensHashes(nil, tokens, blockSize, wire.BlockSeed(lora, salt), false, nil)
}

// Match is how much of a prompt a dp rank of a worker holds.
type Match struct {
	// Worker is its name, Model its model, and Endpoint where to send requests, as it
	// was configured.
	Worker, Model, Endpoint string
	// Rank is the dp rank.
	Rank uint32
	// Blocks is how many of the prompt's first blocks it holds, each in some tier:
	// to the first that it holds in none.
	Blocks int
	// TierBlocks is how many of the first blocks it holds in one tier, by
	// kvcastv1.Tier: TierBlocks[kvcastv1.Tier_TIER_DEVICE] are those that need no
	// loading.
	TierBlocks [numTiers + 1]int
	// Tokens is how many tokens Blocks are; 0 where the prompt was given as hashes
	// and the worker's block size is not known yet.
	Tokens int
	// Incomplete tells that the rank's blocks may be others than is known.
	Incomplete bool
}

// Match returns the dp ranks that hold the first block of a prompt at least, those
// that hold most first; of equal ones those that hold most on the device, then by
// name.
//
// A block is found by its sequence hash, which says what it and all blocks before it
// hold, whatever an engine calls it. So a block whose contents the engine did not
// tell is not found, and neither is what follows it; a prefix ends at the first
// block that is missing, though some after it may be there.
func (v *View) Match(p Prompt) []Match {
	var out []Match
	if p.TokensHashes != nil {
		out = v.match(nil, p.Model, p.TokensHashes, 0)
	} else {
		sizes := []int{p.BlockSize}
		if p.BlockSize == 0 {
			sizes = v.blockSizes(p.Model)
		}
		seed := wire.BlockSeed(p.LoRA, p.Salt)
		for _, size := range sizes {
			out = v.match(out, p.Model, wire.AppendTokensHashes(nil, p.Tokens, size, seed, p.Eagle, nil), size)
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

// blockSizes returns the block sizes of a model's workers.
func (v *View) blockSizes(model string) []int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	var sizes []int
	for _, w := range v.now.workers {
		size := int(w.blockSize)
		if size > 0 && (model == "" || w.model == model) && !slices.Contains(sizes, size) {
			sizes = append(sizes, size)
		}
	}
	return sizes
}

// candidate is a rank that holds all blocks of a prompt so far.
type candidate struct {
	rank   *rank
	holder uint32
	alive  tiers // those that hold all of them
	blocks int
	tier   [numTiers]int
}

// candidates are lists to be used again.
var candidates = sync.Pool{New: func() any { return new([]candidate) }}

// match appends what is held of blocks of some size, 0 for any.
func (v *View) match(out []Match, model string, hashes []uint64, size int) []Match {
	room := candidates.Get().(*[]candidate)
	defer candidates.Put(room)
	v.mu.RLock()
	defer v.mu.RUnlock()
	found := v.now.match((*room)[:0], model, hashes)
	*room = found
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
	copy(m.TierBlocks[1:], c.tier[:])
	return m
}

// match follows a prompt through the index:
//
//  1. The holders of its first block are candidates, in the order of their numbers.
//  2. Each further block is looked up once. Where its holders are the same as those
//     of the block before, which most often they are, nothing changes.
//  3. Else the candidates among them stay, and the others have got as far as this
//     block. The same goes for each tier.
//
// It returns the candidates in the memory of found.
func (st *state) match(found []candidate, model string, hashes []uint64) []candidate {
	var (
		room [1]member
		seq  uint64
		last uint64
		live int // found[:live] are left, in the order of their holders
		out  []candidate
	)
	for i, tokens := range hashes {
		if i == 0 {
			seq = tokens
		} else {
			seq = wire.SequenceHash(seq, tokens)
		}
		now, ok := st.held.get(seq)
		switch {
		case ok && now == last:
			continue
		case !ok:
			return append(finish(found, i), out...)
		}
		last = now
		members := st.sets.members(holders(now), &room)
		if i == 0 {
			if found = st.begin(found, model, members); len(found) == 0 {
				return found
			}
			continue
		}
		live = 0
		for j := range found {
			c := &found[j]
			for len(members) > 0 && members[0].holder() < c.holder {
				members = members[1:]
			}
			if len(members) == 0 || members[0].holder() != c.holder {
				c.end(c.alive, i)
				c.blocks = i
				out = append(out, *c)
				continue
			}
			c.end(c.alive&^members[0].tiers(), i)
			found[live] = *c
			live++
		}
		if found = found[:live]; live == 0 {
			return append(found, out...)
		}
	}
	return append(finish(found, len(hashes)), out...)
}

// begin makes candidates of the holders of the first block.
func (st *state) begin(found []candidate, model string, members []member) []candidate {
	for _, m := range members {
		r := st.ranks[m.holder()]
		if r == nil || model != "" && r.worker.model != model {
			continue
		}
		found = append(found, candidate{rank: r, holder: m.holder(), alive: m.tiers()})
	}
	return found
}

// finish ends all candidates that are left.
func finish(found []candidate, blocks int) []candidate {
	for i := range found {
		found[i].end(found[i].alive, blocks)
		found[i].blocks = blocks
	}
	return found
}

// end notes that tiers have got as far as they get.
func (c *candidate) end(t tiers, blocks int) {
	for i := range numTiers {
		if t&(1<<i) != 0 {
			c.tier[i] = blocks
		}
	}
	c.alive &^= t
}

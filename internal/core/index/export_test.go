package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// Blocks returns all blocks of a rank by block hash, without their places, which depend on the other ranks.
func (x *Index) Blocks(worker string, number uint32) map[uint64]radix.Block {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make(map[uint64]radix.Block)
	r := x.findRank(worker, number)
	for from, first := uint64(0), true; r != nil && (first || from != 0); first = false {
		var part []radix.Block
		part, from = x.blocks.Scan(r.blocks, from, nil)
		for _, b := range part {
			b.Place = 0
			all[b.Hash] = b
		}
	}
	return all
}

// GroupBlock is a block of an attention group other than the main group.
type GroupBlock struct {
	Tier int
	Hash uint64
}

// GroupBlocks returns the groups that hold blocks: bit n is group n.
func (x *Index) GroupBlocks(worker string, number uint32) map[GroupBlock]uint64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	all := make(map[GroupBlock]uint64)
	if r := x.findRank(worker, number); r != nil && r.attention != nil {
		for tier := range r.attention.held {
			for b := range r.attention.held[tier].All() {
				all[GroupBlock{tier, b.Key()}] = b.Value
			}
		}
	}
	return all
}

// MatchBetween is Match, and calls a function each time that names were computed, without the lock.
func (x *Index) MatchBetween(q *Query, m *Matches, named func()) (seq uint64) {
	return x.match(q, m, named)
}

// Learners returns the number of ranks that learn.
func (x *Index) Learners() int { return x.learners }

// LearnedWords returns the number of words and ambiguous places that were learned for a rank.
func (x *Index) LearnedWords(worker string, number uint32) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	l := &x.findRank(worker, number).attention.learned
	return l.words[deviceTier].Len() + l.words[hostTier].Len() + l.ambiguous.Len()
}

// Models returns the number of models of which counts are kept.
func (x *Index) Models() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.models)
}

// BlockSizes returns the block sizes with which the workers of a model are matched, ascending.
func (x *Index) BlockSizes(model string) []uint32 {
	return slices.Sorted(slices.Values(x.appendBlockSizes(nil, model)))
}

// PieceBytes is the maximum size of a piece of a snapshot of a worker with a short name.
const PieceBytes = pieceBytes

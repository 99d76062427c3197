// Package radix has the blocks of all dp ranks, and finds for a prompt the longest prefix that each rank holds.
//
// In: stores, removes and clears of ranks, in order. Out: matches, the blocks of each rank, and their number and digest
// in each tier. The answers are exactly those of the blocks that were stored and not removed, except that a prefix may be
// reported too short if two 64-bit hashes collide.
//
// The contents of blocks are tokens hashes. They are in a compressed radix tree over all ranks of a model (tree, run):
// a run is a sequence of consecutive blocks, and says how many of them each rank holds in each tier. A match compares
// the prompt with a few runs, and visits the holders of each run once. Beside the tree, each rank has a table by block
// hash that says where in the tree a block is (Rank).
//
// A block has a place in the tree if it starts a prompt or its parent has a place. Otherwise, it is an orphan until its
// parent has a place, and is not matched. A place stays while a tier holds the block, even if the parent is removed. A
// store without content, or with an unknown parent, does not change a known place; any other store moves the block.
// A store with content replaces the block's LoRA adapter and block size; a store without keeps them.
//
// A rank that is cleared or removed is ignored at once; later sweeps release its blocks in bounded steps.
package radix

import (
	"github.com/kvcast/kvcast/internal/attribute"
	"github.com/kvcast/kvcast/internal/hashtable"
)

// NumTiers is the number of tiers. Tiers are numbered from 0.
const NumTiers = 4

// limits bound the work of one step. Tests lower them.
type limits struct {
	// run bounds the blocks of a run, and so the cost of moving them when a run grows or is split.
	run uint32
	// trimmedChildren bounds the search for the last block of a run that another run follows. A run with more
	// children is trimmed when they are fewer.
	trimmedChildren uint32
	// singleClears bounds the blocks that are removed one by one when a rank is cleared.
	singleClears int
	// retired bounds the retired ranks: beyond it, each retirement sweeps.
	retired int
	// minSweep is the minimum number of slots that one sweep visits.
	minSweep int
	// attributes bounds the combinations of LoRA adapter and block size of a rank.
	attributes uint32
}

var defaults = limits{run: 4096, trimmedChildren: 16, singleClears: 64, retired: 32, minSweep: 1024, attributes: maxAttributes}

// Index has the blocks of all ranks. Only one goroutine may call methods at a time, except that several may call
// Match, MatchHashes, Find and Scan at the same time, each match with its own Matcher. New makes an index.
type Index struct {
	tree        tree
	models      map[string]*model
	ranks       []*Rank  // by number; nil: unused or retired
	freeNumbers []uint32 // unused numbers of ranks
	retired     []*retiredRank
	stored      int        // blocks stored since the last sweep
	adoptions   []adoption // reused by adopt
	hashes      []uint64   // reused by ClearTier
}

// model is the root of the runs of a model's ranks.
type model struct {
	name  string
	root  uint32
	ranks int // numbers of ranks, including retired ones; the model is dropped when there are none
}

// New returns an empty index.
func New() *Index { return &Index{tree: newTree(), models: make(map[string]*model)} }

// AddRank adds a rank without blocks, with a value for the caller's use.
func (x *Index) AddRank(modelName string, owner any) *Rank {
	m := x.models[modelName]
	if m == nil {
		m = &model{name: modelName, root: x.tree.addRoot()}
		x.models[modelName] = m
	}
	r := &Rank{Owner: owner, model: m}
	x.open(r)
	return r
}

// RemoveRank removes a rank and all its blocks. The rank must not be used any more.
func (x *Index) RemoveRank(r *Rank) {
	x.retire(r)
	*r = Rank{}
	x.limitRetired()
}

// Clear removes all blocks of a rank.
func (x *Index) Clear(r *Rank) {
	if r.table.Len() > x.tree.limits.singleClears {
		x.retire(r)
		x.open(r) // before sweeps, which drop a model without ranks
		x.limitRetired()
		return
	}
	for tier := range NumTiers {
		x.ClearTier(r, tier)
	}
}

// open gives a rank a number and an empty table.
func (x *Index) open(r *Rank) {
	if n := len(x.freeNumbers); n > 0 {
		r.number, x.freeNumbers = x.freeNumbers[n-1], x.freeNumbers[:n-1]
	} else {
		r.number = uint32(len(x.ranks))
		x.ranks = append(x.ranks, nil)
	}
	x.ranks[r.number] = r
	r.model.ranks++
	r.table = hashtable.New[slot, tag]()
	r.attrs = attribute.NewInterner(nil)
	r.attrs.Acquire(attribute.Set{}) // stays the slot 0, see Index.attributes
	r.orphans = newOrphans()
	r.blocks, r.digests = [NumTiers]uint64{}, [NumTiers]uint64{}
}

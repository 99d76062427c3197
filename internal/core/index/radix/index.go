// Package radix has the blocks of all dp ranks, and finds for a prompt the longest prefix that each rank holds.
//
// In: stores, removes and clears of ranks, in order. Out: matches, the blocks of each rank, and their number and digest
// in each tier. The answers are exactly those of the blocks that were stored and not removed.
//
// The contents of blocks are tokens hashes. They are in a compressed radix tree over all ranks of a model (tree, run): a run is a sequence
// of consecutive blocks, and says which of them each rank holds in each tier. A match compares the prompt with a few runs, and visits the
// holders of each run: one by one, or 64 at a time if they hold the same blocks, as many ranks do of a common system prompt (plain). Beside the tree,
// each rank has a table by block hash that says where in the tree a block is (Rank).
//
// A block has a place in the tree if it starts a prompt or its parent has a place. Otherwise, it is an orphan until its
// parent has a place, and is not matched. A place stays while a tier holds the block, even if the parent is removed. A
// store without content, or with an unknown parent, does not change a known place; any other store moves the block.
// A run of which no rank holds a block stays while other runs follow it. If there are 16,384 more such runs than others, the
// index forgets the first of them; the blocks that follow them are then not matched until they are stored again.
// A store with content replaces the block's LoRA adapter and block size; a store without keeps them.
//
// A change costs a bounded time for each of its blocks, except that a store gives places to all orphans that descend
// from its blocks: each orphan once, so that all stores together cost as much as without orphans. A rank that is cleared
// or removed, and a tier that is cleared, are ignored at once; later sweeps release the blocks in bounded steps.
package radix

import (
	"math/bits"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/hashtable"
)

// NumTiers is the number of tiers. Tiers are numbered from 0.
const NumTiers = 4

// limits bound the work of one step. Tests lower them.
type limits struct {
	// run bounds the blocks of a run, and so the number of holdings of a rank in the run.
	run uint32
	// chunk bounds the holdings of a chunk.
	chunk int
	// singleClears bounds the blocks that are removed one by one when a rank or a tier is cleared.
	singleClears int
	// sweeps bounds the sweeps in progress: beyond it, each clear sweeps.
	sweeps int
	// minSweep is the minimum number of slots that Sweep visits, give or take a few.
	minSweep int
	// attributes bounds the combinations of LoRA adapter and block size of a rank.
	attributes uint32
	// unheld is how many more unheld and detached runs than others there may be, before unheld runs are forgotten.
	unheld int
	// plain is the number of plain ranks of a run from which on there are any.
	plain int
}

var defaults = limits{run: maxRun, chunk: 2048, singleClears: 64, sweeps: 32, minSweep: 1024, attributes: maxAttributes, unheld: 1 << 14, plain: 8}

// Index has the blocks of all ranks. Only one goroutine may call methods at a time, except that several may call Match, MatchHashes, Find,
// Scan, Chain, AddRuns and Resolve at the same time, each with its own Matcher or Sharing. New makes an index.
type Index struct {
	tree        tree
	models      map[string]*model
	ranks       []numbered // by number
	plainLive   []uint64   // a bit for each rank whose numbered.live has plainBit
	freeNumbers []uint32   // unused numbers of ranks
	numberings  uint64     // numbers given to ranks
	sweeps      []*sweep   // in progress or waiting, oldest first
	stored      int        // blocks stored since the last sweep
	adoptions   []adoption // reused by adopt
	adopted     func(r *Rank, hash uint64)
	hashes      []uint64 // reused by clearSingly
	keepsNames  bool
}

// model is the root of the runs of a model's ranks.
type model struct {
	name  string
	root  uint32
	ranks int // numbers of ranks, including retired ones; the model is dropped when there are none
}

// numbered is what a match needs to know of a rank.
type numbered struct {
	rank *Rank // nil: unused or retired
	live uint8 // Rank.live; 0 for a retired rank
	// tiers are the tiers of the bits in live.
	tiers [8]uint8
}

// New returns an empty index.
func New() *Index { return &Index{tree: newTree(), models: make(map[string]*model)} }

// AddRank adds a rank without blocks, with a value for the caller's use.
func (x *Index) AddRank(modelName string, owner any) *Rank {
	m := x.models[modelName]
	if m == nil {
		m = &model{name: modelName, root: x.tree.add()}
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
	x.limitSweeps()
}

// Clear removes all blocks of a rank.
func (x *Index) Clear(r *Rank) {
	if r.table.Len() <= x.tree.limits.singleClears {
		for tier := range NumTiers {
			x.clearSingly(r, tier)
		}
		return
	}
	x.retire(r)
	x.open(r) // before sweeps, which drop a model without ranks
	x.limitSweeps()
}

// ClearTier removes all blocks of a rank from a tier. It takes a bounded time, except that it completes the sweep of a
// rank whose tiers were cleared more than four times since the last complete sweep.
func (x *Index) ClearTier(r *Rank, tier int) {
	switch {
	case r.blocks[tier] == 0:
	case r.table.Len() <= x.tree.limits.singleClears:
		x.clearSingly(r, tier)
	default:
		x.retireTier(r, tier)
		x.limitSweeps()
	}
}

// clearSingly removes the blocks of a tier one by one.
func (x *Index) clearSingly(r *Rank, tier int) {
	x.hashes = x.hashes[:0]
	for e := range r.table.All() {
		if e.Value.tag.has(r.bits[tier]) {
			x.hashes = append(x.hashes, e.Key())
		}
	}
	x.Remove(r, tier, x.hashes)
}

// open gives a rank a number and an empty table.
func (x *Index) open(r *Rank) {
	x.numberings++
	if n := len(x.freeNumbers); n > 0 {
		r.number, x.freeNumbers = x.freeNumbers[n-1], x.freeNumbers[:n-1]
	} else {
		r.number = uint32(len(x.ranks))
		x.ranks = append(x.ranks, numbered{})
	}
	r.model.ranks++
	r.table = hashtable.New[slot]()
	r.orphans, r.hidden = newOrphans(), 0
	if x.keepsNames {
		r.names = make(rankNames)
	}
	r.attrs = attribute.NewInterner(nil)
	r.attrs.Acquire(attribute.Set{}) // stays the slot 0, see Index.attributes
	for tier := range NumTiers {
		r.bits[tier] = 1 << tier
	}
	r.stale, r.blocks, r.digests = 0, [NumTiers]uint64{}, [NumTiers]uint64{}
	x.number(r)
}

// number updates what matches know of a rank, whose bits have changed.
func (x *Index) number(r *Rank) {
	n := numbered{rank: r}
	for tier, bit := range r.bits {
		n.live |= bit
		n.tiers[bits.TrailingZeros8(bit)] = uint8(tier)
	}
	r.live = n.live
	x.setNumbered(r.number, n)
}

// setNumbered sets what matches know of a rank.
func (x *Index) setNumbered(number uint32, n numbered) {
	x.ranks[number] = n
	word, bit := int(number/64), uint64(1)<<(number%64)
	if word == len(x.plainLive) {
		x.plainLive = append(x.plainLive, 0)
	}
	if x.plainLive[word] &^= bit; n.live&plainBit != 0 {
		x.plainLive[word] |= bit
	}
}

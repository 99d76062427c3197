package pipeline_test

import (
	"maps"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// modelCopies counts the copies of a block, or of a source's name for one.
type modelCopies struct {
	copies int
	// unsure counts the stores that are either copies or announcements.
	unsure int
	// parent and blockSize are those of the last store with content; parent is nil if it had
	// none.
	parent    *uint64
	blockSize uint32
}

// modelStoreOp is the effect of a store on a block that is already stored.
type modelStoreOp int

const (
	modelCopy modelStoreOp = iota
	modelUnsure
	modelReused
)

// modelRemoveOp describes a remove.
type modelRemoveOp struct {
	// gateOpen reports whether the rank's announcements are recognized; certain, whether all unsure stores are taken for
	// announcements then.
	gateOpen, certain bool
	// last reports whether the remove is of all copies.
	last bool
	// remaining is the engine's number of remaining copies; nil if it is not given.
	remaining *uint32
}

// store counts a store of a block that is already stored.
func (c *modelCopies) store(op modelStoreOp) {
	switch op {
	case modelCopy:
		c.copies++
	case modelUnsure:
		c.unsure++
	case modelReused:
	}
}

// remove counts a remove, and reports whether it removed the last copy.
func (c *modelCopies) remove(op modelRemoveOp, hasChild bool) (gone bool) {
	switch {
	case op.remaining != nil:
		c.copies, c.unsure = int(*op.remaining), 0
	case op.last:
		c.copies = 0
	case c.copies > 1:
		c.copies--
	case c.unsure > 0 && (!op.gateOpen || hasChild && !op.certain):
		c.unsure--
	default:
		c.copies = 0
	}
	return c.copies == 0
}

// modelEngine is a source of a dp rank.
type modelEngine struct {
	rank   uint32
	source int
}

// modelCandidate is a root store of the current batch of at least two blocks, all already
// stored.
type modelCandidate struct {
	last uint64
	// loaded reports whether all blocks are in lower tiers as well.
	loaded bool
}

// modelReuses is what tells an engine that announces reused blocks from one that loads blocks from lower tiers.
type modelReuses struct {
	// repeats are stores that continue the last store of their group in the same batch, which was a root store of at least two
	// blocks that were all already stored; original are those with a block that was in no lower tier.
	repeats, original int
	// branches are stores after a block with another child that no root store has just announced, of blocks that no lower
	// tier had.
	branches int
	open     bool
}

// inLower reports whether all blocks of an event are in some lower tier.
func (mw *modelWorker) inLower(rank uint32, e wire.Event) bool {
	for _, h := range e.BlockHashes {
		found := false
		for tier := kvblock.TierDevice + 1; tier < kvblock.TierEnd; tier++ {
			found = found || mw.blocks[modelBlock{rank, tier, h}] != nil
		}
		if !found {
			return false
		}
	}
	return true
}

// usesLower reports whether lower tiers of a rank have been used; unknown with trackers, which do not tell tiers apart.
func (mw *modelWorker) usesLower(rank uint32) bool {
	for at, used := range mw.usedTiers {
		if at.rank == rank && at.tier > kvblock.TierDevice && used {
			return mw.mode != feed.ConsolidateDedup
		}
	}
	return false
}

// sawStore returns the effect of a store on blocks that are already stored. It also detects
// an engine that announces reused blocks.
func (mw *modelWorker) sawStore(b feed.Batch, e wire.Event, rooted bool, has func(hash uint64) bool) modelStoreOp {
	if b.CopyRule == feed.CopyRuleDetected && e.Tier == kvblock.TierDevice {
		group := e.GroupIdx
		if !e.HasGroupIdx {
			group = -1
		}
		reuse := mw.announcements[modelEngine{b.Rank, b.Source}]
		if c, ok := mw.candidates[group]; ok && !rooted && e.Parent == c.last && (!reuse.open || mw.usesLower(b.Rank)) {
			reuse.repeats++
			if !c.loaded {
				reuse.original++
			}
			reuse.open = reuse.open || reuse.original >= 3 || reuse.repeats >= 3 && 4*reuse.branches <= reuse.repeats
		}
		if parent := (modelBlock{b.Rank, kvblock.TierDevice, e.Parent}); !rooted && mw.usesLower(b.Rank) && len(e.BlockHashes) > 0 &&
			mw.blocks[parent] != nil && mw.hasChild(parent) && (mw.root == nil || *mw.root != e.Parent) && !mw.inLower(b.Rank, e) {
			reuse.branches++
		}
		if n := len(e.BlockHashes); n > 0 {
			mw.root = nil
			if rooted {
				mw.root = &e.BlockHashes[n-1]
			}
		}
		mw.announcements[modelEngine{b.Rank, b.Source}] = reuse
		delete(mw.candidates, group)
		all := rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown
		for _, h := range e.BlockHashes {
			all = all && has(h)
		}
		if all {
			mw.candidates[group] = modelCandidate{e.BlockHashes[len(e.BlockHashes)-1], mw.usesLower(b.Rank) && mw.inLower(b.Rank, e)}
		}
	}
	switch {
	case b.CopyRule == feed.CopyRuleAnnouncedLast || e.Origin == wire.OriginReused:
		return modelReused
	case e.Origin == wire.OriginUnknown && b.CopyRule == feed.CopyRuleDetected && e.Tier == kvblock.TierDevice && rooted:
		return modelUnsure
	}
	return modelCopy
}

// removeOps returns the operation of a remove for each block.
func (mw *modelWorker) removeOps(b feed.Batch, e wire.Event) (ops []modelRemoveOp) {
	reuse := mw.announcements[modelEngine{b.Rank, b.Source}]
	for i := range e.BlockHashes {
		op := modelRemoveOp{
			gateOpen: b.CopyRule == feed.CopyRuleDetected && e.Tier == kvblock.TierDevice && reuse.open,
			certain:  mw.usesLower(b.Rank) && reuse.repeats > 4*reuse.branches,
			last:     b.CopyRule == feed.CopyRuleAnnouncedLast,
		}
		if e.Rare != nil && len(e.Rare.RemainingCopies) == len(e.BlockHashes) {
			op.remaining = &e.Rare.RemainingCopies[i]
		}
		ops = append(ops, op)
	}
	return ops
}

// closeGates resets the announcements of one source of a rank, or of all.
func (mw *modelWorker) closeGates(rank uint32, source int) {
	clear(mw.candidates)
	mw.root = nil
	maps.DeleteFunc(mw.announcements, func(e modelEngine, _ modelReuses) bool {
		return e.rank == rank && (source == everySource || e.source == source)
	})
}

// everySource stands for all sources.
const everySource = -1

// hasChild reports whether the block is the parent of another in the same place.
func (mw *modelWorker) hasChild(b modelBlock) bool {
	for other, c := range mw.blocks {
		if other.rank == b.rank && other.tier == b.tier && c.parent != nil && *c.parent == b.hash {
			return true
		}
	}
	return false
}

// hasChild reports whether the source has a block whose parent has this name.
func (r *modelRank) hasChild(name modelName) bool {
	for other, h := range r.names {
		if other.source == name.source && h.copies > 0 && h.parent != nil && *h.parent == name.hash {
			return true
		}
	}
	return false
}

package pipeline_test

import (
	"maps"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
)

// modelCopies is what is counted of a block, or of a source's name for one.
type modelCopies struct {
	copies int
	// unsure are the stores that were copies or announcements.
	unsure int
	// parent is what the last store with content called the parent, nil for none, and
	// blockSize what it had.
	parent    *uint64
	blockSize uint32
}

// modelStoreOp is what a store is to a block that is held.
type modelStoreOp int

const (
	modelCopy modelStoreOp = iota
	modelUnsure
	modelReuse
)

// modelRemoveOp is what a remove says.
type modelRemoveOp struct {
	// gateOpen says that the rank's announcements are known for what they are.
	gateOpen bool
	// last says that it is the remove of all copies.
	last bool
	// remaining is how many copies the engine has left; nil where it does not say.
	remaining *uint32
}

// store counts a store of a block that is held.
func (c *modelCopies) store(op modelStoreOp) {
	switch op {
	case modelCopy:
		c.copies++
	case modelUnsure:
		c.unsure++
	case modelReuse:
	}
}

// remove counts a remove, and reports whether the block is gone.
func (c *modelCopies) remove(op modelRemoveOp, hasHeldChild bool) (gone bool) {
	switch {
	case op.remaining != nil:
		c.copies, c.unsure = int(*op.remaining), 0
	case op.last:
		c.copies = 0
	case c.copies > 1:
		c.copies--
	case c.unsure > 0 && (!op.gateOpen || hasHeldChild):
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

// modelCandidate is a root store of the present batch of at least two blocks, all
// held.
type modelCandidate struct {
	last uint64
}

// sawStore says what a store is to its blocks that are held, and takes note of it if
// it shows that the engine announces: if it continues the last store of its group in
// this batch, and that was a root store of at least two blocks that were all held.
func (mw *modelWorker) sawStore(b feed.Batch, e wire.Event, rooted bool, held func(hash uint64) bool) modelStoreOp {
	if b.CopyRule == feed.CopyRuleDetected && e.Tier == wire.TierDevice {
		group := e.GroupIdx
		if !e.HasGroupIdx {
			group = -1
		}
		if c, ok := mw.candidates[group]; ok && !rooted && e.Parent == c.last {
			mw.announcements[modelEngine{b.Rank, b.Source}]++
		}
		delete(mw.candidates, group)
		all := rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown
		for _, h := range e.BlockHashes {
			all = all && held(h)
		}
		if all {
			mw.candidates[group] = modelCandidate{e.BlockHashes[len(e.BlockHashes)-1]}
		}
	}
	switch {
	case b.CopyRule == feed.CopyRuleAnnouncedLast || e.Origin == wire.OriginReused:
		return modelReuse
	case e.Origin == wire.OriginUnknown && b.CopyRule == feed.CopyRuleDetected && e.Tier == wire.TierDevice && rooted:
		return modelUnsure
	}
	return modelCopy
}

// removeOps says what a remove of each block is.
func (mw *modelWorker) removeOps(b feed.Batch, e wire.Event) (ops []modelRemoveOp) {
	for i := range e.BlockHashes {
		op := modelRemoveOp{
			gateOpen: b.CopyRule == feed.CopyRuleDetected && e.Tier == wire.TierDevice && mw.announcements[modelEngine{b.Rank, b.Source}] >= 3,
			last:     b.CopyRule == feed.CopyRuleAnnouncedLast,
		}
		if e.Rare != nil && len(e.Rare.RemainingCopies) == len(e.BlockHashes) {
			op.remaining = &e.Rare.RemainingCopies[i]
		}
		ops = append(ops, op)
	}
	return ops
}

// closeGates forgets what announcements a rank's engines made: that of one source, or
// of all.
func (mw *modelWorker) closeGates(rank uint32, source int) {
	clear(mw.candidates)
	maps.DeleteFunc(mw.announcements, func(e modelEngine, _ int) bool {
		return e.rank == rank && (source == everySource || e.source == source)
	})
}

// everySource stands for all sources.
const everySource = -1

// hasHeldChild reports whether a block of the same place has it for its parent.
func (mw *modelWorker) hasHeldChild(b modelBlock) bool {
	for other, c := range mw.held {
		if other.rank == b.rank && other.tier == b.tier && c.parent != nil && *c.parent == b.hash {
			return true
		}
	}
	return false
}

// hasHeldChild reports whether a source holds, by some name, a block whose parent it
// calls by this one.
func (r *modelRank) hasHeldChild(name modelName) bool {
	for other, h := range r.names {
		if other.source == name.source && h.copies > 0 && h.parent != nil && *h.parent == name.hash {
			return true
		}
	}
	return false
}

package radix

import (
	"cmp"
	"slices"
)

// run is a sequence of consecutive blocks, known by their tokens hashes. Each holder holds a prefix of the run: a run
// in which a holder would hold a later block without all blocks before is split.
type run struct {
	tokens   []uint64
	holdings []holding // ascending by holder
	twins    []twin    // ascending by offset, then holder; usually none
	// after is the block that the run follows; its run is 0 for a root, which has no blocks.
	after position
	// forward is the run that has the blocks which were split off the end, 0 if there is none. It follows the last
	// block. A run with a forward changes its length only by a further split, since block tables still have
	// positions in the run for the blocks that were split off.
	forward uint32
	// Runs that follow blocks of this run are a list, in no order.
	firstChild, children uint32
	prev, next           uint32 // other runs that follow blocks of the same run
	// first is the memory of holdings while there is one, which saves a cache miss.
	first [1]holding
}

// newRun returns a run that follows a block, without holdings.
func newRun(tokens []uint64, after position) *run {
	r := &run{tokens: tokens, after: after}
	r.holdings = r.first[:0]
	return r
}

// position is a block of a run. The block after which the runs of a root begin is the offset 0 of the root.
type position struct{ run, offset uint32 }

// holder is a tier of a rank: the rank's number and the tier.
type holder uint32

func newHolder(rank uint32, tier int) holder { return holder(rank*NumTiers + uint32(tier)) }
func (h holder) rank() uint32                { return uint32(h) / NumTiers }
func (h holder) tier() int                   { return int(h % NumTiers) }

// holding says that a holder has the first blocks of a run, at least one.
type holding struct {
	holder holder
	blocks uint32
}

// twin counts the names, except one, that a holder has for the same block. Engines may distinguish blocks by more than
// their tokens.
type twin struct {
	offset uint32
	holder holder
	names  uint32
}

// find returns the index of a holder in the holdings, or the index at which to insert it.
func (r *run) find(h holder) (int, bool) {
	if len(r.holdings) == 1 {
		switch first := r.holdings[0].holder; {
		case first == h:
			return 0, true
		case first < h:
			return 1, false
		}
		return 0, false
	}
	return slices.BinarySearchFunc(r.holdings, h, func(e holding, h holder) int { return cmp.Compare(e.holder, h) })
}

// held returns how many blocks a holder holds.
func (r *run) held(h holder) uint32 {
	if i, ok := r.find(h); ok {
		return r.holdings[i].blocks
	}
	return 0
}

// setHeld sets the number of blocks of the holding i, and deletes it if there are none.
func (r *run) setHeld(i int, blocks uint32) {
	if r.holdings[i].blocks = blocks; blocks == 0 {
		r.holdings = slices.Delete(r.holdings, i, i+1)
	}
}

func (r *run) findTwin(offset uint32, h holder) (int, bool) {
	return slices.BinarySearchFunc(r.twins, twin{offset: offset, holder: h}, func(a, b twin) int {
		return cmp.Or(cmp.Compare(a.offset, b.offset), cmp.Compare(a.holder, b.holder))
	})
}

// addTwin counts a further name of a block.
func (r *run) addTwin(offset uint32, h holder) {
	i, ok := r.findTwin(offset, h)
	if !ok {
		r.twins = slices.Insert(r.twins, i, twin{offset: offset, holder: h})
	}
	r.twins[i].names++
}

// removeTwin removes a name of a block, and reports whether the block had several.
func (r *run) removeTwin(offset uint32, h holder) bool {
	if len(r.twins) == 0 {
		return false
	}
	i, ok := r.findTwin(offset, h)
	if !ok {
		return false
	}
	if r.twins[i].names--; r.twins[i].names == 0 {
		r.twins = slices.Delete(r.twins, i, i+1)
	}
	return true
}

// truncate drops the blocks from an offset on.
func (r *run) truncate(blocks uint32) {
	if r.tokens = r.tokens[:blocks]; cap(r.tokens) > 4*len(r.tokens)+minTokens {
		r.tokens = slices.Clone(r.tokens)
	}
}

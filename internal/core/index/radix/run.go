package radix

import (
	"cmp"
	"maps"
	"slices"
)

// run is a sequence of consecutive blocks, known by their tokens hashes. Its number is 0 if it is unused. A root has no blocks.
type run struct {
	tokens   []uint64
	holdings holdings
	plain    *plain // nil: none
	rare     *rare  // what few runs have; usually nil
	// first is the memory of holdings while there is one, which saves a cache miss.
	first [1]holding
	// after is the block that the run follows; its run is 0 for a root.
	after    position
	branches []branch // ascending by offset
	// unheld is set if no rank holds a block, but runs follow. queued is set if the run's number is in tree.unheld.
	unheld, queued bool
	// detached is set for an unheld run that was forgotten: it has no tokens and follows no block.
	detached bool
	// generation counts how often the run's number was freed, so that a reader knows whether it is used again.
	generation uint32
}

// rare is what few runs have.
type rare struct {
	ids   tokenIDs
	twins map[twin]uint32 // the number of names except one; usually nil
}

// rarely returns what few runs have, to change it.
func (r *run) rarely() *rare {
	if r.rare == nil {
		r.rare = new(rare)
	}
	return r.rare
}

// twins returns the numbers of names, except one, of blocks that have several. The map may be nil.
func (r *run) twins() map[twin]uint32 {
	if r.rare == nil {
		return nil
	}
	return r.rare.twins
}

// position is a block of a run. The block after which the runs of a root begin is the offset 0 of the root. The place
// of a block does not change while a rank holds it.
type position struct{ run, offset uint32 }

// number returns the position as a number, as in tags.
func (p position) number() uint64 { return uint64(p.run)<<(runShift-placeShift) | uint64(p.offset) }

// holding says which tiers of a rank hold the blocks from an offset up to another one, exclusive. The holdings of a rank
// do not overlap, and adjacent ones differ in their tiers.
type holding struct {
	rank     uint32
	from, to uint16
	tiers    uint8 // bits, see Rank.bits; not 0
}

// branch counts the runs that follow a block.
type branch struct{ offset, runs uint32 }

// twin is a block for which a tier of a rank has several names. Engines may distinguish blocks by more than their tokens.
type twin struct {
	offset uint32
	rank   uint32
	tier   uint8 // bit
}

// tiers returns the tiers of a rank that hold a block.
func (r *run) tiers(rank, offset uint32) uint8 {
	if r.plain.has(rank) {
		if offset < r.plain.to {
			return plainBit
		}
		return 0
	}
	if at, ok := r.holdings.find(rank, offset); ok {
		return r.holdings.at(at).tiers
	}
	return 0
}

// holdsAny reports whether a tier of a rank holds any of the blocks from an offset up to another one.
func (r *run) holdsAny(rank, from, to uint32, tier uint8) bool {
	if r.plain.has(rank) {
		return tier&plainBit != 0 && from < r.plain.to
	}
	at, _ := r.holdings.find(rank, from)
	for e := r.holdings.at(at); e != nil && e.rank == rank && uint32(e.from) < to; e = r.holdings.at(at) {
		if e.tiers&tier != 0 {
			return true
		}
		at = r.holdings.next(at)
	}
	return false
}

// isHeld reports whether a rank holds a block.
func (r *run) isHeld() bool { return !r.holdings.empty() || r.plain != nil }

// hold adds the blocks from an offset up to another one to a tier of a rank, which has none of them.
func (r *run) hold(rank, from, to uint32, tier uint8, t *tree) {
	r.unplain(rank, t)
	r.extendHoldings(rank, from, to, tier, t)
	r.settle(rank, t)
}

func (r *run) extendHoldings(rank, from, to uint32, tier uint8, t *tree) {
	h := &r.holdings
	at, ok := h.find(rank, from)
	if next := h.at(at); ok || next != nil && next.rank == rank && uint32(next.from) <= to {
		r.update(rank, from, to, tier, 0, t)
		return
	}
	if before, ok := h.before(at); ok {
		if e := *h.at(before); e.rank == rank && uint32(e.to) == from && e.tiers == tier {
			e.to = uint16(to)
			h.set(before, e)
			return
		}
	}
	h.replace(t.limits.chunk, at, 0, holding{rank, uint16(from), uint16(to), tier})
}

// release removes the blocks from an offset up to another one from a tier of a rank, which has all of them.
func (r *run) release(rank, from, to uint32, tier uint8, t *tree) {
	if r.plain.has(rank) && from == 0 && to >= r.plain.to {
		r.removePlain(rank)
		return
	}
	r.unplain(rank, t)
	r.shortenHoldings(rank, from, to, tier, t)
	r.settle(rank, t)
}

func (r *run) shortenHoldings(rank, from, to uint32, tier uint8, t *tree) {
	at, _ := r.holdings.find(rank, from)
	switch e := *r.holdings.at(at); {
	case e.tiers != tier || to > uint32(e.to) || from > uint32(e.from) && to < uint32(e.to):
		r.update(rank, from, to, 0, tier, t)
	case from > uint32(e.from):
		e.to = uint16(from)
		r.holdings.set(at, e)
	case to < uint32(e.to):
		e.from = uint16(to)
		r.holdings.set(at, e)
	default:
		r.holdings.replace(t.limits.chunk, at, 1)
	}
}

// update adds the blocks from an offset up to another one to some tiers of a rank, and removes them from others.
func (r *run) update(rank, from, to uint32, add, remove uint8, t *tree) {
	// Only those that have a block from the one before from up to to change, or are merged.
	first, _ := r.holdings.find(rank, from)
	if before, ok := r.holdings.before(first); ok && r.holdings.at(before).rank == rank {
		first = before
	}
	last, n := first, 0
	out := t.holdings[:0]
	emit := func(from, to uint32, tiers uint8) {
		if from >= to || tiers == 0 {
			return
		}
		if n := len(out); n > 0 && uint32(out[n-1].to) == from && out[n-1].tiers == tiers {
			out[n-1].to = uint16(to)
			return
		}
		out = append(out, holding{rank, uint16(from), uint16(to), tiers})
	}
	next := from // the first block that is not yet updated
	for e := r.holdings.at(last); e != nil && e.rank == rank && uint32(e.from) <= to; e = r.holdings.at(last) {
		last, n = r.holdings.next(last), n+1
		begin, end := uint32(e.from), uint32(e.to)
		emit(begin, min(end, from), e.tiers)
		if begin < to && end > from {
			emit(next, begin, add)
			next = min(end, to)
			emit(max(begin, from), next, (e.tiers|add)&^remove)
		} else if begin >= to {
			emit(next, to, add)
			next = to
		}
		emit(max(begin, to), end, e.tiers)
	}
	emit(next, to, add)
	r.holdings.replace(t.limits.chunk, first, n, out...)
	t.holdings = out
}

// addTwin counts a further name of a block.
func (r *run) addTwin(offset, rank uint32, tier uint8) {
	rare := r.rarely()
	if rare.twins == nil {
		rare.twins = make(map[twin]uint32)
	}
	rare.twins[twin{offset, rank, tier}]++
}

// removeTwin removes a name of a block, and reports whether the block had several.
func (r *run) removeTwin(offset, rank uint32, tier uint8) bool {
	w := twin{offset, rank, tier}
	switch names := r.twins()[w]; names {
	case 0:
		return false
	case 1:
		delete(r.rare.twins, w)
		r.rare.trim()
	default:
		r.rare.twins[w] = names - 1
	}
	return true
}

// trim frees the memory of twins if there are none.
func (r *rare) trim() {
	if len(r.twins) == 0 {
		r.twins = nil
	}
}

// removeTwins removes all names of the blocks in tiers of a rank except one of each.
func (r *run) removeTwins(rank uint32, tiers uint8) {
	twins := r.twins()
	if len(twins) == 0 {
		return
	}
	if len(twins) <= len(r.tokens) {
		maps.DeleteFunc(twins, func(w twin, _ uint32) bool { return w.rank == rank && w.tier&tiers != 0 })
		tiers = 0
	}
	for ; tiers != 0; tiers &= tiers - 1 {
		for offset := range uint32(len(r.tokens)) {
			delete(twins, twin{offset, rank, tiers & -tiers})
		}
	}
	r.rare.trim()
}

// findBranch returns the index of the branch at an offset, or the index at which to insert it. Most branches are at the
// last block that has one.
func (r *run) findBranch(offset uint32) (_ int, ok bool) {
	if n := len(r.branches); n == 0 || r.branches[n-1].offset < offset {
		return n, false
	} else if r.branches[n-1].offset == offset {
		return n - 1, true
	}
	return slices.BinarySearchFunc(r.branches, offset, func(b branch, offset uint32) int {
		return cmp.Compare(b.offset, offset)
	})
}

func (r *run) addBranch(offset uint32) {
	i, ok := r.findBranch(offset)
	if !ok {
		r.branches = slices.Insert(r.branches, i, branch{offset: offset})
	}
	r.branches[i].runs++
}

func (r *run) removeBranch(offset uint32) {
	i, _ := r.findBranch(offset)
	if r.branches[i].runs--; r.branches[i].runs == 0 {
		r.branches = slices.Delete(r.branches, i, i+1)
	}
}

// needed returns how many blocks, from the first, are needed: up to the last that a rank holds or a run follows.
func (r *run) needed() uint32 {
	n, length := uint32(0), uint32(len(r.tokens))
	if b := len(r.branches); b > 0 {
		n = r.branches[b-1].offset + 1
	}
	if r.plain != nil {
		n = max(n, r.plain.to)
	}
	if n >= length {
		return n
	}
	return max(n, r.holdings.upTo(length))
}

// truncate drops the blocks from an offset on.
func (r *run) truncate(blocks uint32, t *tree) {
	if r.tokens = r.tokens[:blocks]; cap(r.tokens) > 4*len(r.tokens)+minTokens {
		r.tokens = slices.Clone(r.tokens)
	}
	t.truncateIDs(r, blocks)
}

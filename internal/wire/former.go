package wire

import "slices"

// maxFormer is how many blocks that were forgotten are remembered: those of 64 Ki tokens in blocks of 16. What vLLM has evicted or cleared is
// in a lower tier a few steps later, or never.
const maxFormer = 1 << 12

// former are the scopes of the blocks that scopes have forgotten last. The zero value has none.
type former struct {
	blocks map[formerBlock]formerScope
	// ring has their keys, at the slots in blocks; others are of blocks that have been forgotten again since. Once it is full, the next takes the
	// place of the oldest, which is at next.
	ring []formerBlock
	next int
	// lost are the ranks of which one clear has forgotten more blocks than there is room for, or of which there was no memory for some; and how many
	// blocks are forgotten until those count as old.
	lost map[uint32]int
	// max is maxFormer if it is 0, and fewer in tests.
	max int
}

// formerBlock is a block of a rank.
type formerBlock struct {
	hash uint64
	rank uint32
}

// formerScope is a block's scope, and where it is in the ring.
type formerScope struct {
	id   scopeID
	slot int
}

func (f *former) limit() int {
	if f.max > 0 {
		return f.max
	}
	return maxFormer
}

// add adds a block.
func (f *former) add(s *scopes, rank uint32, hash uint64, id scopeID) {
	if left := f.lost[rank]; left > 1 {
		f.lost[rank] = left - 1
	} else {
		delete(f.lost, rank)
	}
	at, slot := formerBlock{hash, rank}, len(f.ring)
	switch {
	case slot == f.limit():
		slot = f.next
		f.next = (f.next + 1) % len(f.ring)
		f.drop(s, slot)
		f.ring[slot] = at
	case s.budget.Reserve(scopedBlockCost):
		f.ring = append(f.ring, at)
	default: // there is no memory
		f.lose(rank)
		return
	}
	s.retain(id)
	if before, ok := f.blocks[at]; ok {
		s.release(before.id)
	}
	if f.blocks == nil {
		f.blocks = make(map[formerBlock]formerScope)
	}
	f.blocks[at] = formerScope{id, slot}
}

// drop removes the block of a slot, unless it has another slot now.
func (f *former) drop(s *scopes, slot int) {
	at := f.ring[slot]
	if b, ok := f.blocks[at]; ok && b.slot == slot {
		delete(f.blocks, at)
		s.release(b.id)
	}
}

// find returns the scope of a block.
func (f *former) find(rank uint32, hash uint64) (scopeID, bool) {
	b, ok := f.blocks[formerBlock{hash, rank}]
	return b.id, ok
}

// cleared records how many blocks of a rank one clear has forgotten.
func (f *former) cleared(rank uint32, blocks int) {
	if blocks > f.limit() {
		f.lose(rank)
	}
}

// lose records that blocks of a rank are not remembered.
func (f *former) lose(rank uint32) {
	if f.lost == nil {
		f.lost = make(map[uint32]int)
	}
	f.lost[rank] = f.limit()
}

// isLost reports whether a block of a rank may have been among those that are not remembered.
func (f *former) isLost(rank uint32) bool { return f.lost[rank] > 0 }

// used reports whether there are blocks, or some are lost.
func (f *former) used() bool { return len(f.ring) > 0 || len(f.lost) > 0 }

// clear forgets the blocks of a rank.
func (f *former) clear(s *scopes, rank uint32) {
	delete(f.lost, rank)
	for slot, at := range f.ring {
		if at.rank == rank {
			f.drop(s, slot)
		}
	}
	oldest := slices.Concat(f.ring[f.next:], f.ring[:f.next])
	kept := slices.DeleteFunc(oldest, func(at formerBlock) bool { return at.rank == rank })
	s.budget.Release(int64(scopedBlockCost * (len(f.ring) - len(kept))))
	f.ring, f.next = kept, 0
	for slot, at := range f.ring { // the last slot of a block is its own
		if b, ok := f.blocks[at]; ok {
			b.slot = slot
			f.blocks[at] = b
		}
	}
}

// makeRoom forgets all blocks, whose ranks are then lost.
func (f *former) makeRoom(s *scopes) {
	for _, at := range f.ring {
		f.lose(at.rank)
	}
	lost := f.lost
	f.close(s)
	f.lost = lost
}

// close forgets all blocks.
func (f *former) close(s *scopes) {
	for _, b := range f.blocks {
		s.release(b.id)
	}
	s.budget.Release(int64(scopedBlockCost * len(f.ring)))
	*f = former{max: f.max}
}

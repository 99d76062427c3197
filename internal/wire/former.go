package wire

import "slices"

const (
	// maxFormer is how many blocks that were forgotten are remembered.
	maxFormer = 1 << 13
	// copyBatches is how many batches of a dp rank follow at most before a block that was evicted or cleared is in a lower tier, or never will be:
	// vLLM publishes one for each step, and copies a block within a few.
	copyBatches = 32
)

// former are the scopes of the blocks that scopes have forgotten last. The zero value has none.
type former struct {
	blocks map[formerBlock]formerScope
	// ring has their keys, at the slots in blocks; others are of blocks that have been forgotten again since. Once it is full, the next takes the
	// place of the oldest, which is at next.
	ring []formerSlot
	next int
	// batches is the number of batches of each rank, and lost until which of them copies may be of blocks that are not remembered.
	batches, lost map[uint32]uint64
	// max is maxFormer if it is 0, and fewer in tests.
	max int
}

// formerBlock is a block of a rank.
type formerBlock struct {
	hash uint64
	rank uint32
}

// formerSlot has a block, and the batch of its rank by which it was forgotten.
type formerSlot struct {
	formerBlock
	batch uint64
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

// know makes sure that a rank has a number of batches.
func (f *former) know(rank uint32) {
	if f.batches == nil {
		f.batches, f.lost = make(map[uint32]uint64), make(map[uint32]uint64)
	}
	if _, ok := f.batches[rank]; !ok {
		f.batches[rank] = 0
	}
}

// begin begins a batch of a rank.
func (f *former) begin(rank uint32) {
	f.know(rank)
	f.batches[rank]++
	if f.lost[rank] < f.batches[rank] {
		delete(f.lost, rank)
	}
}

// add adds a block.
func (f *former) add(s *scopes, rank uint32, hash uint64, id scopeID) {
	f.know(rank)
	at, slot := formerSlot{formerBlock{hash, rank}, f.batches[rank]}, len(f.ring)
	s.retain(id)
	switch {
	case slot == f.limit():
		slot = f.next
		f.next = (f.next + 1) % len(f.ring)
		if oldest := f.ring[slot]; f.drop(s, slot) && f.isRecent(oldest) {
			f.lose(oldest.rank)
		}
		f.ring[slot] = at
	case s.budget.Reserve(scopedBlockCost):
		f.ring = append(f.ring, at)
	default: // there is no memory
		s.release(id)
		f.lose(rank)
		return
	}
	if before, ok := f.blocks[at.formerBlock]; ok {
		s.release(before.id)
	}
	if f.blocks == nil {
		f.blocks = make(map[formerBlock]formerScope)
	}
	f.blocks[at.formerBlock] = formerScope{id, slot}
}

// isRecent reports whether the engine may still announce a copy of the block of a slot.
func (f *former) isRecent(at formerSlot) bool { return f.batches[at.rank]-at.batch <= copyBatches }

// drop removes the block of a slot, and returns false if it has another slot now.
func (f *former) drop(s *scopes, slot int) bool {
	at := f.ring[slot].formerBlock
	b, ok := f.blocks[at]
	if !ok || b.slot != slot {
		return false
	}
	delete(f.blocks, at)
	s.release(b.id)
	return true
}

// find returns the scope of a block.
func (f *former) find(rank uint32, hash uint64) (scopeID, bool) {
	b, ok := f.blocks[formerBlock{hash, rank}]
	return b.id, ok
}

// lose records that blocks of a rank are not remembered that may still be copied.
func (f *former) lose(rank uint32) {
	f.know(rank)
	f.lost[rank] = f.batches[rank] + copyBatches
}

// isLost reports whether a copy in a rank may be of a block that is not remembered.
func (f *former) isLost(rank uint32) bool {
	_, ok := f.lost[rank]
	return ok
}

// isNeeded reports whether a copy in a rank may be of a block that was forgotten, whether it is remembered or not.
func (f *former) isNeeded(rank uint32) bool {
	if f.isLost(rank) {
		return true
	}
	for i := range f.ring { // from the newest on
		if at := f.ring[(f.next-1-i+2*len(f.ring))%len(f.ring)]; at.rank == rank {
			return f.isRecent(at)
		}
	}
	return false
}

// used reports whether there are blocks, or some are lost.
func (f *former) used() bool { return len(f.ring) > 0 || len(f.lost) > 0 }

// clear forgets the blocks of a rank.
func (f *former) clear(s *scopes, rank uint32) {
	delete(f.lost, rank)
	delete(f.batches, rank)
	for slot, at := range f.ring {
		if at.rank == rank {
			f.drop(s, slot)
		}
	}
	oldest := slices.Concat(f.ring[f.next:], f.ring[:f.next])
	kept := slices.DeleteFunc(oldest, func(at formerSlot) bool { return at.rank == rank })
	s.budget.Release(int64(scopedBlockCost * (len(f.ring) - len(kept))))
	f.ring, f.next = kept, 0
	for slot, at := range f.ring { // the last slot of a block is its own
		if b, ok := f.blocks[at.formerBlock]; ok {
			b.slot = slot
			f.blocks[at.formerBlock] = b
		}
	}
}

// makeRoom forgets all blocks.
func (f *former) makeRoom(s *scopes) {
	for _, at := range f.ring {
		if f.isRecent(at) {
			f.lose(at.rank)
		}
	}
	batches, lost := f.batches, f.lost
	f.close(s)
	f.batches, f.lost = batches, lost
}

// close forgets all blocks.
func (f *former) close(s *scopes) {
	for _, b := range f.blocks {
		s.release(b.id)
	}
	s.budget.Release(int64(scopedBlockCost * len(f.ring)))
	*f = former{max: f.max}
}

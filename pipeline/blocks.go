package pipeline

import "github.com/kvcast/kvcast/internal/hashtable"

// blocks are the blocks of a table by block hash, in at most 40 bytes each. A gap makes all blocks
// stale until they are stored again, since the engine may have evicted them. Each block has the
// generation in which it was last stored. A gap begins the next generation, and visits no block.
type blocks struct {
	table hashtable.Table[block, struct{}]

	generation uint32
	stale      int // number of stale blocks
	// No block is stale whose Slot.Cursor is below staleFrom. The search for a stale block
	// continues at the index staleSlot of the segment of that cursor.
	staleFrom uint64
	staleSlot int
}

type (
	slot    = hashtable.Slot[block]
	segment = hashtable.Segment[block, struct{}]
)

// block is a block's record, without the block hash. It has no pointers, so that the garbage
// collector does not scan the table.
type block struct {
	parent uint64
	attr   uint32 // slot in the table's attributes
	flags  blockFlags
}

// blockFlags has flags in the low bits, and the block's generation above them.
type blockFlags uint32

const (
	flagParent blockFlags = 1 << iota
	// flagCopies is set if the block may be in table.copies.
	flagCopies

	// childrenShift is the position of the number of children, generationShift of the generation.
	childrenShift   = iota
	generationShift = childrenShift + 2
	// maxGeneration is the largest generation that fits beside the flags.
	maxGeneration = 1<<(32-generationShift) - 1
)

func newBlocks() blocks { return blocks{table: hashtable.New[block, struct{}]()} }

func (t *blocks) len() int { return t.table.Len() }

// find returns the slot of a block, valid until the next put or delete; nil if there is none.
func (t *blocks) find(hash uint64) *slot {
	s, i, ok := t.table.Find(hash)
	if !ok {
		return nil
	}
	return &s.Slots[i]
}

// put returns the slot of a block, valid until the next put or delete, and whether the block
// existed. A new block has only its generation. An existing block is no longer stale.
func (t *blocks) put(hash uint64) (b *slot, existed bool) {
	s, i, existed := t.table.Put(hash)
	b = &s.Slots[i]
	switch {
	case !existed:
		b.Value.flags = t.currentGeneration()
		if uint32(s.Note>>32) != t.generation+1 {
			t.countStale(s, s.Len()-1)
		}
	case t.isStale(b):
		t.refresh(s, i)
	}
	return b, existed
}

// deleteAt removes a block.
func (t *blocks) deleteAt(s *segment, i int) {
	if t.isStale(&s.Slots[i]) {
		t.refresh(s, i)
	}
	t.table.Delete(s, i)
}

// currentGeneration returns the generation as block flags.
func (t *blocks) currentGeneration() blockFlags { return blockFlags(t.generation << generationShift) }

// isStale reports whether a block was last stored before the last gap.
func (t *blocks) isStale(b *slot) bool { return uint32(b.Value.flags)>>generationShift != t.generation }

// gap makes every block stale. After maxGeneration gaps it returns false, and does nothing.
func (t *blocks) gap() bool {
	if t.generation == maxGeneration {
		return false
	}
	t.generation++
	t.stale, t.staleFrom, t.staleSlot = t.len(), 0, 0
	return true
}

// refresh moves a stale block to the current generation. It is rarely called, and inlining it would
// slow down put.
//
//go:noinline
func (t *blocks) refresh(s *segment, i int) {
	t.countStale(s, s.Len())
	b := &s.Slots[i].Value
	b.flags = b.flags&(1<<generationShift-1) | t.currentGeneration()
	s.Note--
	t.stale--
}

// countStale sets a segment's note, unless it was set since the last gap: the generation plus one in
// the high 32 bits, and the number of stale blocks in the low 32 bits. unchanged is the number of
// the segment's blocks that were stored before the last gap, which are all stale; they are counted
// one by one only if the segment has no note, since it was split.
func (t *blocks) countStale(s *segment, unchanged int) {
	switch s.Note >> 32 {
	case uint64(t.generation) + 1:
		return
	case 0:
		unchanged = 0
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && t.isStale(b) {
				unchanged++
			}
		}
	}
	s.Note = (uint64(t.generation)+1)<<32 | uint64(unchanged)
}

// nextStale returns the segment and slot index of a stale block; there must be one. Between two
// gaps, all searches together visit each segment without stale blocks once.
func (t *blocks) nextStale() (s *segment, i int) {
	for {
		s, next := t.table.SegmentAt(t.staleFrom)
		if t.countStale(s, s.Len()); uint32(s.Note) == 0 {
			t.staleFrom, t.staleSlot = next, 0
			continue
		}
		// The search wraps around, since blocks may have moved within the segment since
		// staleSlot was set.
		for i = t.staleSlot; ; i++ {
			if i >= len(s.Slots) {
				i = 0
			}
			if b := &s.Slots[i]; b.Used() && t.isStale(b) {
				t.staleSlot = i
				return s, i
			}
		}
	}
}

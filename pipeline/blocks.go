package pipeline

import "github.com/kvcast/kvcast/internal/core/hashtable"

// blocks are the blocks of a table by block hash, in at most 40 bytes each. A gap makes all blocks
// stale until they are stored again, since the engine may have evicted them. Each block has the
// generation in which it was last stored. A gap begins the next generation, and visits no block.
type blocks struct {
	table hashtable.Table[block]

	generation uint32
	stale      int // number of stale blocks
	// groups divide the blocks by the first bits of Slot.Cursor.
	groups [1 << groupBits]group
	// No block is stale whose Slot.Cursor is below staleFrom. The search for a stale block
	// continues at the index staleSlot of the segment of that cursor.
	staleFrom uint64
	staleSlot int
}

// group is a part of a table. Without groups, the search for the last stale block of a table would visit all segments.
type group struct {
	blocks uint32
	stale  uint32 // number of stale blocks in that generation; later, all blocks are stale
	// generation is that of the last change of the group.
	generation uint32
}

const groupBits = 6

type slot = hashtable.Slot[block]

// block is a block's record, without the block hash. It has no pointers, so that the garbage collector does not scan the table.
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
	// flagRecent is set when the block is stored, and cleared when a search for old blocks visits it.
	flagRecent
	// flagInputs is set if the block may have inputs beside its tokens, adapter and salt, and flagSalted if it has a salt. They are not stored: blocks
	// that are restored have them.
	flagInputs
	flagSalted

	// childrenShift is the position of the number of children, generationShift of the generation.
	childrenShift   = iota
	generationShift = childrenShift + 2
	// maxGeneration is the largest generation that fits beside the flags.
	maxGeneration = 1<<(32-generationShift) - 1
)

// put returns the slot of a block, valid until the next put or delete, and whether the block
// existed. A new block has only its generation. An existing block is no longer stale.
func (t *blocks) put(hash uint64) (b *slot, existed bool) {
	b, existed = t.table.Put(hash)
	switch {
	case !existed:
		b.Value.flags = t.currentGeneration() | flagRecent
		t.group(b.Cursor()).blocks++
	case t.isStale(b):
		t.refresh(b)
	}
	return b, existed
}

// delete removes a block.
func (t *blocks) delete(b *slot) {
	g := t.group(b.Cursor())
	g.blocks--
	if t.isStale(b) {
		g.stale--
		t.stale--
	}
	t.table.Delete(b)
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
	t.stale, t.staleFrom, t.staleSlot = t.table.Len(), 0, 0
	return true
}

// refresh moves a stale block to the current generation. It is rarely called, and inlining it would slow down put.
//
//go:noinline
func (t *blocks) refresh(b *slot) {
	b.Value.flags = b.Value.flags&(1<<generationShift-1) | t.currentGeneration()
	t.group(b.Cursor()).stale--
	t.stale--
}

// group returns the group of a cursor, with the number of its stale blocks: all, if the group has not changed since the last gap.
func (t *blocks) group(cursor uint64) *group {
	g := &t.groups[cursor>>(64-groupBits)]
	if g.generation != t.generation {
		g.generation, g.stale = t.generation, g.blocks
	}
	return g
}

// nextStale returns the slot of a stale block; there must be one. Between two
// gaps, all searches together visit each group without stale blocks and each segment once.
func (t *blocks) nextStale() *slot {
	for {
		if t.group(t.staleFrom).stale == 0 {
			t.staleFrom, t.staleSlot = (t.staleFrom>>(64-groupBits)+1)<<(64-groupBits), 0
			continue
		}
		s, next := t.table.SegmentAt(t.staleFrom)
		// The search wraps around, since blocks may have moved since staleSlot was set.
		for n := range s.Len() {
			i := (t.staleSlot + n) % s.Len()
			if b := s.At(i); b != nil && t.isStale(b) {
				t.staleSlot = i
				return b
			}
		}
		t.staleFrom, t.staleSlot = next, 0
	}
}

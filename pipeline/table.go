package pipeline

import (
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// table has the blocks of one worker, dp rank and tier, with the number of the engine's copies of each, and with their attributes.
type table struct {
	blocks blocks
	// copies are the counts of the few blocks with more than one copy.
	copies   map[uint64]copies.Count
	children childCounts
	attrs    attribute.Interner
	// evictFrom is the cursor at which the search for old blocks continues.
	evictFrom uint64
	// deleted are the flags of the block that remove has deleted, with flagRecent; 0 if it has deleted none.
	deleted blockFlags
}

func newTable(bytes *budget.Budget) *table {
	return &table{blocks: blocks{table: hashtable.New[block]()}, copies: make(map[uint64]copies.Count), attrs: attribute.NewInterner(bytes)}
}

// acquireAttributes returns the slot of a run's attributes, which the caller must release. ok is
// false if the budget of attributes is exhausted.
func (t *table) acquireAttributes(r *run) (slot uint32, ok bool) {
	return t.attrs.Acquire(attribute.Set{LoRA: r.key.lora, BlockSize: r.key.blockSize})
}

// storeRun stores each block of a run with the attributes in a slot.
func (t *table) storeRun(r *run, slot uint32) {
	b := block{parent: r.parent, attr: slot, flags: t.blocks.currentGeneration() | flagRecent}
	if r.hasParent {
		b.flags |= flagParent
	}
	if r.inputs {
		b.flags |= flagInputs
	}
	if r.key.salt != "" {
		b.flags |= flagSalted
	}
	for i, hash := range r.hashes {
		if s, existed := t.blocks.put(hash); existed {
			t.storeAgain(s, &b, r.op(i), r.key.hashed)
		} else {
			t.add(s, &b)
		}
		b.parent = hash
		b.flags |= flagParent
	}
}

// add sets the record of a new block.
func (t *table) add(s *slot, b *block) {
	t.attrs.Use(b.attr, 1)
	s.Value = *b
	if t.children.counting {
		t.adoptChildren(s)
		t.addToParent(s)
	}
}

// storeAgain stores a block that the table has. op is the effect on its copies. A store with a tokens
// hash (hashed) replaces the block's parent and attributes; a store without one only adds a copy.
func (t *table) storeAgain(s *slot, b *block, op copies.Op, hashed bool) {
	s.Value.flags |= flagRecent
	if op != copies.AddNothing {
		hash := s.Key()
		c := t.copies[hash]
		c.Stored(op)
		t.copies[hash] = c
		s.Value.flags |= flagCopies
	}
	if hashed {
		t.attrs.Use(b.attr, 1)
		t.attrs.Release(s.Value.attr) // after Use, since it may be the same slot
		moved := t.children.counting && (b.parent != s.Value.parent || (b.flags^s.Value.flags)&flagParent != 0)
		if moved {
			t.removeFromParent(s)
		}
		kept := s.Value.flags & (flagCopies | flagChildren)
		s.Value = *b
		s.Value.flags |= kept
		if moved {
			t.addToParent(s)
		}
	}
}

// remove applies a remove of a block, and reports whether to emit it: whether no copy is left. An unknown block has none, since a router
// may have the block, unless the engine reports remaining copies.
func (t *table) remove(hash uint64, op copies.Op) (gone bool) {
	t.deleted = 0
	b := t.blocks.table.Find(hash)
	if b == nil {
		return op <= copies.RemoveDownTo || op == copies.RemoveCopy
	}
	leaves := op > copies.RemoveDownTo && op != copies.RemoveCopy
	if b.Value.flags&flagCopies != 0 || leaves {
		c := t.copies[hash] // zero if a gap dropped it
		gone = c.Removed(op, b.Value.flags&flagChildren != 0)
		if gone || c == (copies.Count{}) {
			delete(t.copies, hash)
		} else {
			t.copies[hash] = c
			b.Value.flags |= flagCopies
		}
		if !gone {
			if leaves && t.blocks.isStale(b) {
				t.blocks.refresh(b) // the engine has the block, so it is not stale
			}
			return false
		}
	}
	t.delete(b)
	return true
}

// delete removes the block of a slot.
func (t *table) delete(b *slot) {
	t.deleted = b.Value.flags | flagRecent
	if t.children.counting {
		t.removeFromParent(b)
		t.keepChildCount(b)
	}
	t.attrs.Release(b.Value.attr)
	t.blocks.delete(b)
}

// gap makes every block stale, with one copy, since removes of other copies may have been lost. It
// visits no block. It returns false after maxGeneration gaps.
func (t *table) gap() bool {
	if len(t.copies) > 0 {
		t.copies = make(map[uint64]copies.Count) // faster than clearing a large map
	}
	return t.blocks.gap()
}

// expire removes n stale blocks, or all if there are fewer, and appends their hashes to removed.
func (t *table) expire(n int, removed []uint64) []uint64 {
	for range min(n, t.blocks.stale) {
		b := t.blocks.nextStale()
		removed = append(removed, b.Key())
		t.delete(b) // the gap dropped its count in copies
	}
	return removed
}

// has reports whether there is a block. A nil table has none.
func (t *table) has(hash uint64) bool { return t != nil && t.blocks.table.Find(hash) != nil }

// childCounts counts the children of blocks in a table. It counts nothing before countChildren is first called, which is for engines that
// announce blocks; see package copies. The flags of a block have its count up to two, which is faster than a map.
type childCounts struct {
	// counting reports whether there are any counts.
	counting bool
	// The children whose Slot.Cursor is below upTo are counted; all of them if complete is set.
	upTo     uint64
	complete bool
	// many are the counts above two, and the counts of blocks that the table does not have.
	many map[uint64]uint32
}

const (
	// flagChildren are the bits of the count; if all are set, many has the count.
	flagChildren blockFlags = 3 << childrenShift
	oneChild     blockFlags = 1 << childrenShift
)

// countSegments is the number of segments that countChildren counts, in some tenths of a millisecond.
const countSegments = 64

// countChildren starts or continues counting children, and reports whether all are counted.
func (t *table) countChildren() bool {
	c := &t.children
	if !c.counting {
		*c = childCounts{counting: true, many: make(map[uint64]uint32)}
	}
	for range countSegments {
		if c.complete {
			break
		}
		s, next := t.blocks.table.SegmentAt(c.upTo)
		for i := range s.Len() {
			if b := s.At(i); b != nil && b.Value.flags&flagParent != 0 && b.Cursor() >= c.upTo {
				t.addChild(b.Value.parent)
			}
		}
		c.upTo = next
		c.complete = next == 0
	}
	return c.complete
}

// counts reports whether a block is counted as a child.
func (c *childCounts) counts(b *slot) bool {
	return c.counting && b.Value.flags&flagParent != 0 && (c.complete || b.Cursor() < c.upTo)
}

// addToParent counts a block as a child of its parent.
func (t *table) addToParent(b *slot) {
	if t.children.counts(b) {
		t.addChild(b.Value.parent)
	}
}

// removeFromParent stops counting a block as a child of its parent.
func (t *table) removeFromParent(b *slot) {
	if t.children.counts(b) {
		t.dropChild(b.Value.parent)
	}
}

// addChild counts one more child of a block, which the table need not have.
func (t *table) addChild(parent uint64) {
	b := t.blocks.table.Find(parent)
	if b == nil {
		t.children.many[parent]++
		return
	}
	switch b.Value.flags & flagChildren {
	case flagChildren:
		t.children.many[parent]++
	case 2 * oneChild:
		t.children.many[parent] = 3
		b.Value.flags |= flagChildren
	default:
		b.Value.flags += oneChild
	}
}

// dropChild counts one child less of a block.
func (t *table) dropChild(parent uint64) {
	b := t.blocks.table.Find(parent)
	if b != nil && b.Value.flags&flagChildren != flagChildren {
		b.Value.flags -= oneChild
		return
	}
	n := t.children.many[parent] - 1
	switch {
	case b != nil && n == 2:
		b.Value.flags -= oneChild
		delete(t.children.many, parent)
	case n == 0:
		delete(t.children.many, parent)
	default:
		t.children.many[parent] = n
	}
}

// adoptChildren moves the count of a new block's children from many to its flags.
func (t *table) adoptChildren(b *slot) {
	switch n := t.children.many[b.Key()]; n {
	case 0:
	case 1, 2:
		b.Value.flags |= blockFlags(n) * oneChild
		delete(t.children.many, b.Key())
	default:
		b.Value.flags |= flagChildren
	}
}

// keepChildCount moves the count of a block to many before the block is removed.
func (t *table) keepChildCount(b *slot) {
	if n := b.Value.flags & flagChildren; n != 0 && n != flagChildren {
		t.children.many[b.Key()] = uint32(n / oneChild)
	}
}

package pipeline

import "github.com/kvcast/kvcast/internal/budget"

// table holds the blocks of one worker, dp rank and tier: how many copies the
// engine has of each, and what a snapshot says of them.
type table struct {
	blocks blocks
	// copies are the counts of blocks that have more than a first copy: few.
	copies   map[uint64]copyCount
	children childCounts
	attrs    attributes
}

// block is a slot of the table. It holds no pointer, so that the garbage
// collector need not look into the table.
type block struct {
	hash       uint64
	parent     uint64
	tokensHash uint64
	attr       uint32 // slot in the table's attributes
	flags      blockFlags
}

// blockFlags are some flags, and above them the block's generation.
type blockFlags uint32

const (
	// flagHeld tells a block from an empty slot.
	flagHeld blockFlags = 1 << iota
	flagParent
	flagTokensHash
	// flagCopies says that the block may be in copies.
	flagCopies
	// flagTold is for a copy of the table that is being told to somebody.
	flagTold

	// childrenShift is where the number of children stands, see childCounts, and
	// generationShift is the number of all these bits.
	childrenShift   = iota
	generationShift = childrenShift + 2
)

func newTable(bytes *budget.Budget) *table {
	return &table{blocks: newBlocks(), copies: make(map[uint64]copyCount), attrs: attributes{bytes: bytes}}
}

// reserve returns a slot for what the blocks of a run have in common, which stays
// until it is released. ok is false where there is no memory for it.
func (t *table) reserve(r *run) (slot uint32, ok bool) {
	if slot, ok = t.attrs.slot(attr{lora: r.key.lora, blockSize: r.key.blockSize}); ok {
		t.attrs.use(slot)
	}
	return slot, ok
}

// storeRun stores each block of a run, for which slot was reserved.
func (t *table) storeRun(r *run, slot uint32) {
	b := block{
		parent: r.parent,
		attr:   slot,
		flags:  flagHeld | t.blocks.age.mark(),
	}
	if r.hasParent {
		b.flags |= flagParent
	}
	if r.key.hashed {
		b.flags |= flagTokensHash
	}
	for i, hash := range r.hashes {
		b.hash = hash
		if r.key.hashed {
			b.tokensHash = r.tokensHashes[i]
		}
		t.store(&b, r.op(i))
		b.parent = hash
		b.flags |= flagParent
	}
}

// store stores a block, and counts it by an operation where it is held. It is small
// enough to be inlined.
func (t *table) store(b *block, op copyOp) {
	slot, held := t.blocks.put(b.hash)
	if held {
		t.storeAgain(slot, b, op)
		return
	}
	t.attrs.use(b.attr)
	*slot = *b
	if t.children.counting {
		t.enter(slot)
	}
}

// storeAgain stores a block that is held. What the newest store says of a block holds,
// but a store without tokens does not take away what is known of them.
func (t *table) storeAgain(slot, b *block, op copyOp) {
	if op != addNothing {
		c := t.copies[b.hash]
		c.stored(op)
		t.copies[b.hash] = c
		slot.flags |= flagCopies
	}
	if b.flags&flagTokensHash != 0 {
		t.attrs.use(b.attr)
		t.attrs.release(slot.attr) // last, since it may be the same
		moved := t.children.counting && (b.parent != slot.parent || (b.flags^slot.flags)&flagParent != 0)
		if moved {
			t.part(slot)
		}
		kept := slot.flags & (flagCopies | flagChildren)
		*slot = *b
		slot.flags |= kept
		if moved {
			t.join(slot)
		}
	}
}

// enter gives a block that has just come its children, and its parent it; leave takes
// them away from one that goes.
func (t *table) enter(b *block) {
	t.adoptChildren(b)
	t.join(b)
}

func (t *table) leave(b *block) {
	t.part(b)
	t.orphanChildren(b)
}

// join counts a block as a child of its parent, part does so no longer.
func (t *table) join(b *block) {
	if t.children.counts(b) {
		t.addChild(b.parent)
	}
}

func (t *table) part(b *block) {
	if t.children.counts(b) {
		t.dropChild(b.parent)
	}
}

// remove counts a remove of a block by an operation, and reports whether the block is
// gone. A block that is not held counts as gone, unless the engine says that it has
// copies left: the engine is right, and a router may hold it.
func (t *table) remove(hash uint64, op copyOp) (gone bool) {
	s, i, held := t.blocks.find(hash)
	if !held {
		return op <= takeDownTo
	}
	b := &s.slots[i]
	if b.flags&flagCopies != 0 || op > takeDownTo {
		c := t.copies[hash] // none if they were removed, or there was a gap
		gone = c.removed(op, b.flags&flagChildren != 0)
		if gone || c == (copyCount{}) {
			delete(t.copies, hash)
		} else {
			t.copies[hash] = c
			b.flags |= flagCopies
		}
		if !gone {
			if op > takeDownTo && t.blocks.age.stale(b) {
				t.blocks.refresh(s, i) // the engine says that it holds the block
			}
			return false
		}
	}
	t.take(s, i)
	return true
}

// take takes out a block that is held.
func (t *table) take(s *segment, i int) {
	b := &s.slots[i]
	if t.blocks.age.stale(b) {
		t.blocks.refresh(s, i)
	}
	if t.children.counting {
		t.leave(b)
	}
	t.attrs.release(b.attr)
	t.blocks.delete(s, i)
}

// gap makes every block stale, with its first copy alone: a remove of it may have
// been lost, and must not pin it for good. It does not look at the blocks; their
// children are as they were. It is false where there have been more gaps than a table
// can number.
func (t *table) gap() bool {
	if len(t.copies) > 0 {
		t.copies = make(map[uint64]copyCount) // quicker than to clear a large one
	}
	return t.blocks.gap()
}

// expire takes away n stale blocks, or all if there are fewer, and appends them
// to gone.
func (t *table) expire(n int, gone []uint64) []uint64 {
	for range min(n, t.blocks.age.blocks) {
		s, i := t.blocks.nextStale()
		gone = append(gone, s.slots[i].hash)
		t.take(s, i) // it has no further copies: those before the gap are forgotten
	}
	return gone
}

func (t *table) holds(hash uint64) bool {
	_, _, held := t.blocks.find(hash)
	return held
}

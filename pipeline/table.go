package pipeline

import (
	"unsafe"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/hashtable"
	"github.com/kvcast/kvcast/pipeline/attribute"
	"github.com/kvcast/kvcast/pipeline/copies"
)

// table has the blocks of one worker, dp rank and tier, with the number of the engine's copies of
// each, and with their attributes for snapshots.
type table struct {
	blocks blocks
	// copies are the counts of the few blocks with more than one copy.
	copies   map[uint64]copies.Count
	children childCounts
	attrs    attribute.Interner
}

func newTable(bytes *budget.Budget) *table {
	return &table{blocks: newBlocks(), copies: make(map[uint64]copies.Count), attrs: attribute.NewInterner(bytes)}
}

// acquireAttributes returns the slot of a run's attributes, which the caller must release. ok is
// false if the budget of attributes is exhausted.
func (t *table) acquireAttributes(r *run) (slot uint32, ok bool) {
	return t.attrs.Acquire(attribute.Set{LoRA: r.key.lora, BlockSize: r.key.blockSize})
}

// storeRun stores each block of a run with the attributes in a slot.
func (t *table) storeRun(r *run, slot uint32) {
	b := block{parent: r.parent, attr: slot, flags: t.blocks.currentGeneration()}
	if r.hasParent {
		b.flags |= flagParent
	}
	if r.key.hashed {
		b.flags |= flagTokensHash
	}
	for i, hash := range r.hashes {
		if r.key.hashed {
			b.tokensHash = r.tokensHashes[i]
		}
		t.store(hash, &b, r.op(i))
		b.parent = hash
		b.flags |= flagParent
	}
}

// store stores a block. If the table has the block, op is the effect on its copies.
func (t *table) store(hash uint64, b *block, op copies.Op) {
	s, existed := t.blocks.put(hash)
	if existed {
		t.storeAgain(s, b, op)
		return
	}
	t.attrs.Use(b.attr)
	s.Value = *b
	t.children.addToParent(s)
}

// storeAgain stores a block that the table has. A store with a tokens hash replaces the block's
// parent and attributes; a store without one only adds a copy.
func (t *table) storeAgain(s *slot, b *block, op copies.Op) {
	if op != copies.AddNothing {
		hash := s.Key()
		c := t.copies[hash]
		c.Stored(op)
		t.copies[hash] = c
		s.Value.flags |= flagCopies
	}
	if b.flags&flagTokensHash != 0 {
		t.attrs.Use(b.attr)
		t.attrs.Release(s.Value.attr) // after Use, since it may be the same slot
		moved := b.parent != s.Value.parent || (b.flags^s.Value.flags)&flagParent != 0
		if moved {
			t.children.removeFromParent(s)
		}
		kept := s.Value.flags & flagCopies
		s.Value = *b
		s.Value.flags |= kept
		if moved {
			t.children.addToParent(s)
		}
	}
}

// remove applies a remove of a block, and reports whether to emit it: whether no copy is left. An
// unknown block has none, since a router may have the block, unless the engine reports remaining
// copies.
func (t *table) remove(hash uint64, op copies.Op) (gone bool) {
	s, i, ok := t.blocks.table.Find(hash)
	if !ok {
		return op <= copies.RemoveDownTo
	}
	b := &s.Slots[i]
	if b.Value.flags&flagCopies != 0 || op > copies.RemoveDownTo {
		c := t.copies[hash] // zero if a gap dropped it
		gone = c.Removed(op, t.children.Children[hash] > 0)
		if gone || c == (copies.Count{}) {
			delete(t.copies, hash)
		} else {
			t.copies[hash] = c
			b.Value.flags |= flagCopies
		}
		if !gone {
			if op > copies.RemoveDownTo && t.blocks.isStale(b) {
				t.blocks.refresh(s, i) // the engine has the block, so it is not stale
			}
			return false
		}
	}
	t.delete(s, i)
	return true
}

// delete removes the block of a slot.
func (t *table) delete(s *segment, i int) {
	b := &s.Slots[i]
	t.children.removeFromParent(b)
	t.attrs.Release(b.Value.attr)
	t.blocks.deleteAt(s, i)
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
		s, i := t.blocks.nextStale()
		removed = append(removed, s.Slots[i].Key())
		t.delete(s, i) // the gap dropped its count in copies
	}
	return removed
}

func (t *table) has(hash uint64) bool { return t.blocks.find(hash) != nil }

// childCounts counts the children of blocks in a table. It counts nothing before countChildren is
// first called, which is for engines that announce blocks; see package copies.
type childCounts struct {
	copies.Children
	// The children whose Slot.Hash is below upTo, where a segment begins, are counted; all of
	// them if complete is set.
	upTo     uint64
	complete bool
}

// countSegments is the number of segments that countChildren counts, in some tenths of a
// millisecond.
const countSegments = 4

// countChildren starts or continues counting children, and reports whether all are counted.
func (t *table) countChildren() bool {
	c := &t.children
	if c.Children == nil {
		c.Children = make(copies.Children)
	}
	for range countSegments {
		if c.complete {
			break
		}
		s, next := t.blocks.table.SegmentAt(c.upTo)
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && b.Value.flags&flagParent != 0 {
				c.Add(b.Value.parent)
			}
		}
		c.upTo = next
		c.complete = next == 0
	}
	return c.complete
}

// counts reports whether a block is counted as a child.
func (c *childCounts) counts(b *slot) bool {
	return c.Children != nil && b.Value.flags&flagParent != 0 && (c.complete || b.Hash() < c.upTo)
}

// addToParent counts a block as a child.
func (c *childCounts) addToParent(b *slot) {
	if c.counts(b) {
		c.Add(b.Value.parent)
	}
}

// removeFromParent stops counting a block as a child.
func (c *childCounts) removeFromParent(b *slot) {
	if c.counts(b) {
		c.Remove(b.Value.parent)
	}
}

// blocks are the blocks of a table by block hash, in 43 to 53 bytes each. A gap makes all blocks
// stale until they are stored again, since the engine may have evicted them. Each block has the
// generation in which it was last stored. A gap begins the next generation, and visits no block.
type blocks struct {
	table hashtable.Table[block, struct{}]
	// digest is the XOR of splitmix64 over the hashes of all blocks.
	digest uint64

	generation uint32
	stale      int // number of stale blocks
	// No block is stale whose Slot.Hash is below staleFrom, where a segment begins. The
	// search for a stale block continues at the index staleSlot of that segment.
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
	parent     uint64
	tokensHash uint64
	attr       uint32 // slot in the table's attributes
	flags      blockFlags
}

// maxSegment is the number of slots of a full segment.
const maxSegment = hashtable.SegmentBytes / int(unsafe.Sizeof(slot{}))

// blockFlags has flags in the low bits, and the block's generation above them.
type blockFlags uint32

const (
	flagParent blockFlags = 1 << iota
	flagTokensHash
	// flagCopies is set if the block may be in table.copies.
	flagCopies
	// flagEncoded is used in copies of a table: a snapshot's event has the block.
	flagEncoded

	// generationShift is the number of flags.
	generationShift = iota
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
		t.digest ^= wire.BlockDigest(hash)
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
	t.digest ^= wire.BlockDigest(s.Slots[i].Key())
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

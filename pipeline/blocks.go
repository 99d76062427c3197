package pipeline

import (
	"unsafe"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/hashtable"
)

// blocks are the blocks of a table by block hash. A gap makes all of them stale until
// they are stored again: the engine may have evicted them unnoticed. A block has the
// generation in which it was last stored, and a gap begins the next one, so that it need
// not visit any block. A block takes 43 to 53 bytes.
type blocks struct {
	table hashtable.Table[block, struct{}]
	// digest is the XOR of splitmix64 over the hashes of all blocks.
	digest uint64

	generation uint32
	// stale is the number of stale blocks.
	stale int
	// No block is stale whose Slot.Hash is below staleFrom, where a segment begins.
	// staleSlot is where in that segment the search continues.
	staleFrom uint64
	staleSlot int
}

type (
	slot    = hashtable.Slot[block]
	segment = hashtable.Segment[block, struct{}]
)

// block is a block's record, without its hash. It has no pointer, so that the garbage
// collector does not scan the table.
type block struct {
	parent     uint64
	tokensHash uint64
	attr       uint32 // slot in the table's attributes
	flags      blockFlags
}

// maxSegment is the number of slots of a full segment.
const maxSegment = hashtable.SegmentBytes / int(unsafe.Sizeof(slot{}))

// blockFlags are flags in the low bits and the block's generation above them.
type blockFlags uint32

const (
	flagParent blockFlags = 1 << iota
	flagTokensHash
	// flagCopies is set if the block may be in table.copies.
	flagCopies
	// flagEncoded is set in a copy of the table: the block is in a snapshot's event.
	flagEncoded

	// childrenShift is where the number of children begins, see childCounts, and
	// generationShift is the number of all these bits.
	childrenShift   = iota
	generationShift = childrenShift + 2

	// maxGeneration is the last that the bits beside the flags can hold.
	maxGeneration = 1<<(32-generationShift) - 1
)

func newBlocks() blocks { return blocks{table: hashtable.New[block, struct{}]()} }

func (t *blocks) len() int { return t.table.Len() }

// find returns the slot of a block, valid until the next put or delete; nil where there
// is none.
func (t *blocks) find(hash uint64) *slot {
	s, i, ok := t.table.Find(hash)
	if !ok {
		return nil
	}
	return &s.Slots[i]
}

// put returns the slot of a block, valid until the next put or delete, and whether it
// existed. A new one has only its generation. The block is no longer stale.
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

// currentGeneration returns the generation as a block has it.
func (t *blocks) currentGeneration() blockFlags { return blockFlags(t.generation << generationShift) }

// isStale reports whether a block was last stored before the last gap.
func (t *blocks) isStale(b *slot) bool { return uint32(b.Value.flags)>>generationShift != t.generation }

// gap makes every block stale. It returns false, and does nothing, where there is no
// further generation.
func (t *blocks) gap() bool {
	if t.generation == maxGeneration {
		return false
	}
	t.generation++
	t.stale, t.staleFrom, t.staleSlot = t.len(), 0, 0
	return true
}

// refresh marks a stale block as stored in the current generation. It is rarely needed, and
// inlining it would slow down put.
//
//go:noinline
func (t *blocks) refresh(s *segment, i int) {
	t.countStale(s, s.Len())
	b := &s.Slots[i].Value
	b.flags = b.flags&(1<<generationShift-1) | t.currentGeneration()
	s.Note--
	t.stale--
}

// countStale updates a segment's note for the current generation: the generation plus one,
// and in the low 32 bits how many of its blocks are stale. A gap does not visit segments:
// what was in one that has not changed since is stale, unless it was split.
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

// nextStale returns where a stale block is; there must be one. All searches between two
// gaps skip each segment without stale blocks once.
func (t *blocks) nextStale() (s *segment, i int) {
	for {
		s, next := t.table.SegmentAt(t.staleFrom)
		if t.countStale(s, s.Len()); uint32(s.Note) == 0 {
			t.staleFrom, t.staleSlot = next, 0
			continue
		}
		// Blocks may have moved within the segment since staleSlot was set, so the search
		// is cyclic.
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

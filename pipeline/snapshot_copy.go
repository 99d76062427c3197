package pipeline

import (
	"context"
	"sync"
	"unsafe"

	"github.com/kvcast/kvcast/internal/hashtable"
	"github.com/kvcast/kvcast/pipeline/attribute"
)

// tableCopy is a copy of a table for ordering its blocks. A block is identified by its
// number.
type tableCopy struct {
	chunks   []*chunk
	slots    int // that are in use
	segments []copiedSegment
	// dir has the segment of each value of the first depth bits of a mixed hash.
	dir   []uint32
	depth uint
	// attrs are those of its blocks, which have their numbers here: the table's slots
	// are used again.
	attrs []attribute.Set
	known map[attribute.Set]uint32
}

// copiedSegment is the part of a copy that was a segment of the table.
type copiedSegment struct {
	first, slots uint32
	depth        uint
}

// The flags of a copied block have, in place of the generation, whether the parent is
// linked, and by which ancestry the block is encoded.
const (
	// flagLinked is set if the field parent is the number of a block of the copy.
	flagLinked    blockFlags = 1 << (generationShift + iota)
	ancestryShift            = generationShift + 1
)

// chunk is some slots of a copy: as many as one scan step copies at most.
type chunk [scanSegments * maxSegment]slot

const (
	chunkSlots = len(chunk{})
	chunkBytes = int(unsafe.Sizeof(chunk{}))
)

// chunks are chunks of earlier copies, until the garbage collector frees them. Fresh memory
// is what a copy would spend most of its time on, and it burdens the collector.
var chunks = sync.Pool{New: func() any {
	c := new(chunk)
	for i := 0; i < chunkSlots; i += pageSlots {
		c[i].Value.flags = 1 // faults the page in before the lane is locked
	}
	return c
}}

// pageSlots is how many slots fill the smallest page that systems have.
const pageSlots = 4096 / int(unsafe.Sizeof(slot{}))

// copyBytes returns the memory of a copy of this many slots and attributes. The last scan
// step, and the slot after all others, may begin a chunk each; a table of less than a
// segment is copied in one step.
func copyBytes(slots, attrs int) int {
	n := 1
	if slots >= maxSegment {
		n = slots/chunkSlots + 2
	}
	return n*chunkBytes + attrs*attrCopyBytes
}

// attrCopyBytes is the approximate size of a LoRA adapter in a copy, which shares its name
// with the table.
const attrCopyBytes = 128

// copyTable copies a table of about that size. The table may change meanwhile; the entries
// since the copy began contain the changes. The caller frees the copy.
func (l *Lane) copyTable(ctx context.Context, at place, slots, attrs int) *tableCopy {
	c := &tableCopy{
		chunks: make([]*chunk, 0, slots/chunkSlots+1),
		attrs:  make([]attribute.Set, 0, attrs),
		known:  make(map[attribute.Set]uint32, attrs),
	}
	l.scanTable(ctx, at, func() { c.reserve(chunkSlots) }, func(t *table, s *segment) {
		c.segments = append(c.segments, copiedSegment{first: uint32(c.slots), slots: uint32(len(s.Slots)), depth: s.Depth()})
		c.depth = max(c.depth, s.Depth())
		for rest := s.Slots; len(rest) > 0; {
			part := c.chunks[c.slots/chunkSlots][c.slots%chunkSlots:]
			n := copy(part, rest)
			c.number(part[:n], &t.attrs)
			c.slots += n
			rest = rest[n:]
		}
	})
	return c
}

// reserve makes room for this many more slots.
func (c *tableCopy) reserve(slots int) {
	for len(c.chunks)*chunkSlots < c.slots+slots {
		c.chunks = append(c.chunks, chunks.Get().(*chunk))
	}
}

// free returns the memory to the pool. The copy must not be used any more.
func (c *tableCopy) free() {
	for _, ch := range c.chunks {
		chunks.Put(ch)
	}
	c.chunks = nil
}

// at returns the block of a number.
func (c *tableCopy) at(i uint32) *slot {
	return &c.chunks[i/uint32(chunkSlots)][i%uint32(chunkSlots)]
}

// parts yields the slots in use, in pieces, with the number of the first of each.
func (c *tableCopy) parts(yield func(first uint32, part []slot) bool) {
	for k, ch := range c.chunks {
		first := k * chunkSlots
		if first >= c.slots || !yield(uint32(first), ch[:min(chunkSlots, c.slots-first)]) {
			return
		}
	}
}

// number replaces the attributes of some blocks by their numbers in the copy.
func (c *tableCopy) number(blocks []slot, attrs *attribute.Interner) {
	last, id := attrNone, uint32(0)
	for i := range blocks {
		if !blocks[i].Used() {
			continue
		}
		b := &blocks[i].Value
		if b.attr != last {
			last = b.attr
			set := attrs.At(last)
			known, ok := c.known[set]
			if !ok {
				known = uint32(len(c.attrs))
				c.attrs = append(c.attrs, set)
				c.known[set] = known
			}
			id = known
		}
		b.attr = id
	}
}

// attrNone marks a block without attributes. No slot has this number.
const attrNone uint32 = 1<<32 - 1

// index makes the directory. Where the copy ended early, the rest is an empty segment.
func (c *tableCopy) index() {
	c.dir = make([]uint32, 0, 1<<c.depth)
	for i, s := range c.segments {
		for range uint64(1) << (c.depth - s.depth) {
			c.dir = append(c.dir, uint32(i))
		}
	}
	c.segments = append(c.segments, copiedSegment{first: uint32(c.slots), slots: 1})
	c.reserve(1)
	*c.at(uint32(c.slots)) = slot{}
	c.slots++
	for len(c.dir) < 1<<c.depth {
		c.dir = append(c.dir, uint32(len(c.segments)-1))
	}
}

// inStep is the number of blocks looked up or climbed from in parallel, so that their cache
// misses overlap.
const inStep = 16

// link replaces each block's parent by the number of that block, if the copy has it.
func (c *tableCopy) link() {
	c.index()
	var links linking
	for first, part := range c.parts {
		for i := range part {
			b := &part[i].Value
			b.flags &= 1<<generationShift - 1
			if part[i].Used() && b.flags&flagParent != 0 && links.add(c, first+uint32(i), b.parent) {
				links.resolve(c)
			}
		}
	}
	links.resolve(c)
}

// linking is a batch of blocks whose parents are being found.
type linking struct {
	n       int
	blocks  [inStep]uint32
	at      [inStep]uint32 // where the search for the parent continues
	segment [inStep]uint32
}

// add adds a block, and reports whether the links are full.
func (l *linking) add(c *tableCopy, i uint32, parent uint64) (full bool) {
	m := hashtable.Hash(parent)
	segment := c.dir[m>>1>>(63-c.depth)]
	s := &c.segments[segment]
	l.blocks[l.n], l.segment[l.n] = i, segment
	l.at[l.n] = s.first + uint32(hashtable.Home(m, int(s.slots)))
	l.n++
	return l.n == inStep
}

// resolve links the batch.
func (l *linking) resolve(c *tableCopy) {
	var first [inStep]uint64
	for k := range l.n {
		first[k] = c.at(l.at[k]).Hash() // which asks for the memory of all
	}
	for k := range l.n {
		b := &c.at(l.blocks[k]).Value
		parent := hashtable.Hash(b.parent)
		s := &c.segments[l.segment[k]]
		at, hash := l.at[k], first[k]
		for hash != 0 && hash != parent {
			if at++; at == s.first+s.slots {
				at = s.first
			}
			hash = c.at(at).Hash()
		}
		if hash != 0 {
			b.parent = uint64(at)
			b.flags |= flagLinked
		}
	}
	l.n = 0
}

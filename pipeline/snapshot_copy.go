package pipeline

import (
	"context"
	"sync"
	"unsafe"

	"github.com/kvcast/kvcast/internal/attribute"
	"github.com/kvcast/kvcast/internal/hashtable"
)

// tableCopy is a copy of a table, in which a snapshot orders the blocks. Blocks are identified by
// numbers.
type tableCopy struct {
	chunks   []*chunk
	slots    int // number of slots copied
	segments []copiedSegment
	// dir has the segment of each value of the first depth bits of a hash.
	dir   []uint32
	depth uint
	// attrs are the blocks' attributes, numbered by their index here, since the table may use
	// its own numbers again. known has the indexes.
	attrs []attribute.Set
	known map[attribute.Set]uint32
	// lastAttr is the table's number of the attributes whose index is lastID.
	lastAttr, lastID uint32
}

// copiedSegment is the range of a copy's slots that was a segment of the table.
type copiedSegment struct {
	first, slots uint32
	next         uint64 // cursor of the next segment; 0 if there is none
}

// In place of the generation, the flags of a copied block have flagLinked and the number of the
// ancestry that encodes the block.
const (
	// flagLinked is set if the field parent is the number of a block of the copy.
	flagLinked    blockFlags = 1 << (generationShift + iota)
	ancestryShift            = generationShift + 1
)

// chunk has as many slots of a copy as scanTable visits under one lock.
type chunk [scanSegments * hashtable.SegmentSlots]slot

const (
	chunkSlots = len(chunk{})
	chunkBytes = int(unsafe.Sizeof(chunk{}))
)

// chunks recycles the memory of copies until the garbage collector frees it. Without it a copy
// would spend most of its time on allocating memory.
var chunks = sync.Pool{New: func() any {
	c := new(chunk)
	for i := 0; i < chunkSlots; i += pageSlots {
		c[i].Value.flags = 1 // faults the page in before the lane is locked
	}
	return c
}}

// pageSlots is the number of slots in a memory page of 4096 bytes, the smallest size in use.
const pageSlots = 4096 / int(unsafe.Sizeof(slot{}))

// copyBytes returns the memory of a copy of that many slots and attributes. It includes two partly
// used chunks, since scanTable reserves one more than it may use. A table of so few
// blocks that they are copied under one lock needs one chunk.
func copyBytes(slots, attrs int) int {
	n := 1
	if slots >= 2048 {
		n = slots/chunkSlots + 2
	}
	return n*chunkBytes + attrs*attrCopyBytes
}

// attrCopyBytes is the approximate size of one set of attributes in a copy, without its strings,
// which the table shares.
const attrCopyBytes = 128

// copyTable copies a table of about that size. The table may change during the copy; the journal
// has entries with the changes. The caller must free the copy.
func (l *Lane) copyTable(ctx context.Context, at place, slots, attrs int) *tableCopy {
	c := &tableCopy{
		chunks: make([]*chunk, 0, slots/chunkSlots+1),
		attrs:  make([]attribute.Set, 0, attrs),
		known:  make(map[attribute.Set]uint32, attrs),
	}
	prepare := func() {
		c.reserve(chunkSlots)
		c.lastAttr = attrNone // the table may have used the number again
	}
	l.scanTable(ctx, at, prepare, func(t *table, s *segment, from, next uint64) {
		first := c.slots
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && b.Cursor() >= from {
				to := c.at(uint32(c.slots))
				*to = *b
				c.number(&to.Value, &t.attrs)
				c.slots++
			}
		}
		c.segments = append(c.segments, copiedSegment{uint32(first), uint32(c.slots - first), next})
		c.depth = max(c.depth, s.Depth())
	})
	return c
}

// reserve allocates chunks for that many more slots.
func (c *tableCopy) reserve(slots int) {
	for len(c.chunks)*chunkSlots < c.slots+slots {
		c.chunks = append(c.chunks, chunks.Get().(*chunk))
	}
}

// free returns the chunks to the pool. The copy must not be used afterwards.
func (c *tableCopy) free() {
	for _, ch := range c.chunks {
		chunks.Put(ch)
	}
	c.chunks = nil
}

func (c *tableCopy) at(i uint32) *slot {
	return &c.chunks[i/uint32(chunkSlots)][i%uint32(chunkSlots)]
}

// parts yields the copied slots chunk by chunk, with the number of the first slot of each.
func (c *tableCopy) parts(yield func(first uint32, part []slot) bool) {
	for k, ch := range c.chunks {
		first := k * chunkSlots
		if first >= c.slots || !yield(uint32(first), ch[:min(chunkSlots, c.slots-first)]) {
			return
		}
	}
}

// number replaces a block's slot of attributes by the index in the copy's attrs.
func (c *tableCopy) number(b *block, attrs *attribute.Interner) {
	if b.attr != c.lastAttr {
		c.lastAttr = b.attr
		set := attrs.At(b.attr)
		known, ok := c.known[set]
		if !ok {
			known = uint32(len(c.attrs))
			c.attrs = append(c.attrs, set)
			c.known[set] = known
		}
		c.lastID = known
	}
	b.attr = c.lastID
}

// attrNone is not the number of any slot of attributes.
const attrNone uint32 = 1<<32 - 1

// index makes the directory. If the scan ended early, an empty segment stands for the rest.
func (c *tableCopy) index() {
	c.dir = make([]uint32, 0, 1<<c.depth)
	for i, s := range c.segments {
		end := uint64(1) << c.depth
		if s.next != 0 {
			end = s.next >> (64 - c.depth)
		}
		for uint64(len(c.dir)) < end {
			c.dir = append(c.dir, uint32(i))
		}
	}
	c.segments = append(c.segments, copiedSegment{})
	for len(c.dir) < 1<<c.depth {
		c.dir = append(c.dir, uint32(len(c.segments)-1))
	}
}

// inStep is the number of blocks whose parents are looked up together, so that their cache misses
// overlap.
const inStep = 16

// link replaces each block's parent hash by the parent's number, if the copy has the parent.
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

// linking is a batch of blocks whose parents are looked up together.
type linking struct {
	n       int
	blocks  [inStep]uint32
	segment [inStep]uint32
}

// add adds a block, and reports whether the batch is full.
func (l *linking) add(c *tableCopy, i uint32, parent uint64) (full bool) {
	m := hashtable.Hash(parent)
	l.blocks[l.n], l.segment[l.n] = i, c.dir[hashtable.Cursor(m)>>1>>(63-c.depth)]
	l.n++
	return l.n == inStep
}

// resolve links the blocks of the batch, and empties it.
func (l *linking) resolve(c *tableCopy) {
	var segments [inStep]copiedSegment
	for k := range l.n { // load all segments first, so that cache misses overlap
		segments[k] = c.segments[l.segment[k]]
	}
	for k := range l.n {
		b := &c.at(l.blocks[k]).Value
		parent := hashtable.Hash(b.parent)
		for at := segments[k].first; at < segments[k].first+segments[k].slots; at++ {
			if c.at(at).Hash() == parent {
				b.parent = uint64(at)
				b.flags |= flagLinked
				break
			}
		}
	}
	l.n = 0
}

// scanSegments is the number of segments that scanTable visits before it unlocks the lane: at most
// 512 KiB, in some tenths of a millisecond.
const scanSegments = 512

// scanTable visits every segment of a table under the lane's lock, which it unlocks after every
// scanSegments. The table may change in between. If it is cleared, the scan ends early; the
// journal then has an entry that says so. scanTable calls prepare before it locks the lane, unless
// prepare is nil. It calls visit with the cursors of the segment and of the next; blocks whose
// Slot.Cursor is below from were visited before.
func (l *Lane) scanTable(ctx context.Context, at place, prepare func(), visit func(t *table, s *segment, from, next uint64)) {
	var first *table
	from, done := uint64(0), false
	for !done && ctx.Err() == nil {
		if prepare != nil {
			prepare()
		}
		l.mu.Lock()
		t := l.table(at)
		if first == nil {
			first = t
		}
		if t == nil || t != first {
			l.mu.Unlock()
			return
		}
		for range scanSegments {
			s, next := t.blocks.table.SegmentAt(from)
			visit(t, s, from, next)
			if from = next; from == 0 {
				done = true
				break
			}
		}
		l.mu.Unlock()
		l.mu.yield()
	}
}

package pipeline

import "context"

// tableCopy is a copy of a table, to be put in order. It is one piece of memory, so
// that a block is a number.
type tableCopy struct {
	blocks   []block
	segments []copiedSegment
	// dir has the segment of each value of the first depth bits of a mixed hash.
	dir   []uint32
	depth uint
	// attrs are those of its blocks, which have their numbers here: the table's slots
	// are used again.
	attrs []attr
	known map[attr]uint32
}

// copiedSegment is the part of a copy that was a segment of the table.
type copiedSegment struct {
	first, slots uint32
	depth        uint
}

// The flags of a copied block have no generation. In its place they say, once the
// copy is linked, whether its parent is there, and when it is told by which climb.
const (
	// flagLinked says that the field parent is the number of a block of the copy.
	flagLinked blockFlags = 1 << (generationShift + iota)
	climbShift            = generationShift + 1
)

// copyTable copies a table, of about such a size, in short turns. Between two of them
// it may change; the entries since the first turn tell how.
func (l *Lane) copyTable(ctx context.Context, at place, slots, attrs int) *tableCopy {
	c := &tableCopy{blocks: make([]block, 0, slots+slots/64+1), attrs: make([]attr, 0, attrs), known: make(map[attr]uint32, attrs)}
	l.turns(ctx, at, func(t *table, s *segment) {
		first := len(c.blocks)
		c.segments = append(c.segments, copiedSegment{first: uint32(first), slots: uint32(len(s.slots)), depth: s.depth})
		c.blocks = append(c.blocks, s.slots...)
		c.depth = max(c.depth, s.depth)
		c.number(c.blocks[first:], t.attrs.slots)
	})
	return c
}

// number gives the attributes of some blocks their numbers in the copy.
func (c *tableCopy) number(blocks []block, slots []attrSlot) {
	last, id := attrNone, uint32(0)
	for i := range blocks {
		b := &blocks[i]
		if b.flags&flagHeld == 0 {
			continue
		}
		if b.attr != last {
			last = b.attr
			var ok bool
			if id, ok = c.known[slots[last].attr]; !ok {
				id = uint32(len(c.attrs))
				c.attrs = append(c.attrs, slots[last].attr)
				c.known[slots[last].attr] = id
			}
		}
		b.attr = id
	}
}

// attrNone is no slot of attributes: there are fewer.
const attrNone uint32 = 1<<32 - 1

// index makes the directory. Where the copy ended early, what is missing is an empty
// segment.
func (c *tableCopy) index() {
	c.dir = make([]uint32, 0, 1<<c.depth)
	for i, s := range c.segments {
		for range uint64(1) << (c.depth - s.depth) {
			c.dir = append(c.dir, uint32(i))
		}
	}
	c.segments = append(c.segments, copiedSegment{first: uint32(len(c.blocks)), slots: 1})
	c.blocks = append(c.blocks, block{})
	for len(c.dir) < 1<<c.depth {
		c.dir = append(c.dir, uint32(len(c.segments)-1))
	}
}

// inStep is how many blocks are looked for, or climbed from, at a time: the memory
// that they lie in is asked for together, and not one after the other.
const inStep = 16

// link puts in the place of each block's parent the number of that, if it is there.
func (c *tableCopy) link() {
	c.index()
	var links linking
	for i := range c.blocks {
		b := &c.blocks[i]
		b.flags &= 1<<generationShift - 1
		if b.flags&(flagHeld|flagParent) == flagHeld|flagParent && links.add(c, uint32(i)) {
			links.resolve(c)
		}
	}
	links.resolve(c)
}

// linking is some blocks whose parents are looked for.
type linking struct {
	n       int
	blocks  [inStep]uint32
	at      [inStep]uint32 // where the search for the parent goes on
	segment [inStep]uint32
}

// add adds a block, and tells whether there is no room for more.
func (l *linking) add(c *tableCopy, i uint32) (full bool) {
	m := mix(c.blocks[i].parent)
	segment := c.dir[m>>1>>(63-c.depth)]
	s := &c.segments[segment]
	l.blocks[l.n], l.segment[l.n] = i, segment
	l.at[l.n] = s.first + uint32(homeAmong(m, int(s.slots)))
	l.n++
	return l.n == inStep
}

// resolve links those blocks.
func (l *linking) resolve(c *tableCopy) {
	var first [inStep]uint64
	for k := range l.n {
		first[k] = c.blocks[l.at[k]].hash // which asks for the memory of all
	}
	for k := range l.n {
		b := &c.blocks[l.blocks[k]]
		s := &c.segments[l.segment[k]]
		at, hash := l.at[k], first[k]
		for c.blocks[at].flags&flagHeld != 0 && hash != b.parent {
			if at++; at == s.first+s.slots {
				at = s.first
			}
			hash = c.blocks[at].hash
		}
		if c.blocks[at].flags&flagHeld != 0 {
			b.parent = uint64(at)
			b.flags |= flagLinked
		}
	}
	l.n = 0
}

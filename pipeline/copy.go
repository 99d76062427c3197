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
	// attrs are those of all blocks, once they are linked.
	attrs []attr
}

// copiedSegment is the part of a copy that was a segment of the table.
type copiedSegment struct {
	first, slots uint32
	depth        uint
	// attrs are those that its blocks had when it was copied: slots are used again.
	attrs []attrSlot
}

// The flags of a copied block have no generation. In its place they say, once the
// copy is linked, whether its parent is there, and when it is told by which climb.
const (
	// flagLinked says that the field parent is the number of a block of the copy.
	flagLinked blockFlags = 1 << (generationShift + iota)
	climbShift            = generationShift + 1
)

// copyTable copies a table in short turns. Between two of them it may change; the
// entries since the first turn tell how.
func (l *Lane) copyTable(ctx context.Context, at place, slots int) *tableCopy {
	c := &tableCopy{blocks: make([]block, 0, slots+slots/64+1)}
	last, attrs := -1, []attrSlot(nil)
	l.turns(ctx, at, func(turn int, t *table, s *segment) {
		if turn != last {
			last, attrs = turn, append([]attrSlot(nil), t.attrs.slots...)
		}
		c.segments = append(c.segments, copiedSegment{
			first: uint32(len(c.blocks)), slots: uint32(len(s.slots)), depth: s.depth, attrs: attrs,
		})
		c.blocks = append(c.blocks, s.slots...)
		c.depth = max(c.depth, s.depth)
	})
	return c
}

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

// link puts in the place of each block's parent the number of that, if it is there,
// and gives all blocks attributes of the copy's own.
func (c *tableCopy) link() {
	c.index()
	known := make(map[attr]uint32)
	var links linking
	for _, s := range c.segments {
		last, id := attrNone, uint32(0)
		for i := s.first; i < s.first+s.slots; i++ {
			b := &c.blocks[i]
			if b.flags&flagHeld == 0 {
				continue
			}
			b.flags &= 1<<generationShift - 1
			if b.attr != last {
				last = b.attr
				var ok bool
				if id, ok = known[s.attrs[last].attr]; !ok {
					id = uint32(len(c.attrs))
					c.attrs = append(c.attrs, s.attrs[last].attr)
					known[s.attrs[last].attr] = id
				}
			}
			b.attr = id
			if b.flags&flagParent != 0 && links.add(c, i) {
				links.resolve(c)
			}
		}
	}
	links.resolve(c)
}

// attrNone is no slot of attributes: there are fewer.
const attrNone uint32 = 1<<32 - 1

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
	l.at[l.n] = s.first + uint32(uint64(uint32(m))*uint64(s.slots)>>32)
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

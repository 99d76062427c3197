package pipeline

// childCounts counts, of each block, the blocks of its table whose parent it is. Only
// an open gate asks for them, so a table begins to count when its engine first
// announces: most never do.
//
// A count of up to two stands in the flags of the block itself.
type childCounts struct {
	// counting reports whether there are any counts.
	counting bool
	// The blocks whose mixed hash is below upTo, where a segment begins, are counted as
	// children, and all of them once complete is set.
	upTo     uint64
	complete bool
	// many are the counts of blocks with more than two, and of those that are not held.
	many map[uint64]uint32
}

const (
	// flagChildren are the bits of the count; where all are set it is in many.
	flagChildren blockFlags = 3 << childrenShift
	oneChild     blockFlags = 1 << childrenShift
)

// countSegments is how many segments an event begins to count: some tenths of a
// millisecond.
const countSegments = 4

// countChildren begins to count children, or goes on to, and reports whether all are
// counted.
func (t *table) countChildren() bool {
	c := &t.children
	if !c.counting {
		*c = childCounts{counting: true, many: make(map[uint64]uint32)}
	}
	for range countSegments {
		if c.complete {
			break
		}
		s := t.blocks.segment(c.upTo)
		for i := range s.slots {
			if b := &s.slots[i]; b.flags&(flagHeld|flagParent) == flagHeld|flagParent {
				t.addChild(b.parent)
			}
		}
		c.upTo = s.after(c.upTo)
		c.complete = c.upTo == 0
	}
	return c.complete
}

// counts reports whether a block is counted as its parent's child.
func (c *childCounts) counts(b *block) bool {
	return c.counting && b.flags&flagParent != 0 && (c.complete || mix(b.hash) < c.upTo)
}

// addChild counts one more child of a block, held or not.
func (t *table) addChild(parent uint64) {
	s, i, held := t.blocks.find(parent)
	if !held {
		t.children.many[parent]++
		return
	}
	b := &s.slots[i]
	switch b.flags & flagChildren {
	case flagChildren:
		t.children.many[parent]++
	case 2 * oneChild:
		t.children.many[parent] = 3
		b.flags |= flagChildren
	default:
		b.flags += oneChild
	}
}

// dropChild counts one less.
func (t *table) dropChild(parent uint64) {
	s, i, held := t.blocks.find(parent)
	if held && s.slots[i].flags&flagChildren != flagChildren {
		s.slots[i].flags -= oneChild
		return
	}
	n := t.children.many[parent] - 1
	switch {
	case held && n == 2:
		s.slots[i].flags -= oneChild
		delete(t.children.many, parent)
	case n == 0:
		delete(t.children.many, parent)
	default:
		t.children.many[parent] = n
	}
}

// adoptChildren gives a block that has just come to be held its count.
func (t *table) adoptChildren(b *block) {
	switch n := t.children.many[b.hash]; n {
	case 0:
	case 1, 2:
		b.flags |= blockFlags(n) * oneChild
		delete(t.children.many, b.hash)
	default:
		b.flags |= flagChildren
	}
}

// orphanChildren keeps the count of a block that is about to be held no longer.
func (t *table) orphanChildren(b *block) {
	if n := b.flags & flagChildren; n != 0 && n != flagChildren {
		t.children.many[b.hash] = uint32(n / oneChild)
	}
}

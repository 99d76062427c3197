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
		s, next := t.blocks.table.SegmentAt(c.upTo)
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && b.Value.flags&flagParent != 0 {
				t.addChild(b.Value.parent)
			}
		}
		c.upTo = next
		c.complete = next == 0
	}
	return c.complete
}

// counts reports whether a block is counted as its parent's child.
func (c *childCounts) counts(b *slot) bool {
	return c.counting && b.Value.flags&flagParent != 0 && (c.complete || b.Hash() < c.upTo)
}

// addToParent counts a block as a child of its parent.
func (t *table) addToParent(b *slot) {
	if t.children.counts(b) {
		t.addChild(b.Value.parent)
	}
}

// removeFromParent no longer counts a block as a child of its parent.
func (t *table) removeFromParent(b *slot) {
	if t.children.counts(b) {
		t.dropChild(b.Value.parent)
	}
}

// addChild counts one more child of a block, whether it exists or not.
func (t *table) addChild(parent uint64) {
	b := t.blocks.find(parent)
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

// dropChild counts one less.
func (t *table) dropChild(parent uint64) {
	b := t.blocks.find(parent)
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

// adoptChildren gives a new block the count of its children.
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

// orphanChildren keeps the count of a block that is about to be removed.
func (t *table) orphanChildren(b *slot) {
	if n := b.Value.flags & flagChildren; n != 0 && n != flagChildren {
		t.children.many[b.Key()] = uint32(n / oneChild)
	}
}

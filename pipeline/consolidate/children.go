package consolidate

import "math"

// nameChildren counts, of each block that a source may remove, the blocks that the
// source holds and whose parent it is, by the source's own names. As in tables, nothing
// is counted before the source announces blocks; see childCounts.
type nameChildren struct {
	// Names whose numbers are below upTo are counted: 0 until there are any counts.
	upTo uint32
	of   map[uint64]uint32
}

// allNames is an upTo beyond all names.
const allNames = math.MaxUint32

// countNames is the number of names that one event counts, in some tenths of a millisecond.
const countNames = 4096

// countChildren starts or continues counting a source's children, and reports whether all are
// counted.
func (t *Tracker) CountChildren(source int) bool {
	c := &t.children[source]
	if c.upTo == 0 {
		*c = nameChildren{upTo: 1, of: make(map[uint64]uint32)}
	}
	for range countNames {
		if c.upTo == allNames {
			return true
		}
		if c.upTo > t.names.last {
			c.upTo = allNames
			return true
		}
		name := c.upTo
		c.upTo++
		if n := t.names.at(name); n.block != 0 && n.source() == source && n.held() {
			t.joinParent(name)
		}
	}
	return false
}

// joinParent counts a name as a child of its parent, partParent stops counting it.
func (t *Tracker) joinParent(name uint32) {
	n := t.names.at(name)
	if c := &t.children[n.source()]; n.flags&nameParent != 0 && name < c.upTo {
		c.of[n.parent]++
	}
}

func (t *Tracker) partParent(name uint32) {
	n := t.names.at(name)
	c := &t.children[n.source()]
	switch {
	case n.flags&nameParent == 0 || name >= c.upTo:
	case c.of[n.parent] == 1:
		delete(c.of, n.parent)
	default:
		c.of[n.parent]--
	}
}

// setParent sets the parent of a name from a store.
func (t *Tracker) setParent(name uint32, s *nameStore) {
	n := t.names.at(name)
	if n.held() {
		t.partParent(name)
	}
	n.flags &^= nameParent
	if n.parent = s.parent; !s.rooted {
		n.flags |= nameParent
	}
	if n.held() {
		t.joinParent(name)
	}
}

// hasHeldChild reports whether the source of a name holds a child of the block so named.
func (t *Tracker) hasHeldChild(name uint32) bool {
	n := t.names.at(name)
	return t.children[n.source()].of[n.hash] > 0
}

// holds reports whether a source holds a block by this name.
func (t *Tracker) Has(source int, hash uint64) bool {
	name := t.name(source, hash)
	return name != 0 && t.names.at(name).held()
}

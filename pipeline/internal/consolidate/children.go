package consolidate

import (
	"math"

	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// childCounts counts, by block hash, the live names of a source whose parent is that block. It counts nothing before CountChildren is first
// called, which is for engines that announce blocks; see package copies.
type childCounts struct {
	byParent map[uint64]uint32 // without zeros
	// upTo is the highest name that is counted; allNames if every name is.
	upTo uint32
}

const (
	allNames = math.MaxUint32
	// namesPerStep is the number of names that CountChildren counts, in some tenths of a millisecond.
	namesPerStep = 4096
)

// CountChildren starts or continues counting the children of a source's blocks, and reports whether all are counted.
func (t *Tracker) CountChildren(source int) bool {
	c := &t.children[source]
	if c.upTo == allNames {
		return true
	}
	t.recorder.call(statev1.TrackerCall_KIND_COUNT_CHILDREN, t.rank, source)
	if c.byParent == nil {
		c.byParent = make(map[uint64]uint32)
	}
	for range namesPerStep {
		if c.upTo >= t.names.peak {
			c.upTo = allNames
			return true
		}
		c.upTo++
		if c.upTo > t.names.last { // the number of steps is the same as before the names were restored
			continue
		}
		if n := t.names.at(c.upTo); n.block != 0 && n.source() == source && n.live() {
			t.countChild(c.upTo, 1)
		}
	}
	return false
}

// countChild counts a name that becomes live as a child (1), or stops counting a live one (-1).
func (t *Tracker) countChild(nameID uint32, by int) {
	n := t.names.at(nameID)
	if c := &t.children[n.source()]; n.flags&flagParent != 0 && nameID <= c.upTo {
		c.byParent[n.parent] += uint32(by)
		if by < 0 && c.byParent[n.parent] == 0 {
			delete(c.byParent, n.parent)
		}
	}
}

// setParent sets the parent of a name from a store.
func (t *Tracker) setParent(nameID uint32, s *blockStore) {
	n := t.names.at(nameID)
	if n.live() {
		t.countChild(nameID, -1)
	}
	n.flags &^= flagParent
	if n.parent = s.parent; !s.rooted {
		n.flags |= flagParent
	}
	if n.live() {
		t.countChild(nameID, 1)
	}
}

// hasLiveChild reports whether the source of a name has a child of the block of that name.
func (t *Tracker) hasLiveChild(nameID uint32) bool {
	n := t.names.at(nameID)
	return t.children[n.source()].byParent[n.hash] > 0
}

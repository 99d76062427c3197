package consolidate

import (
	"math"

	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// childCounts counts, by block hash, the live names of a source whose parent is that block. It
// counts nothing before CountChildren is first called, which is for engines that announce
// blocks; see package copies.
type childCounts struct {
	copies.Children
	// upTo is the highest name that is counted; allNames if every name is.
	upTo uint32
}

const (
	allNames = math.MaxUint32
	// namesPerStep is the number of names that CountChildren counts, in some tenths of a
	// millisecond.
	namesPerStep = 4096
)

// CountChildren starts or continues counting the children of a source's blocks, and reports
// whether all are counted.
func (t *Tracker) CountChildren(source int) bool {
	c := &t.children[source]
	if c.upTo == allNames {
		return true
	}
	t.recorder.call(statev1.TrackerCall_KIND_COUNT_CHILDREN, t.rank, source)
	if c.Children == nil {
		c.Children = make(copies.Children)
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
			t.addToParent(c.upTo)
		}
	}
	return false
}

// addToParent counts a name that becomes live as a child.
func (t *Tracker) addToParent(nameID uint32) {
	n := t.names.at(nameID)
	if c := &t.children[n.source()]; n.flags&flagParent != 0 && nameID <= c.upTo {
		c.Add(n.parent)
	}
}

// removeFromParent stops counting a live name as a child.
func (t *Tracker) removeFromParent(nameID uint32) {
	n := t.names.at(nameID)
	if c := &t.children[n.source()]; n.flags&flagParent != 0 && nameID <= c.upTo {
		c.Remove(n.parent)
	}
}

// setParent sets the parent of a name from a store.
func (t *Tracker) setParent(nameID uint32, s *blockStore) {
	n := t.names.at(nameID)
	if n.live() {
		t.removeFromParent(nameID)
	}
	n.flags &^= flagParent
	if n.parent = s.parent; !s.rooted {
		n.flags |= flagParent
	}
	if n.live() {
		t.addToParent(nameID)
	}
}

// hasLiveChild reports whether the source of a name has a child of the block of that name.
func (t *Tracker) hasLiveChild(nameID uint32) bool {
	n := t.names.at(nameID)
	return t.children[n.source()].Children[n.hash] > 0
}

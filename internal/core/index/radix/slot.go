package radix

import "github.com/kvcast/kvcast/internal/core/hashtable"

type (
	// table has the blocks of a rank by block hash.
	table = hashtable.Table[slot]
	// entry is a block in a table.
	entry = hashtable.Slot[slot]
)

// slot is what a rank knows of a block.
type slot struct {
	parent uint64 // block hash, if the tag has tagParent
	tag    tag
}

// tag has, from its low bits on, the bits of the tiers that hold a block, see Rank.bits; flags; the slot of the block's attributes in
// Rank.attrs; and the block's place in the tree: the offset, then the number of the run. An orphan has its number in place of the place.
type tag uint64

const (
	allTiers     uint8 = 1<<8 - 1 // the bits of tiers in a tag
	tagNoContent tag   = 1 << 8   // the content and place are unknown
	tagOrphan    tag   = 1 << 9   // the content is known, and the parent's place is unknown
	tagParent    tag   = 1 << 10  // the block has a parent

	attrShift  = 11
	placeShift = 26
	runShift   = placeShift + 10
	// maxAttributes is the number of slots of attributes that a tag can have, maxRun the number of blocks of a run.
	// The tag can have 268,435,456 runs, which take more than 32 GiB.
	maxAttributes = 1 << (placeShift - attrShift)
	maxRun        = 1 << (runShift - placeShift)
)

// newTag returns the tag of a block with a known parent and content, without a place.
func newTag(tiers uint8, hasParent bool, attr uint32) tag {
	t := tag(tiers) | tag(attr)<<attrShift
	if hasParent {
		t |= tagParent
	}
	return t
}

func (t tag) has(tiers uint8) bool { return uint8(t)&tiers != 0 }
func (t tag) attr() uint32         { return uint32(t >> attrShift & (maxAttributes - 1)) }
func (t tag) orphan() uint32       { return uint32(t >> placeShift) }

// isPlaced reports whether a block with some tier has a place.
func (t tag) isPlaced() bool { return t&(tagNoContent|tagOrphan) == 0 }

// place returns the block's place, if it has one.
func (t tag) place() position {
	return position{uint32(t >> runShift), uint32(t >> placeShift & (maxRun - 1))}
}

func (t tag) withAttr(slot uint32) tag {
	return t&^((maxAttributes-1)<<attrShift) | tag(slot)<<attrShift
}
func (t tag) withOrphan(n uint32) tag {
	return t&(1<<placeShift-1)&^tagNoContent | tagOrphan | tag(n)<<placeShift
}

func (t tag) withPlace(p position) tag {
	return t&(1<<placeShift-1)&^(tagNoContent|tagOrphan) | tag(p.run)<<runShift | tag(p.offset)<<placeShift
}

// setParent sets the parent to that of a block.
func (s *slot) setParent(b Block) {
	if s.parent, s.tag = 0, s.tag&^tagParent; b.HasParent {
		s.parent, s.tag = b.Parent, s.tag|tagParent
	}
}

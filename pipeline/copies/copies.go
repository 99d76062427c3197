package copies

import (
	"math"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
)

// How copies are counted. An engine may hold a block in several physical copies, each stored
// and removed by an event of its own. vLLM also announces the blocks that a request reuses,
// if the request asks for it (report mode full): with an event of the same form, which
// changes nothing. If announcements counted as copies, announced blocks would never be
// removed; if blocks were a set, a block with two copies would be removed with the first.
// The rule that distinguishes them, for a source of CopyRuleDetected in the device tier:
//
//  1. A store from the root of a block that is held is unsure: it may be a copy or an
//     announcement. It is counted beside the copies. Every other store of a held block
//     is a copy.
//  2. A remove removes a copy while there are several. In place of the last copy it
//     removes an unsure store, if there is one and the gate is closed, since the store
//     may have been a copy. With the gate open it does so only
//     where a child of the block is held: the engine evicts the child before the last
//     copy of its parent.
//  3. The gate of a rank and source opens with announcesAfter announcements that
//     nothing else explains: root stores of at least two blocks that are all held, which
//     the batch's next store of the same attention group continues. It closes when
//     the engine restarts or clears its cache.

// announcesAfter is the number of announcements that open the gate.
const announcesAfter = 3

// Count counts the copies of a stored block beyond the first.
type Count struct {
	Further uint32
	Unsure  uint32
}

// Op is the effect of a store or a remove on a block's counts.
type Op uint32

// Effects of a store on a block that exists. A new block gets its first copy.
const (
	Add Op = iota
	AddUnsure
	AddNothing
)

// Effects of a remove on a block that exists. RemoveDownTo + n leaves n copies.
const (
	Remove Op = iota
	// RemoveAnnounced is Remove with an open gate.
	RemoveAnnounced
	RemoveAll
	RemoveDownTo
)

// stored counts a store of a block that exists.
func (c *Count) Stored(op Op) {
	switch {
	case op == Add && c.Further < math.MaxUint32:
		c.Further++
	case op == AddUnsure && c.Unsure < math.MaxUint32:
		c.Unsure++
	}
}

// removed counts a remove, and reports whether it removed the block.
func (c *Count) Removed(op Op, hasHeldChild bool) (gone bool) {
	switch {
	case op == RemoveAll || op == RemoveDownTo:
		return true
	case op > RemoveDownTo:
		*c = Count{Further: uint32(op-RemoveDownTo) - 1}
	case c.Further > 0:
		c.Further--
	case c.Unsure > 0 && (op == Remove || hasHeldChild):
		c.Unsure--
	default:
		return true
	}
	return false
}

// StoreOp returns the effect of a source's store; rooted reports whether the store has no
// parent.
func StoreOp(rule feed.CopyRule, e *wire.Event, rooted bool) Op {
	switch {
	case rule == feed.CopyRuleAnnouncedLast || e.Origin == wire.OriginReused:
		return AddNothing
	case rooted && e.Origin == wire.OriginUnknown && Detects(rule, e):
		return AddUnsure
	default:
		return Add
	}
}

// RemoveOp returns the effect of a source's remove on block i; open reports whether the gate
// is open.
func RemoveOp(rule feed.CopyRule, e *wire.Event, i int, open bool) Op {
	switch {
	case e.Rare != nil && len(e.Rare.RemainingCopies) == len(e.BlockHashes):
		return RemoveDownTo + Op(min(e.Rare.RemainingCopies[i], math.MaxUint32-uint32(RemoveDownTo)))
	case rule == feed.CopyRuleAnnouncedLast:
		return RemoveAll
	case open && Detects(rule, e):
		return RemoveAnnounced
	default:
		return Remove
	}
}

// Detects reports whether an event's stores may be announcements.
func Detects(rule feed.CopyRule, e *wire.Event) bool {
	return rule == feed.CopyRuleDetected && e.Tier == wire.TierDevice
}

// gate counts the announcements of a source's dp rank, up to those that open it.
type Gate uint8

func (g Gate) Open() bool { return g >= announcesAfter }

// Gates are those of a rank's sources, by their indexes.
type Gates []Gate

// of returns the gate of a source, valid until the next call.
func (g *Gates) Of(source int) *Gate {
	for len(*g) <= source {
		*g = append(*g, 0)
	}
	return &(*g)[source]
}

// close closes the gate of a source.
func (g Gates) Close(source int) {
	if source < len(g) {
		g[source] = 0
	}
}

// open reports whether a source's gate is open.
func (g Gates) Open(source int) bool { return source < len(g) && g[source].Open() }

// candidate is a root store of the present batch that is an announcement if the next
// store of its attention group continues it.
type candidate struct {
	group    int64
	hasGroup bool
	last     uint64 // its last block
}

// candidates are the candidates of a batch, at most one per attention group.
type Candidates []candidate

// maxCandidates bounds the groups tracked in a batch. Models have a few.
const maxCandidates = 16

// confirm removes the candidate of a store's group, and reports whether the store makes it
// an announcement.
func (c *Candidates) Confirm(e *wire.Event, rooted bool) bool {
	for i, o := range *c {
		if o.group == e.GroupIdx && o.hasGroup == e.HasGroupIdx {
			*c = append((*c)[:i], (*c)[i+1:]...)
			return !rooted && e.Parent == o.last
		}
	}
	return false
}

// MayAnnounce reports whether a store may be an announcement of its blocks if they are
// all held.
func MayAnnounce(e *wire.Event, rooted bool) bool {
	return rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown
}

// add makes a store its group's candidate.
func (c *Candidates) Add(e *wire.Event) {
	if len(*c) < maxCandidates {
		*c = append(*c, candidate{e.GroupIdx, e.HasGroupIdx, e.BlockHashes[len(e.BlockHashes)-1]})
	}
}

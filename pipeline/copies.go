package pipeline

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

// copyCount counts the copies of a stored block beyond the first.
type copyCount struct {
	further uint32
	unsure  uint32
}

// copyOp is the effect of a store or a remove on a block's counts.
type copyOp uint32

// Effects of a store on a block that exists. A new block gets its first copy.
const (
	addCopy copyOp = iota
	addUnsure
	addNothing
)

// Effects of a remove on a block that exists. removeDownTo + n leaves n copies.
const (
	removeCopy copyOp = iota
	// removeAnnounced is removeCopy with an open gate.
	removeAnnounced
	removeAllCopies
	removeDownTo
)

// stored counts a store of a block that exists.
func (c *copyCount) stored(op copyOp) {
	switch {
	case op == addCopy && c.further < math.MaxUint32:
		c.further++
	case op == addUnsure && c.unsure < math.MaxUint32:
		c.unsure++
	}
}

// removed counts a remove, and reports whether it removed the block.
func (c *copyCount) removed(op copyOp, hasHeldChild bool) (gone bool) {
	switch {
	case op == removeAllCopies || op == removeDownTo:
		return true
	case op > removeDownTo:
		*c = copyCount{further: uint32(op-removeDownTo) - 1}
	case c.further > 0:
		c.further--
	case c.unsure > 0 && (op == removeCopy || hasHeldChild):
		c.unsure--
	default:
		return true
	}
	return false
}

// storeOp returns the effect of a source's store; rooted reports whether the store has no
// parent.
func storeOp(rule feed.CopyRule, e *wire.Event, rooted bool) copyOp {
	switch {
	case rule == feed.CopyRuleAnnouncedLast || e.Origin == wire.OriginReused:
		return addNothing
	case rooted && e.Origin == wire.OriginUnknown && detects(rule, e):
		return addUnsure
	default:
		return addCopy
	}
}

// removeOp returns the effect of a source's remove on block i; open reports whether the gate
// is open.
func removeOp(rule feed.CopyRule, e *wire.Event, i int, open bool) copyOp {
	switch {
	case e.Rare != nil && len(e.Rare.RemainingCopies) == len(e.BlockHashes):
		return removeDownTo + copyOp(min(e.Rare.RemainingCopies[i], math.MaxUint32-uint32(removeDownTo)))
	case rule == feed.CopyRuleAnnouncedLast:
		return removeAllCopies
	case open && detects(rule, e):
		return removeAnnounced
	default:
		return removeCopy
	}
}

// detects reports whether an event's stores may be announcements.
func detects(rule feed.CopyRule, e *wire.Event) bool {
	return rule == feed.CopyRuleDetected && e.Tier == wire.TierDevice
}

// gate counts the announcements of a source's dp rank, up to those that open it.
type gate uint8

func (g gate) open() bool { return g >= announcesAfter }

// gates are those of a rank's sources, by their indexes.
type gates []gate

// of returns the gate of a source, valid until the next call.
func (g *gates) of(source int) *gate {
	for len(*g) <= source {
		*g = append(*g, 0)
	}
	return &(*g)[source]
}

// close closes the gate of a source.
func (g gates) close(source int) {
	if source < len(g) {
		g[source] = 0
	}
}

// open reports whether a source's gate is open.
func (g gates) open(source int) bool { return source < len(g) && g[source].open() }

// candidate is a root store of the present batch that is an announcement if the next
// store of its attention group continues it.
type candidate struct {
	group    int64
	hasGroup bool
	last     uint64 // its last block
}

// candidates are the candidates of a batch, at most one per attention group.
type candidates []candidate

// maxCandidates bounds the groups tracked in a batch. Models have a few.
const maxCandidates = 16

// confirm removes the candidate of a store's group, and reports whether the store makes it
// an announcement.
func (c *candidates) confirm(e *wire.Event, rooted bool) bool {
	for i, o := range *c {
		if o.group == e.GroupIdx && o.hasGroup == e.HasGroupIdx {
			*c = append((*c)[:i], (*c)[i+1:]...)
			return !rooted && e.Parent == o.last
		}
	}
	return false
}

// mayAnnounce reports whether a store may be an announcement of its blocks if they are
// all held.
func mayAnnounce(e *wire.Event, rooted bool) bool {
	return rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown
}

// add makes a store its group's candidate.
func (c *candidates) add(e *wire.Event) {
	if len(*c) < maxCandidates {
		*c = append(*c, candidate{e.GroupIdx, e.HasGroupIdx, e.BlockHashes[len(e.BlockHashes)-1]})
	}
}

// Package copies decides how many physical copies of a block an engine has.
//
// An engine's store and remove events flow in; the effect of each on a block's count flows out. A block counts as removed when its engine
// removed the last copy, whether or not the engine also announces blocks that it reuses.
//
// An engine may have a block in several physical copies, each stored and removed by its own event. vLLM also announces the blocks that a
// request reuses, if the request asks for it (report mode full). An announcement is a store event of the same form that adds no copy. If
// announcements counted as copies, announced blocks would never be removed. If blocks were a set, a block with two copies would be removed
// with the first copy. The rules for a source with CopyRuleDetected, in the device tier:
//
//  1. A store of a present block without a parent is unsure: it is a copy or an announcement.
//     Unsure stores are counted apart from the copies. Every other store of a present block
//     is a copy.
//  2. A remove removes a copy while there are several. At the last copy, a remove uses up one
//     unsure store instead, if the block has any and the engine does not announce blocks. If
//     the engine does, this applies only while the engine has a child of the block: it
//     evicts the child before the last copy of the parent. An engine that also uses lower
//     tiers may do so later, so that unsure stores of such an engine are not used up.
//  3. A [Detector] finds out whether an engine announces blocks.
package copies

import (
	"math"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// Count counts the copies of a block beyond the first.
type Count struct {
	Further uint32
	Unsure  uint32
}

// Op is the effect of a store or a remove on a block's count.
type Op uint32

// Effects of a store of a present block. A new block gets its first copy.
const (
	Add Op = iota
	AddUnsure
	AddNothing
)

// Effects of a remove of a present block. RemoveDownTo + n leaves n copies.
const (
	Remove Op = iota
	// RemoveAnnounced is Remove by an engine that announces blocks.
	RemoveAnnounced
	RemoveAll
	RemoveDownTo
)

// RemoveCopy is Remove by an engine whose unsure stores are taken for announcements.
const RemoveCopy Op = math.MaxUint32

// Stored counts a store of a present block.
func (c *Count) Stored(op Op) {
	switch {
	case op == Add && c.Further < math.MaxUint32:
		c.Further++
	case op == AddUnsure && c.Unsure < math.MaxUint32:
		c.Unsure++
	}
}

// Removed counts a remove, and reports whether no copy is left. hasChild reports whether the
// engine has a child of the block; only RemoveAnnounced uses it.
func (c *Count) Removed(op Op, hasChild bool) (gone bool) {
	switch {
	case op == RemoveAll || op == RemoveDownTo:
		return true
	case op > RemoveDownTo && op != RemoveCopy:
		*c = Count{Further: uint32(op-RemoveDownTo) - 1}
	case c.Further > 0:
		c.Further--
	case c.Unsure > 0 && (op == Remove || op == RemoveAnnounced && hasChild):
		c.Unsure--
	default:
		return true
	}
	return false
}

// StoreOp returns the effect of a store event. rooted reports whether its first block has no parent.
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

// RemoveOp returns the effect of a remove event on its block i. detected is Remove, RemoveAnnounced or RemoveCopy: the effect
// unless the event or the rule says otherwise.
func RemoveOp(rule feed.CopyRule, e *wire.Event, i int, detected Op) Op {
	switch {
	case e.Rare != nil && len(e.Rare.RemainingCopies) == len(e.BlockHashes):
		return RemoveDownTo + Op(min(e.Rare.RemainingCopies[i], math.MaxUint32-uint32(RemoveDownTo)-1))
	case rule == feed.CopyRuleAnnouncedLast:
		return RemoveAll
	default:
		return detected
	}
}

// Detects reports whether a Detector examines an event.
func Detects(rule feed.CopyRule, e *wire.Event) bool {
	return rule == feed.CopyRuleDetected && e.Tier == kvblock.TierDevice
}

package copies

import (
	"iter"

	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Detector finds out which engines of a worker announce blocks that they reuse. An announcement is a store without a parent, of at least
// two blocks that are all present, which the next store of the same attention group in the same batch continues.
//
// Blocks that an engine loads from a lower tier are stored in the same way, as further copies. An engine that announces does
// so whenever it reuses blocks: it stores nothing below a present block with another child unless an announcement of that
// block precedes. Such a store is a branch. The rules:
//
//  1. An engine announces after minAnnouncements announcements with a block that no lower tier has, or after
//     minAnnouncements of any blocks if there are at least branchRatio times as many as branches.
//  2. It does until it restarts or clears its cache.
//
// The zero value is ready.
type Detector struct {
	counts     map[engine]Counts
	candidates []candidate
	// root is the last block of the current batch's last store, if that has no parent.
	root    uint64
	hasRoot bool
	// changed are the engines whose counts have changed since Changes; nil if that is not recorded.
	changed map[engine]struct{}
}

// Counts are the numbers of an engine's stores by which it is decided whether it announces.
type Counts struct {
	// Announcements is the number of stores that may be announcements. Without lower tiers it is counted up to minAnnouncements.
	Announcements uint32
	// Certain is the number of those with a block that no lower tier has, up to minAnnouncements, and minAnnouncements if
	// the engine announces.
	Certain uint32
	// Branches is the number of branches. It is counted while there are lower tiers.
	Branches uint32
}

const (
	minAnnouncements = 3
	branchRatio      = 4
	// maxCandidates bounds the candidates of a batch. Models have a few attention groups.
	maxCandidates = 16
)

type engine struct {
	rank   uint32
	source int
}

// candidate is a store of the current batch that is an announcement if the next store of its attention group continues it.
type candidate struct {
	group     int64
	hasGroup  bool
	lastBlock uint64
	certain   bool
}

// Blocks are the blocks of an engine.
type Blocks interface {
	// HasAll reports whether device memory has all blocks of a store.
	HasAll(e *wire.Event) bool
	// LowerHasAll reports whether lower tiers have all blocks of a store.
	LowerHasAll(e *wire.Event) bool
	// HasChild reports whether device memory has a block and a child of it.
	HasChild(block uint64) bool
}

// BeginBatch forgets the previous batch.
func (d *Detector) BeginBatch() { d.candidates, d.hasRoot = d.candidates[:0], false }

// Reset forgets the counts of an engine that restarted or cleared its cache.
func (d *Detector) Reset(rank uint32, source int) {
	d.set(engine{rank, source}, Counts{})
	d.BeginBatch()
}

// ResetRank forgets the counts of all sources of a rank.
func (d *Detector) ResetRank(rank uint32) {
	for e := range d.counts {
		if e.rank == rank {
			d.set(e, Counts{})
		}
	}
	d.BeginBatch()
}

// set sets the counts of an engine.
func (d *Detector) set(e engine, c Counts) {
	if d.counts[e] == c {
		return
	}
	if d.changed != nil {
		d.changed[e] = struct{}{}
	}
	if c == (Counts{}) {
		delete(d.counts, e)
		return
	}
	if d.counts == nil {
		d.counts = make(map[engine]Counts)
	}
	d.counts[e] = c
}

// RecordChanges records changes for Changes from now on.
func (d *Detector) RecordChanges() { d.changed = make(map[engine]struct{}) }

// Changes yields the counts of the engines whose counts have changed since it was last called.
func (d *Detector) Changes() iter.Seq[*statev1.Announcements] {
	return func(yield func(*statev1.Announcements) bool) {
		for e := range d.changed {
			delete(d.changed, e)
			if !yield(d.state(e)) {
				return
			}
		}
	}
}

// All yields the counts that are not zero.
func (d *Detector) All() iter.Seq[*statev1.Announcements] {
	return func(yield func(*statev1.Announcements) bool) {
		for e := range d.counts {
			if !yield(d.state(e)) {
				return
			}
		}
	}
}

func (d *Detector) state(e engine) *statev1.Announcements {
	c := d.counts[e]
	return &statev1.Announcements{
		DpRank: e.rank, Source: uint32(e.source), Count: c.Announcements, Loads: c.Announcements - c.Certain, Branches: c.Branches,
	}
}

// Restore sets the counts of an engine. It records no change.
func (d *Detector) Restore(s *statev1.Announcements) {
	changed, n := d.changed, s.GetCount()
	d.changed = nil
	d.set(engine{s.GetDpRank(), int(s.GetSource())}, Counts{n, min(n-min(n, s.GetLoads()), minAnnouncements), s.GetBranches()})
	d.changed = changed
}

// Seen reports whether a store of an engine may have been an announcement.
func (d *Detector) Seen(rank uint32, source int) bool {
	return d.counts[engine{rank, source}].Announcements > 0
}

// SetAnnounces records that an engine announces blocks.
func (d *Detector) SetAnnounces(rank uint32, source int) {
	from := engine{rank, source}
	c := d.counts[from]
	c.Announcements = max(c.Announcements, minAnnouncements)
	c.Certain = minAnnouncements
	d.set(from, c)
}

// Announces reports whether an engine announces blocks.
func (d *Detector) Announces(rank uint32, source int) bool {
	return d.counts[engine{rank, source}].announces()
}

// Branches reports whether an engine has so many branches that a present block with a child may have been loaded.
func (d *Detector) Branches(rank uint32, source int) bool {
	c := d.counts[engine{rank, source}]
	return uint64(c.Announcements) <= branchRatio*uint64(c.Branches)
}

func (c Counts) announces() bool { return c.Certain == minAnnouncements }

// Store examines a store event, before it is applied. rooted reports whether the event's first block has no parent, lower
// whether lower tiers of the rank have been used. It reports whether Blocks.HasChild is going to be needed.
func (d *Detector) Store(rank uint32, source int, e *wire.Event, rooted, lower bool, blocks Blocks) bool {
	if len(e.BlockHashes) == 0 || !lower && !rooted && len(d.candidates) == 0 && len(d.counts) == 0 {
		return false
	}
	from := engine{rank, source}
	c := d.counts[from]
	if !lower && c.announces() {
		return true
	}
	if next, ok := d.confirm(e, rooted); ok {
		c.Announcements = increment(c.Announcements)
		if next.certain && !c.announces() {
			c.Certain++
		}
		if c.Announcements >= minAnnouncements && uint64(c.Announcements) >= branchRatio*uint64(c.Branches) {
			c.Certain = minAnnouncements
		}
	}
	if lower && !rooted && (!d.hasRoot || e.Parent != d.root) && blocks.HasChild(e.Parent) && !blocks.LowerHasAll(e) {
		c.Branches = increment(c.Branches)
	}
	d.set(from, c)
	last := e.BlockHashes[len(e.BlockHashes)-1]
	d.root, d.hasRoot = last, rooted
	if rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown && len(d.candidates) < maxCandidates && blocks.HasAll(e) {
		d.candidates = append(d.candidates, candidate{e.GroupIdx, e.HasGroupIdx, last, !lower || !blocks.LowerHasAll(e)})
	}
	return lower || c.Announcements > 0
}

// increment increments a count, which saturates.
func increment(n uint32) uint32 { return n + min(1, ^n) }

// confirm removes the candidate of an event's attention group, and reports whether the event continues it.
func (d *Detector) confirm(e *wire.Event, rooted bool) (c candidate, ok bool) {
	for i, c := range d.candidates {
		if c.group == e.GroupIdx && c.hasGroup == e.HasGroupIdx {
			d.candidates = append(d.candidates[:i], d.candidates[i+1:]...)
			return c, !rooted && e.Parent == c.lastBlock
		}
	}
	return candidate{}, false
}

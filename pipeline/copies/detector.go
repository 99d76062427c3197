package copies

import (
	"iter"

	"github.com/kvcast/kvcast/ingest/wire"
)

// Detector finds out which engines of a worker announce blocks that they reuse. An engine does
// after minAnnouncements announcements, until it restarts or clears its cache. An announcement
// is a store without a parent, of at least two blocks that are all present, which the next
// store of the same attention group in the same batch continues. The zero value is ready.
type Detector struct {
	// announcements are the numbers of announcements by engine, up to minAnnouncements.
	announcements map[engine]uint8
	candidates    []candidate
	// changed are the engines whose number has changed since Changes; nil if that is not recorded.
	changed map[engine]struct{}
}

// Verdict is the number of announcements of an engine, up to three.
type Verdict struct {
	Rank          uint32
	Source        int
	Announcements uint8
}

const (
	minAnnouncements = 3
	// maxCandidates bounds the candidates of a batch. Models have a few attention groups.
	maxCandidates = 16
)

type engine struct {
	rank   uint32
	source int
}

// candidate is a store of the current batch that is an announcement if the next store of its
// attention group continues it.
type candidate struct {
	group     int64
	hasGroup  bool
	lastBlock uint64
}

// BeginBatch forgets the previous batch.
func (d *Detector) BeginBatch() { d.candidates = d.candidates[:0] }

// Reset forgets the announcements of an engine that restarted or cleared its cache.
func (d *Detector) Reset(rank uint32, source int) {
	d.set(engine{rank, source}, 0)
	d.BeginBatch()
}

// ResetRank forgets the announcements of all sources of a rank.
func (d *Detector) ResetRank(rank uint32) {
	for e := range d.announcements {
		if e.rank == rank {
			d.set(e, 0)
		}
	}
	d.BeginBatch()
}

// set sets the number of an engine's announcements.
func (d *Detector) set(e engine, n uint8) {
	if d.announcements[e] == n {
		return
	}
	if d.changed != nil {
		d.changed[e] = struct{}{}
	}
	if n == 0 {
		delete(d.announcements, e)
		return
	}
	if d.announcements == nil {
		d.announcements = make(map[engine]uint8)
	}
	d.announcements[e] = n
}

// RecordChanges records changes for Changes from now on.
func (d *Detector) RecordChanges() { d.changed = make(map[engine]struct{}) }

// Changes yields the engines whose numbers have changed since it was last called.
func (d *Detector) Changes() iter.Seq[Verdict] {
	return func(yield func(Verdict) bool) {
		for e := range d.changed {
			delete(d.changed, e)
			if !yield(Verdict{e.rank, e.source, d.announcements[e]}) {
				return
			}
		}
	}
}

// All yields the engines that have made announcements.
func (d *Detector) All() iter.Seq[Verdict] {
	return func(yield func(Verdict) bool) {
		for e, n := range d.announcements {
			if !yield(Verdict{e.rank, e.source, n}) {
				return
			}
		}
	}
}

// Restore sets the number of an engine's announcements. It records no change.
func (d *Detector) Restore(v Verdict) {
	changed := d.changed
	d.changed = nil
	d.set(engine{v.Rank, v.Source}, min(v.Announcements, minAnnouncements))
	d.changed = changed
}

// Announces reports whether an engine announces blocks.
func (d *Detector) Announces(rank uint32, source int) bool {
	return d.announcements[engine{rank, source}] == minAnnouncements
}

// Store examines a store event, and reports whether its engine has made any announcement.
// rooted reports whether the event's first block has no parent, allPresent whether the engine
// already has all its blocks.
func (d *Detector) Store(rank uint32, source int, e *wire.Event, rooted bool, allPresent func() bool) bool {
	if !rooted && len(d.candidates) == 0 && len(d.announcements) == 0 || len(e.BlockHashes) == 0 {
		return false
	}
	from := engine{rank, source}
	n := d.announcements[from]
	if n == minAnnouncements {
		return true
	}
	if d.confirm(e, rooted) {
		n++
		d.set(from, n)
	}
	if rooted && len(e.BlockHashes) >= 2 && e.Origin == wire.OriginUnknown && len(d.candidates) < maxCandidates && allPresent() {
		last := e.BlockHashes[len(e.BlockHashes)-1]
		d.candidates = append(d.candidates, candidate{e.GroupIdx, e.HasGroupIdx, last})
	}
	return n > 0
}

// confirm removes the candidate of an event's attention group, and reports whether the event
// continues it.
func (d *Detector) confirm(e *wire.Event, rooted bool) bool {
	for i, c := range d.candidates {
		if c.group == e.GroupIdx && c.hasGroup == e.HasGroupIdx {
			d.candidates = append(d.candidates[:i], d.candidates[i+1:]...)
			return !rooted && e.Parent == c.lastBlock
		}
	}
	return false
}

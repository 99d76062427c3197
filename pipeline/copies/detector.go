package copies

import (
	"maps"

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
	delete(d.announcements, engine{rank, source})
	d.BeginBatch()
}

// ResetRank forgets the announcements of all sources of a rank.
func (d *Detector) ResetRank(rank uint32) {
	maps.DeleteFunc(d.announcements, func(e engine, _ uint8) bool { return e.rank == rank })
	d.BeginBatch()
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
		if d.announcements == nil {
			d.announcements = make(map[engine]uint8)
		}
		d.announcements[from] = n
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

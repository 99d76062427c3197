package pipeline

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline/consolidate"
	"github.com/kvcast/kvcast/pipeline/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Consolidation of the events of a worker with several sources, before they are merged.
// The events of other workers skip it.

// A name has room for each source that there may be.
const _ = uint(consolidate.MaxSources - feed.MaxSources)

// consolidation is how a lane consolidates its sources.
type consolidation uint8

const (
	// oneSource disables consolidation.
	oneSource consolidation = iota
	// dedup emits a block once, in the device tier: each dp rank has a tracker.
	dedup
	// passthrough emits the events of all sources, in their own tiers.
	passthrough
)

func consolidationOf(w feed.Worker) consolidation {
	switch {
	case len(w.Sources) < 2:
		return oneSource
	case w.Consolidate == feed.ConsolidatePassthrough:
		return passthrough
	}
	return dedup
}

// sourceNames returns the names of sources in lookups: the engine, with the index where
// several have the same.
func sourceNames(w feed.Worker) []string {
	names := make([]string, len(w.Sources))
	for i, engine := range w.Sources {
		names[i] = string(engine)
		for k, other := range w.Sources {
			if k != i && other == engine {
				names[i] = fmt.Sprintf("%s[%d]", engine, i)
			}
		}
	}
	return names
}

// sharedRank is the additional state of a dp rank with several sources.
type sharedRank struct {
	tracker *consolidate.Tracker // with dedup
	// doubtful are the sources that may hold other blocks than is known: events were lost, or
	// blocks refused, since they last released all their blocks.
	doubtful []bool
	// used are the tiers that each source has stored into since then, with passthrough.
	used []journal.Tiers
}

// shared returns the state of a rank with several sources, and creates it if necessary.
func (l *Lane) shared(r *rankState) *sharedRank {
	if r.shared == nil {
		n := len(l.sourceNames)
		r.shared = &sharedRank{doubtful: make([]bool, n), used: make([]journal.Tiers, n)}
		if l.consolidation == dedup {
			r.shared.tracker = consolidate.New(n, l.cfg.MaxBlocksPerRank, l.cfg.Blocks, l.cfg.AttributeBytes, &l.counts.tracker.Counts)
		}
	}
	return r.shared
}

// consolidate applies an event of one of several sources.
func (l *Lane) consolidate(b *feed.Batch, e *wire.Event) {
	r := l.rank(b.Rank)
	s := l.shared(r)
	switch {
	case e.Kind == wire.KindCleared:
		l.flush(flushUnmergeable)
		l.releaseSource(b, r, kvcastv1.Cleared_REASON_ENGINE_CLEARED)
	case e.Kind == wire.KindStored && l.consolidation == passthrough:
		if len(e.BlockHashes) > 0 {
			s.used[b.Source] |= journal.TierBit(uint8(e.Tier))
		}
		l.store(b, e)
	case e.Kind == wire.KindStored:
		refused := l.counts.tracker.refused()
		rooted := !e.HasParent || e.Parent == 0 && !s.tracker.Knows(b.Source, 0)
		s.tracker.Store(b.Source, e, l.storeOp(b, e, rooted))
		l.emitChanges(b, s.tracker, e)
		for why, n := range l.counts.tracker.refused() {
			if n -= refused[why]; n == 0 {
				continue
			}
			s.doubtful[b.Source] = true // it may hold unknown blocks
			if !r.gapReported(refusal(why)) {
				l.flush(flushUnmergeable) // a Gap follows
			}
			l.reportRefused(r, b.Rank, refusal(why), int(n))
		}
	case e.Kind == wire.KindRemoved && l.consolidation == passthrough:
		l.remove(b, e)
	case e.Kind == wire.KindRemoved:
		announces := l.announces(b, e)
		for i, hash := range e.BlockHashes {
			s.tracker.Remove(b.Source, hash, copies.RemoveOp(b.CopyRule, e, i, announces))
		}
		l.emitChanges(b, s.tracker, nil)
	}
}

// emitChanges stores and removes the blocks that a tracker's changes name; stored is the
// event that caused them.
func (l *Lane) emitChanges(b *feed.Batch, t *consolidate.Tracker, stored *wire.Event) {
	out, gone := t.Drain()
	for _, o := range out {
		if o.Removed {
			l.event = wire.Event{Kind: wire.KindRemoved, Tier: wire.TierDevice, BlockHashes: gone[o.I:o.J]}
			l.remove(b, &l.event)
			continue
		}
		e := &l.event
		*e = *stored
		e.Tier = wire.TierDevice
		e.HasParent, e.Parent = !o.Rooted, o.Parent
		e.BlockHashes = stored.BlockHashes[o.I:o.J]
		if len(stored.TokensHashes) == len(stored.BlockHashes) {
			e.TokensHashes = stored.TokensHashes[o.I:o.J]
		}
		e.Tokens = nil
		if size := int(e.BlockSize); len(stored.Tokens) >= size*len(stored.BlockHashes) {
			e.Tokens = stored.Tokens[size*o.I : size*o.J]
		}
		l.store(b, e)
	}
	l.event = wire.Event{} // it holds a batch's memory
}

// releaseSource removes all blocks of a source whose engine restarted or cleared its cache.
// No run must be pending.
func (l *Lane) releaseSource(b *feed.Batch, r *rankState, reason kvcastv1.Cleared_Reason) {
	l.shared(r).doubtful[b.Source] = false
	l.announcements.Reset(b.Rank, b.Source)
	switch {
	case l.consolidation == passthrough:
		l.clearTiersOf(b, r, reason)
	case l.shared(r).tracker.ClearSource(b.Source):
		l.emitEmpty(b.Rank, r, kvcastv1.Cleared_REASON_SOURCE_CLEARED)
	default:
		l.emitChanges(b, r.shared.tracker, nil) // blocks without another holder
	}
}

// emitEmpty emits Cleared where no source of a rank holds a block. The rank is complete
// again unless a source is doubtful that has not released its blocks since.
func (l *Lane) emitEmpty(rank uint32, r *rankState, reason kvcastv1.Cleared_Reason) {
	l.drop(r)
	if slices.Contains(r.shared.doubtful, true) {
		reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	}
	l.emitCleared(rank, reason)
}

// clearTiersOf clears the tiers that a source alone has stored into, with passthrough. It is
// unknown which blocks of the other tiers are the source's:
//
//   - They are kept, with a Gap: those that the source released mislead a router until they
//     are stored or removed again. If they were cleared, the router would lack those of the
//     other sources, which do not store them again while they hold them.
//   - With OnGapClear they are cleared.
func (l *Lane) clearTiersOf(b *feed.Batch, r *rankState, reason kvcastv1.Cleared_Reason) {
	used := r.shared.used[b.Source]
	r.shared.used[b.Source] = 0
	others := journal.Tiers(0)
	for _, tiers := range r.shared.used {
		others |= tiers
	}
	if others == 0 {
		l.emitEmpty(b.Rank, r, reason)
		return
	}
	var cleared []kvcastv1.Tier
	kept := false
	for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
		bit, t := journal.TierBit(uint8(tier)), r.tables[tier]
		switch {
		case used&bit == 0 || others&bit != 0 && (t == nil || t.blocks.len() == 0):
			continue
		case others&bit == 0:
		case l.cfg.OnGap != OnGapClear && t.gap():
			kept = true
			continue
		default:
			reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
		}
		cleared = append(cleared, kvcastv1.Tier(tier))
		l.dropTable(r, tier)
	}
	if len(cleared) > 0 { // none would mean all
		l.emitCleared(b.Rank, reason, cleared...)
	}
	if kept {
		l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(b.Rank), Event: &kvcastv1.RouterEvent_Gap{
			Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_SHARED_TIER},
		}})
	}
}

// beginGap records that events of a source were lost, and reports whether the rank's blocks
// are kept. They are not once gap numbers are exhausted.
func (l *Lane) beginGap(r *rankState, source int) bool {
	if l.consolidation == dedup {
		return l.shared(r).tracker.Gap(source)
	}
	return r.gap()
}

// everySource stands for all sources where one is not known.
const everySource = -1

// markDoubtful marks one of several sources, or every source, as doubtful.
func (l *Lane) markDoubtful(r *rankState, source int) {
	if l.consolidation == oneSource {
		return
	}
	doubtful := l.shared(r).doubtful
	for i := range doubtful {
		if source == everySource || i == source {
			doubtful[i] = true
		}
	}
}

// tracker returns the tracker of a rank; nil where it has none.
func (l *Lane) tracker(rank uint32) *consolidate.Tracker {
	if r := l.ranks[rank]; r != nil && r.shared != nil {
		return r.shared.tracker
	}
	return nil
}

// holders returns the names of the sources that hold a block; see Tracker.Holders.
func (l *Lane) holders(rank uint32, hash uint64, also []uint32) (names []string) {
	if t := l.tracker(rank); t != nil {
		for _, source := range t.Holders(hash, also...) {
			names = append(names, l.sourceNames[source])
		}
	}
	return names
}

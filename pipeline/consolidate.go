package pipeline

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// A tracker can represent all sources of a worker.
const _ = uint(consolidate.MaxSources - feed.MaxSources)

// consolidation is how a lane consolidates its sources, before events are merged.
type consolidation uint8

const (
	// oneSource is for a worker with one source: events are not consolidated.
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

// sourceNames returns the sources' names in lookups: the engine, followed by the source's index if several sources have the same engine.
func sourceNames(w feed.Worker) []string {
	names, engines := make([]string, len(w.Sources)), make(map[feed.Engine]int)
	for _, engine := range w.Sources {
		engines[engine]++
	}
	for i, engine := range w.Sources {
		names[i] = string(engine)
		if engines[engine] > 1 {
			names[i] = fmt.Sprintf("%s[%d]", engine, i)
		}
	}
	return names
}

// rankSources is the state of a dp rank with several sources. Slices are indexed by source.
type rankSources struct {
	tracker *consolidate.Tracker // for dedup; nil for passthrough
	// incomplete are the tiers of which events of the source may be lost, or its blocks were refused, since it last cleared them or restarted.
	incomplete []kvblock.Tiers
	// unseen are the tiers below device memory that were incomplete and that the source had not used when it cleared device memory. They do not
	// count as incomplete, but if the source uses one later, that may have older blocks.
	unseen []kvblock.Tiers
	// unproved reports whether batches of the source came from a replay socket that may be another engine's.
	unproved []bool
	// tiers are the tiers that the source has stored into since then, and those that a doubt about it has named.
	tiers []kvblock.Tiers
}

// sources returns the state of the sources of a rank, and creates it if necessary.
func (l *Lane) sources(rank uint32, r *rankState) *rankSources {
	if r.sources == nil {
		n := len(l.sourceNames)
		r.sources = &rankSources{
			incomplete: make([]kvblock.Tiers, n), unseen: make([]kvblock.Tiers, n), unproved: make([]bool, n), tiers: make([]kvblock.Tiers, n),
		}
		if l.consolidation == dedup {
			r.sources.tracker = consolidate.New(n, l.cfg.MaxBlocksPerRank, l.cfg.Blocks, l.cfg.AttributeBytes, &l.counts.tracker)
			r.sources.tracker.SetEvict(l.reserveEvicting)
			l.log.recordTracker(r.sources.tracker, rank)
		}
	}
	return r.sources
}

// consolidate applies an event of one of several sources.
func (l *Lane) consolidate(b *feed.Batch, e *wire.Event) {
	r := l.rank(b.Rank)
	s := l.sources(b.Rank, r)
	switch {
	case e.Kind == wire.KindCleared:
		l.flush(flushUnmergeable)
		l.clearEvent(b, e)
	case e.Kind == wire.KindStored && l.consolidation == passthrough:
		l.useTier(b, s, e)
		l.store(b, e)
	case e.Kind == wire.KindStored:
		l.useTier(b, s, e)
		l.consolidateStore(b, e, r)
	case e.Kind == wire.KindRemoved && l.consolidation == passthrough:
		l.remove(b, e)
	case e.Kind == wire.KindRemoved:
		detected := l.removeOp(b, e)
		for i, hash := range e.BlockHashes {
			op := copies.RemoveOp(b.CopyRule, e, i, detected)
			had := e.Tier > kvblock.TierDevice && s.tracker.Has(b.Source, hash)
			s.tracker.Remove(b.Source, hash, op)
			if !had || s.tracker.Has(b.Source, hash) {
				continue
			}
			for part := wire.PartBefore(hash); s.tracker.Has(b.Source, part); part = wire.PartBefore(part) { // of a chunk
				if s.tracker.Remove(b.Source, part, op); s.tracker.Has(b.Source, part) {
					break
				}
			}
		}
		l.emitChanges(b, s.tracker, nil)
	}
}

// anyTiers reports whether a set of some has a tier.
func anyTiers(sets []kvblock.Tiers) bool {
	return slices.ContainsFunc(sets, func(tiers kvblock.Tiers) bool { return tiers != 0 })
}

// useTier records the tier that a source stores into.
func (l *Lane) useTier(b *feed.Batch, s *rankSources, e *wire.Event) {
	if bit := kvblock.TierBit(uint8(e.Tier)); len(e.BlockHashes) > 0 && s.tiers[b.Source]&bit == 0 {
		s.tiers[b.Source] |= bit
		l.log.sourcesChanged(b.Rank)
	}
}

// markUsed records that a source uses some tiers, of a worker with several: a clear of others says nothing of them.
func (l *Lane) markUsed(rank uint32, r *rankState, source int, tiers kvblock.Tiers) {
	if l.consolidation == oneSource {
		return
	}
	if s := l.sources(rank, r); tiers&^s.tiers[source] != 0 {
		s.tiers[source] |= tiers
		l.log.sourcesChanged(rank)
	}
}

func (l *Lane) consolidateStore(b *feed.Batch, e *wire.Event, r *rankState) {
	before := l.counts.tracker.Refused
	tracker := r.sources.tracker
	rooted := !e.HasParent || e.Parent == 0 && !tracker.Resolves(b.Source, 0)
	tracker.Store(b.Source, e, l.storeOp(b, e, rooted))
	l.emitChanges(b, tracker, e)
	for why, n := range l.counts.tracker.Refused {
		if n == before[why] {
			continue
		}
		l.markIncomplete(b.Rank, r, b.Source)
		if !r.hasReported(gapReason(consolidate.Refusal(why)), kvblock.AllTiers) {
			l.flush(flushUnmergeable) // a Gap follows
		}
		l.reportRefused(r, b.Rank, kvblock.AllTiers, consolidate.Refusal(why), int(n-before[why]))
	}
}

// emitChanges stores and removes the blocks of a tracker's changes. stored is the store event that caused them, if it was one.
func (l *Lane) emitChanges(b *feed.Batch, t *consolidate.Tracker, stored *wire.Event) {
	changes, removed := t.Drain()
	for _, c := range changes {
		e := &l.event
		if c.Removed {
			*e = wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: removed[c.I:c.J]}
			l.remove(b, e)
			continue
		}
		*e = *stored
		e.Tier = kvblock.TierDevice
		e.HasParent, e.Parent = !c.Rooted, c.Parent
		e.BlockHashes = stored.BlockHashes[c.I:c.J]
		if len(stored.TokensHashes) == len(stored.BlockHashes) {
			e.TokensHashes = stored.TokensHashes[c.I:c.J]
		}
		e.Tokens = nil
		if size := int(e.BlockSize); len(stored.Tokens) >= size*len(stored.BlockHashes) {
			e.Tokens = stored.Tokens[size*c.I : size*c.J]
		}
		l.store(b, e)
	}
	l.event = wire.Event{} // drops references to the batch's memory
}

// clearSource removes the blocks of a source whose engine restarted or cleared its cache: all, or with passthrough those of
// one tier, unless it is 0. No run may be pending.
func (l *Lane) clearSource(b *feed.Batch, r *rankState, reason kvcastv1.Cleared_Reason, tier kvblock.Tier) {
	s := l.sources(b.Rank, r)
	used, cleared := s.tiers[b.Source], kvblock.AllTiers
	if tier != 0 {
		cleared = kvblock.TierBit(uint8(tier))
		if l.consolidation == passthrough {
			used &= cleared
		}
	}
	s.tiers[b.Source] &^= used
	s.clear(b.Source, cleared)
	l.log.sourcesChanged(b.Rank)
	l.announcements.Reset(b.Rank, b.Source)
	switch {
	case l.consolidation == passthrough:
		l.clearTiers(b, r, reason, used)
	case s.tracker.ClearSource(b.Source):
		l.emitEmpty(b.Rank, r, kvcastv1.Cleared_REASON_SOURCE_CLEARED)
	default:
		l.emitChanges(b, s.tracker, nil)
	}
}

// clear notes that a source has cleared some tiers. If it has blocks in no other tier, its device memory is complete.
func (s *rankSources) clear(source int, tiers kvblock.Tiers) {
	s.incomplete[source] &^= tiers
	s.unseen[source] &^= tiers
	if s.tiers[source] == 0 && !s.incomplete[source].Has(kvblock.TierDevice) {
		s.unseen[source] |= s.incomplete[source]
		s.incomplete[source], s.unproved[source] = 0, false
	}
}

// mayHold reports whether another source may have blocks in some tiers that are not known.
func (s *rankSources) mayHold(tiers kvblock.Tiers, except int) bool {
	for source, incomplete := range s.incomplete {
		if source != except && (incomplete|s.unseen[source])&tiers != 0 {
			return true
		}
	}
	return false
}

// clearSourceEvent applies an engine's clear of one of several sources.
func (l *Lane) clearSourceEvent(b *feed.Batch, e *wire.Event) {
	r := l.rank(b.Rank)
	others := l.sources(b.Rank, r).tiers[b.Source] & kvblock.AllTiers &^ (1 << e.Tier)
	if l.consolidation == dedup && e.Tier > kvblock.TierDevice {
		// It is not recorded which blocks of the source are in which tier.
		l.doubtNotCleared(b, kvblock.AllTiers)
		return
	}
	l.clearSource(b, r, kvcastv1.Cleared_REASON_ENGINE_CLEARED, e.Tier)
	if e.Tier != 0 && (e.Medium == "" || l.consolidation == dedup) { // the source's blocks in other tiers were removed as well
		l.doubtNotCleared(b, others)
	}
}

// emitEmpty emits Cleared for a rank of which no source has a block. The rank is complete again unless a source is incomplete.
func (l *Lane) emitEmpty(rank uint32, r *rankState, reason kvcastv1.Cleared_Reason) {
	l.drop(r)
	if anyTiers(r.sources.incomplete) {
		reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	}
	l.emitCleared(rank, reason)
	l.repeatUnproved(rank, r)
}

// clearTiers clears those of some tiers that only this source has stored into, for passthrough. In a tier
// that other sources have stored into as well, it is unknown which source has which blocks:
//
//   - With OnGapReport the blocks stay, and a Gap is emitted. Blocks that the source no longer
//     has mislead a router until they are stored or removed again. If the tier were cleared, the
//     router would lack the other sources' blocks, which they do not store again.
//   - With OnGapClear the tier is cleared.
func (l *Lane) clearTiers(b *feed.Batch, r *rankState, reason kvcastv1.Cleared_Reason, used kvblock.Tiers) {
	others := kvblock.Tiers(0)
	for _, tiers := range r.sources.tiers {
		others |= tiers
	}
	if others == 0 {
		l.emitEmpty(b.Rank, r, reason)
		return
	}
	if r.sources.mayHold(used, b.Source) {
		reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	}
	var cleared []kvcastv1.Tier
	stale := uint32(0) // bit n is tier n
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		bit, t := kvblock.TierBit(uint8(tier)), r.tables[tier]
		if used&bit == 0 {
			continue
		}
		if others&bit != 0 {
			if t == nil || t.blocks.table.Len() == 0 {
				continue
			}
			if l.cfg.OnGap != OnGapClear && t.gap() {
				stale |= uint32(bit)
				continue
			}
			reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
		}
		cleared = append(cleared, kvcastv1.Tier(tier))
		l.dropTable(r, tier)
	}
	if stale != 0 {
		l.log.staleTiers(l.entry.events, b.Rank, stale)
	}
	if len(cleared) > 0 { // Cleared without tiers means all tiers
		l.emitCleared(b.Rank, reason, cleared...)
		l.repeatUnproved(b.Rank, r, cleared...)
	}
	if stale != 0 {
		l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(b.Rank), Event: &kvcastv1.RouterEvent_Gap{
			Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_SHARED_TIER, Tiers: tiersOf(kvblock.Tiers(stale))},
		}})
	}
}

// beginGap makes the blocks of a source of a rank stale. It returns false if the source has no further
// generation; the blocks must then be cleared.
func (l *Lane) beginGap(rank uint32, r *rankState, source int) bool {
	if l.consolidation == dedup {
		return l.sources(rank, r).tracker.Gap(source)
	}
	return r.gap()
}

// allSources is all sources of a worker, in place of a source's index.
const allSources = -1

// markIncomplete marks a source of a rank, or allSources, as incomplete.
func (l *Lane) markIncomplete(rank uint32, r *rankState, source int) {
	if l.consolidation == oneSource {
		return
	}
	incomplete := l.sources(rank, r).incomplete
	for i := range incomplete {
		if (source == allSources || i == source) && incomplete[i] != kvblock.AllTiers {
			incomplete[i] = kvblock.AllTiers
			l.log.sourcesChanged(rank)
		}
	}
}

// tracker returns the tracker of a rank; nil if there is none.
func (l *Lane) tracker(rank uint32) *consolidate.Tracker {
	if r := l.ranks[rank]; r != nil && r.sources != nil {
		return r.sources.tracker
	}
	return nil
}

// Aliases returns the blocks of a worker with several sources that one of the block hashes names for one of the sources: by the block hash
// that events have, the names of the sources that hold the block. It returns nil for a worker with one source.
func (p *Pipeline) Aliases(worker string, rank uint32, hashes []uint64) map[uint64][]string {
	l := p.lane(worker)
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	tr := l.tracker(rank)
	if tr == nil {
		return nil
	}
	names := make(map[uint64][]string)
	for hash, sources := range tr.Lookup(hashes...) {
		names[hash] = []string{}
		for _, source := range sources {
			names[hash] = append(names[hash], l.sourceNames[source])
		}
	}
	return names
}

package pipeline

import (
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// flush applies the pending run to its table, and adds the resulting event to the current entry.
func (l *Lane) flush(why flushReason) {
	r := &l.pending
	if r.empty() {
		return
	}
	l.counts.flushes[why]++
	if r.key.kind == wire.KindStored {
		l.flushStores(r)
	} else {
		l.flushRemoves(r)
	}
	r.reset()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
}

func (l *Lane) flushStores(r *run) {
	rank := l.rank(r.key.rank)
	t := l.newTable(rank, r.key.tier)
	slot, ok := t.acquireAttributes(r)
	if !ok {
		l.reportRefused(rank, r.key.rank, l.tiersOfRun(r), consolidate.RefusedAttributes, len(r.hashes))
		return
	}
	l.prefetchRun(t, r)
	before, n := t.blocks.table.Len(), len(r.hashes)
	if rank.blocks()+n > l.cfg.MaxBlocksPerRank || !l.tableBlocks.Reserve(int64(n)) {
		l.storeWithin(rank, t, r, slot)
	} else {
		t.storeRun(r, slot)
		l.tableBlocks.Release(int64(before + n - t.blocks.table.Len())) // the blocks that existed
		l.countLower(r.key.tier, t.blocks.table.Len()-before)
		l.emitStored(r)
	}
	t.attrs.Release(slot)
}

// flushRemoves applies removes. The block that is unknown may be one that was skipped for its size: such a remove is not emitted.
func (l *Lane) flushRemoves(r *run) {
	rank := l.rank(r.key.rank)
	t := l.newTable(rank, r.key.tier)
	skipped := rank.reported[r.key.tier].has(kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH)
	isTracked := r.key.tier == kvblock.TierDevice && rank.hasCopies()
	l.prefetchRun(t, r)
	before := t.blocks.table.Len()
	gone := r.hashes[:0]
	for i, hash := range r.hashes {
		op := r.op(i)
		if skipped && !t.has(hash) {
			continue
		}
		if t.remove(hash, op) {
			if gone = append(gone, hash); isTracked && t.deleted != 0 {
				rank.recordRemoved(hash, t.deleted)
			}
		} else {
			l.log.suppress(&r.key, l.entry.events, op, hash)
		}
	}
	l.log.endSuppressed(&r.key, l.entry.events)
	l.releaseBlocks(r.key.tier, before-t.blocks.table.Len())
	l.counts.removesSuppressed += uint64(len(r.hashes) - len(gone))
	l.emitRemoved(r.key.rank, r.key.tier, gone, r.key.note)
}

// prefetchRun loads what is needed to find a run's blocks, unless prefetch did.
func (l *Lane) prefetchRun(t *table, r *run) {
	if !l.prefetched && len(r.hashes) > 1 {
		t.blocks.table.Prefetch(r.hashes)
	}
}

// emitStored adds an event for stored blocks, if there are any.
func (l *Lane) emitStored(r *run) {
	if r.empty() {
		return
	}
	l.rank(r.key.rank).used |= 1 << r.key.tier
	l.entry.stored(l.head(r.key.rank, r.key.tier), r)
	l.log.storeOps(l.entry.events-1, r.ops)
	l.counts.events[kvcastv1.RouterEventStoredField]++
	l.counts.blocksStored += uint64(len(r.hashes))
}

// emitRemoved adds an event for removed blocks, if there are any.
func (l *Lane) emitRemoved(rank uint32, tier kvblock.Tier, gone []uint64, reason string) {
	if len(gone) == 0 {
		return
	}
	l.entry.added(encode.AppendRemoved(l.entry.buf, kvcastv1.EntryEventsField, l.head(rank, tier), gone, reason), 1<<tier)
	l.counts.events[kvcastv1.RouterEventRemovedField]++
	l.counts.blocksRemoved += uint64(len(gone))
}

// flushAlone emits the pending run of earlier batches as an entry of its own.
func (l *Lane) flushAlone(why flushReason) {
	if l.pending.empty() {
		return
	}
	l.entry.begin(l.pending.engineTime, l.pending.ingestTime)
	l.flush(why)
	l.commit()
}

// head returns the head of the next event, with a new event id.
func (l *Lane) head(rank uint32, tier kvblock.Tier) encode.Head {
	l.lastEventID++
	return encode.Head{ID: l.lastEventID, Rank: rank, Tier: kvcastv1.Tier(tier)}
}

// emit adds an event of any other kind than stored and removed to the current entry, with the next event id.
func (l *Lane) emit(e *kvcastv1.RouterEvent) {
	l.lastEventID++
	e.EventId = l.lastEventID
	l.entry.other(e)
	l.counts.events[e.ProtoReflect().WhichOneof(eventKinds).Number()]++
	if e.DpRank != nil {
		l.rank(e.GetDpRank()).emitted(e)
	}
}

// emitted applies an event of a rare kind to what events have reported of the rank.
func (r *rankState) emitted(e *kvcastv1.RouterEvent) {
	switch v := e.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Cleared:
		r.cleared(v.Cleared)
	case *kvcastv1.RouterEvent_Gap:
		r.gapped(v.Gap)
	case *kvcastv1.RouterEvent_GroupsOmitted:
		r.groupsOmitted = true
	case *kvcastv1.RouterEvent_Groups:
		r.groups = v.Groups
	case *kvcastv1.RouterEvent_Resolved:
		r.resolved(v.Resolved)
	}
}

// cleared applies an emitted Cleared to what events have reported of the rank.
func (r *rankState) cleared(c *kvcastv1.Cleared) {
	var after gapReasons // that hold after it
	if c.GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
		after = 1 << kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE
	}
	for _, tier := range c.GetTiers() {
		if 0 < tier && tier < kvblock.TierEnd {
			r.reported[tier] = after
			r.unseen &^= 1 << tier
		}
	}
	if len(c.GetTiers()) > 0 {
		return
	}
	if after == 0 { // the doubts end
		r.unseen |= r.doubted() & kvblock.LowerTiers
	}
	r.reported, r.used = [kvblock.TierEnd]gapReasons{}, 0
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		r.reported[tier] = after
	}
	if c.GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED {
		r.groupsOmitted, r.groups, r.unseen = false, nil, 0
		r.otherGroups.Restarted()
	}
}

// doubted returns the tiers of which Gaps have reported anything that does not end by itself.
func (r *rankState) doubted() (tiers kvblock.Tiers) {
	for tier, reasons := range r.reported {
		if reasons&^(1<<kvcastv1.Gap_REASON_REPLAY_UNPROVED) != 0 {
			tiers |= 1 << tier
		}
	}
	return tiers
}

// gapped applies an emitted Gap to what Gaps have reported of the rank.
func (r *rankState) gapped(g *kvcastv1.Gap) {
	tiers := kvblock.AllTiers
	if len(g.GetTiers()) > 0 {
		tiers = 0
		for _, tier := range g.GetTiers() {
			tiers |= kvblock.AllTiers & (1 << (tier & 7))
		}
		r.used |= tiers
	}
	for tier := range r.reported {
		if tiers.Has(kvblock.Tier(tier)) {
			r.reported[tier] |= 1 << uint(g.GetReason())
		}
	}
	if g.GetReason() == kvcastv1.Gap_REASON_TIER_NOT_CLEARED {
		r.unseen &^= tiers
	}
}

// resolved applies an emitted Resolved to what Gaps have reported of the rank.
func (r *rankState) resolved(v *kvcastv1.Resolved) {
	for _, reason := range v.GetReasons() {
		for tier := range r.reported {
			r.reported[tier] &^= 1 << (uint(reason) & 31)
		}
	}
}

// omitGroups emits GroupsOmitted for a rank unless it still holds.
//
// It is not recorded which source of a worker has other groups. If another source restarts while the rank has no blocks, GroupsOmitted ends
// too early, and the next batch with omitted events emits it again.
func (l *Lane) omitGroups(rank uint32) {
	if l.rank(rank).groupsOmitted {
		return
	}
	l.flush(flushUnmergeable)
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_GroupsOmitted{
		GroupsOmitted: &kvcastv1.GroupsOmitted{},
	}})
}

// clear removes all blocks of a rank and emits Cleared. The rank is then complete, unless the reason is UNREPAIRED_GAP.
func (l *Lane) clear(rank uint32, reason kvcastv1.Cleared_Reason) {
	r := l.rank(rank)
	l.announcements.ResetRank(rank)
	l.drop(r)
	if r.sources != nil {
		r.sources = nil
		l.log.sourcesChanged(rank)
	}
	l.emitCleared(rank, reason)
}

// emitCleared emits that a rank is empty in the given tiers, or in all tiers if none is given.
func (l *Lane) emitCleared(rank uint32, reason kvcastv1.Cleared_Reason, tiers ...kvcastv1.Tier) {
	l.emit(&kvcastv1.RouterEvent{DpRank: &rank, Event: &kvcastv1.RouterEvent_Cleared{
		Cleared: &kvcastv1.Cleared{Reason: reason, Tiers: tiers},
	}})
}

// known reports whether a rank or its pending run has a block, in any tier.
func (l *Lane) known(rank uint32, hash uint64) bool {
	if l.pending.stores(rank, hash) {
		return true
	}
	for _, t := range l.rank(rank).tables {
		if t.has(hash) {
			return true
		}
	}
	return false
}

func (l *Lane) rank(rank uint32) *rankState {
	r := l.findRank(rank)
	if r == nil {
		r = &rankState{number: rank}
		l.ranks[rank] = r
	}
	l.recent = r
	return r
}

// findRank returns the state of a rank; nil if it has none.
func (l *Lane) findRank(rank uint32) *rankState {
	if l.recent != nil && l.recent.number == rank {
		return l.recent
	}
	return l.ranks[rank]
}

// newTable returns the table of a rank's tier, and creates it if necessary.
func (l *Lane) newTable(r *rankState, tier kvblock.Tier) *table {
	if r.tables[tier] == nil {
		r.tables[tier] = newTable(l.attributes)
	}
	return r.tables[tier]
}

// dropTable drops the blocks of a rank's tier.
func (l *Lane) dropTable(r *rankState, tier kvblock.Tier) {
	if tier == kvblock.TierDevice {
		r.recordCleared()
	}
	if t := r.tables[tier]; t != nil {
		l.releaseBlocks(tier, t.blocks.table.Len())
		t.attrs.Reset()
		r.tables[tier] = nil
	}
	l.tableBlocks.Release(int64(r.otherGroups.Drop(tier)))
}

// drop drops the blocks of a rank and the state of its sources.
func (l *Lane) drop(r *rankState) {
	for tier := range r.tables {
		l.dropTable(r, kvblock.Tier(tier))
	}
	if r.sources != nil && r.sources.tracker != nil {
		r.sources.tracker.Reset()
	}
}

package pipeline

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	"github.com/kvcast/kvcast/pipeline/internal/groups"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxSourceIndex bounds the indexes of sources in stored state.
const maxSourceIndex = feed.MaxRanks

// restoreWorker returns a worker from its stored state.
func restoreWorker(state *statev1.Worker) feed.Worker {
	w := feed.Worker{
		Name: state.GetName(), Model: state.GetModel(), BlockSize: state.GetBlockSize(), Endpoint: state.GetEndpoint(),
		Labels: state.GetLabels(), Ranks: state.GetRanks(), Consolidate: feed.Consolidate(state.GetConsolidate()),
		Pool: state.GetPool(), Pools: state.GetPools(),
	}
	for _, engine := range state.GetSources() {
		w.Sources = append(w.Sources, feed.Engine(engine))
	}
	return w
}

// restoreLane makes a lane from a checkpoint.
func restoreLane(cfg *Config, state *statev1.Checkpoint) (w *recoveredWorker, err error) {
	s := state.GetLane()
	if s.GetWorker().GetName() == "" {
		return nil, errors.New("worker without a name")
	}
	if n := len(s.GetWorker().GetSources()); n > feed.MaxSources {
		return nil, fmt.Errorf("worker with %d sources", n)
	}
	l := newLane(cfg, restoreWorker(s.GetWorker()))
	defer func() {
		if err != nil {
			l.discard()
		}
	}()
	w = &recoveredWorker{
		name: l.worker, model: l.desc.Model, lastEventID: s.GetLastEventId(), changes: s.GetChanges(),
		lane: l, ingest: s.GetIngest(),
	}
	for _, rank := range s.GetRanks() {
		r := l.rank(rank.GetDpRank())
		r.groupsOmitted, r.groups = rank.GetGroupsOmitted(), rank.GetGroups()
		r.restoreReported(rank)
		if rank.Sources != nil {
			if err := l.restoreSources(rank.Sources); err != nil {
				return nil, err
			}
		}
		if err := l.restoreTracker(r, rank.GetTracker()); err != nil {
			return nil, err
		}
	}
	for _, table := range state.GetTables() {
		tier, err := storedTier(uint64(table.GetTier()))
		if err != nil {
			return nil, err
		}
		r := l.rank(table.GetDpRank())
		if table.GetGroup() != 0 {
			if err := l.restoreGroup(r, table, tier); err != nil {
				return nil, fmt.Errorf("blocks of rank %d in tier %d: %w", table.GetDpRank(), tier, err)
			}
			continue
		}
		if r.tables[tier] != nil {
			return nil, fmt.Errorf("rank %d has tier %d twice", table.GetDpRank(), tier)
		}
		if err := l.newTable(r, tier).restore(table); err != nil {
			return nil, fmt.Errorf("blocks of rank %d in tier %d: %w", table.GetDpRank(), tier, err)
		}
		r.used |= 1 << tier // also of a version that did not record it
	}
	return w, l.restoreState(s.GetRawEventIds(), s.GetAnnouncements(), s.GetPending())
}

// restoreGroup restores the blocks of an attention group other than the main group.
func (l *Lane) restoreGroup(r *rankState, table *statev1.Table, tier kvblock.Tier) error {
	key, err := groups.KeyOf(table.GetGroup(), tier)
	if err != nil {
		return err
	}
	return r.otherGroups.Restore(key, table)
}

// restoreTracker restores the tracker of a rank, if it has one.
func (l *Lane) restoreTracker(r *rankState, state []byte) (err error) {
	if r.sources == nil || r.sources.tracker == nil {
		return nil
	}
	r.sources.tracker, err = consolidate.Restore(state, len(l.sourceNames), l.cfg.MaxBlocksPerRank,
		l.cfg.Blocks, l.cfg.AttributeBytes, &l.counts.tracker)
	return err
}

// discard releases what the trackers of a lane that was recovered have reserved.
func (l *Lane) discard() {
	for rank := range l.ranks {
		if tracker := l.tracker(rank); tracker != nil {
			tracker.Reset()
		}
	}
}

// restoreState restores the state that entries and checkpoints have in the same form.
func (l *Lane) restoreState(rawIDs []*statev1.RawEventId, announcements []*statev1.Announcements, pending *statev1.Run) error {
	for _, id := range rawIDs {
		if id.GetSource() >= maxSourceIndex {
			return fmt.Errorf("raw event id of source %d", id.GetSource())
		}
		for len(l.lastRawIDs) <= int(id.GetSource()) {
			l.lastRawIDs = append(l.lastRawIDs, 0)
		}
		l.lastRawIDs[id.GetSource()] = id.GetId()
	}
	for _, a := range announcements {
		if a.GetSource() >= maxSourceIndex {
			return fmt.Errorf("announcements of source %d", a.GetSource())
		}
		l.announcements.Restore(a)
	}
	l.pending.reset()
	if pending != nil {
		return l.pending.restore(pending)
	}
	return nil
}

// storedTier returns a tier of stored state.
func storedTier(tier uint64) (kvblock.Tier, error) {
	if tier < uint64(kvblock.TierDevice) || tier >= kvblock.TierEnd {
		return 0, fmt.Errorf("tier %d is unknown", tier)
	}
	return kvblock.Tier(tier), nil
}

// restoreSources restores the sources of a rank.
func (l *Lane) restoreSources(state *statev1.RankSources) error {
	if l.consolidation == oneSource {
		return errors.New("sources of a worker with one source")
	}
	r := l.rank(state.GetDpRank())
	s := l.sources(state.GetDpRank(), r)
	clear(s.incomplete)
	clear(s.unproved)
	clear(s.tiers)
	clear(s.unseen)
	for _, source := range state.GetIncomplete() {
		if int(source) >= len(s.incomplete) {
			return fmt.Errorf("source %d of %d is incomplete", source, len(s.incomplete))
		}
		s.incomplete[source] = kvblock.AllTiers
	}
	for _, source := range state.GetUnproved() {
		if int(source) >= len(s.unproved) {
			return fmt.Errorf("source %d of %d is unproved", source, len(s.unproved))
		}
		s.unproved[source] = true
	}
	return errors.Join(restoreTiers(s.tiers, state.GetTiers()), restoreTiers(s.incomplete, state.GetIncompleteTiers()), restoreTiers(s.unseen, state.GetUnseenTiers()))
}

// restoreTiers restores sets of tiers of sources, if some were stored.
func restoreTiers(sets []kvblock.Tiers, stored []byte) error {
	if len(stored) > len(sets) {
		return fmt.Errorf("tiers of %d sources of %d", len(stored), len(sets))
	}
	for source, tiers := range stored {
		sets[source] = kvblock.Tiers(tiers) & kvblock.AllTiers
	}
	return nil
}

// restore restores a run.
func (r *run) restore(state *statev1.Run) error {
	tier, err := storedTier(uint64(state.GetTier()))
	if err != nil {
		return fmt.Errorf("pending events: %w", err)
	}
	n := len(state.GetBlockHashes())
	ops, err := restoreOps(state.GetOps(), n)
	if err != nil {
		return fmt.Errorf("pending events: %w", err)
	}
	*r = run{
		key: runKey{
			kind: wire.KindStored, rank: state.GetDpRank(), tier: tier,
			lora: state.GetLoraName(), salt: string(state.GetCacheSalt()), blockSize: state.GetBlockSize(),
			hashed: len(state.GetTokensHashes()) > 0, tokens: len(state.GetTokenIds()) > 0,
		},
		parent: state.GetParentHash(), hasParent: state.ParentHash != nil,
		hashes: state.GetBlockHashes(), tokensHashes: state.GetTokensHashes(), tokens: state.GetTokenIds(), ops: ops,
		engineTime: state.GetEngineTimeUnixNano(), ingestTime: state.GetIngestTimeUnixNano(), inputs: true,
	}
	if state.GetRemoves() {
		r.key.kind = wire.KindRemoved
	}
	if n == 0 || r.key.hashed && len(r.tokensHashes) != n || r.key.tokens && len(r.tokens) != n*int(r.key.blockSize) {
		return fmt.Errorf("pending events: %d blocks with %d tokens hashes and %d tokens", n, len(r.tokensHashes), len(r.tokens))
	}
	return nil
}

// restoreOps returns the operations of n blocks; nil if all are 0.
func restoreOps(state *statev1.CopyOps, n int) (ops []copies.Op, err error) {
	if state == nil {
		return nil, nil
	}
	if len(state.GetLengths()) != len(state.GetOps()) {
		return nil, fmt.Errorf("%d operations with %d lengths", len(state.GetOps()), len(state.GetLengths()))
	}
	for i, op := range state.GetOps() {
		length := state.GetLengths()[i]
		if uint64(length) > uint64(n-len(ops)) {
			return nil, fmt.Errorf("operations of more than %d blocks", n)
		}
		for range length {
			ops = append(ops, copies.Op(op))
		}
	}
	if len(ops) != n {
		return nil, fmt.Errorf("operations of %d blocks, want %d", len(ops), n)
	}
	return ops, nil
}

// restore restores the blocks of an empty table.
func (t *table) restore(state *statev1.Table) error {
	hashes, parents, infos := state.GetBlockHashes(), state.GetParentHashes(), state.GetBlockInfo()
	if len(parents) != len(hashes) || len(infos) != len(hashes) {
		return fmt.Errorf("%d blocks with %d parents and %d infos", len(hashes), len(parents), len(infos))
	}
	slots := make(map[uint32]uint32) // by id
	for _, a := range state.GetAttributes() {
		slots[a.GetId()], _ = t.attrs.Acquire(attribute.Set{LoRA: a.GetLoraName(), BlockSize: a.GetBlockSize()})
	}
	stale := slices.ContainsFunc(infos, func(info uint32) bool { return info&infoStale != 0 })
	if stale {
		if err := t.restoreBlocks(hashes, parents, infos, slots, infoStale); err != nil {
			return err
		}
		t.gap()
	}
	if err := t.restoreBlocks(hashes, parents, infos, slots, 0); err != nil {
		return err
	}
	for _, a := range state.GetAttributes() {
		t.attrs.Release(slots[a.GetId()])
	}
	return t.restoreCopies(state)
}

// restoreBlocks restores the blocks that are stale, or not stale.
func (t *table) restoreBlocks(hashes, parents []uint64, infos []uint32, slots map[uint32]uint32, stale uint32) error {
	const step = 32
	id, slot, ok := uint32(0), uint32(0), false // of the last block
	for first := 0; first < len(hashes); first += step {
		end := min(first+step, len(hashes))
		t.blocks.table.Prefetch(hashes[first:end])
		for i := first; i < end; i++ {
			info := infos[i]
			if info&infoStale != stale {
				continue
			}
			if info>>infoAttrShift != id || !ok {
				id = info >> infoAttrShift
				if slot, ok = slots[id]; !ok {
					return fmt.Errorf("attributes %d are missing", id)
				}
			}
			b := block{parent: parents[i], attr: slot, flags: t.blocks.currentGeneration() | flagInputs | flagSalted}
			if info&infoParent != 0 {
				b.flags |= flagParent
			}
			s, existed := t.blocks.put(hashes[i])
			if existed {
				return fmt.Errorf("block %d is there twice", hashes[i])
			}
			t.add(s, &b)
		}
	}
	return nil
}

func (t *table) restoreCopies(state *statev1.Table) error {
	further, unsure := state.GetFurtherCopies(), state.GetUnsureStores()
	if len(further) != len(state.GetCopiedHashes()) || len(unsure) != len(state.GetCopiedHashes()) {
		return fmt.Errorf("%d blocks with %d copies and %d unsure stores", len(state.GetCopiedHashes()), len(further), len(unsure))
	}
	for i, hash := range state.GetCopiedHashes() {
		b := t.blocks.table.Find(hash)
		if b == nil {
			return fmt.Errorf("copies of block %d, which is missing", hash)
		}
		b.Value.flags |= flagCopies
		t.copies[hash] = copies.Count{Further: further[i], Unsure: unsure[i]}
	}
	return nil
}

// restoreReported restores what Gaps have reported.
func (r *rankState) restoreReported(from *statev1.Rank) {
	r.used = kvblock.Tiers(from.GetUsedTiers()) & kvblock.AllTiers
	r.unseen = kvblock.Tiers(from.GetUnseenTiers()) & kvblock.LowerTiers
	for i, reasons := range from.GetGapReasons() {
		if tier := int(kvblock.TierDevice) + i; tier < kvblock.TierEnd {
			r.reported[tier] = gapReasons(reasons)
		}
	}
	if from.GetOverfull() {
		r.gapped(&kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TOO_MANY_BLOCKS})
	}
	if from.GetAttributesLacking() {
		r.gapped(&kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES})
	}
}

// stateReported sets what Gaps have reported.
func (r *rankState) stateReported(to *statev1.Rank) {
	to.UsedTiers, to.UnseenTiers = uint32(r.used), uint32(r.unseen)
	if r.reported == ([kvblock.TierEnd]gapReasons{}) {
		return
	}
	for _, reasons := range r.reported[kvblock.TierDevice:] {
		to.GapReasons = append(to.GapReasons, uint32(reasons))
	}
}

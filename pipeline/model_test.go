package pipeline_test

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// maxEntryBytes is the size above which an entry is cut between two events.
	maxEntryBytes = 3 << 20
	// maxRunTokens is the most token ids in an event.
	maxRunTokens = 1 << 19
)

// model is a plain reference implementation of the pipeline: it works block by block, and
// allocates each message.
type model struct {
	cfg     pipeline.Config
	now     time.Duration
	workers map[string]*modelWorker
	// lastIDs and entries are by worker, since entries of different workers have no defined
	// order.
	lastIDs map[string]uint64
	entries map[string][]*kvcastv1.Entry
	// chosen returns the blocks that the pipeline removed with an event, where it may
	// choose.
	chosen func(worker string, eventID uint64) []uint64
}

// modelWorker is a worker that was added.
type modelWorker struct {
	name, modelName string
	// blocks are the blocks and their copies.
	blocks map[modelBlock]*modelCopies
	// stale are the blocks that were not stored since the last gap.
	stale map[modelBlock]bool
	// incomplete are the incomplete tiers, reported what Gaps have reported of tiers since they were cleared, and usedTiers
	// the tiers that were stored into since all were cleared.
	incomplete map[modelTier]bool
	reported   map[modelReport]bool
	usedTiers  map[modelTier]bool
	// uncertain are tiers whose doubts ended because another tier was cleared: they may have older blocks.
	uncertain map[modelTier]bool
	// groupsOmitted are the ranks with other attention groups.
	groupsOmitted map[uint32]bool
	// expired, evicted and refused are numbers of blocks.
	expired, evicted, refused int
	pending                   *modelRun
	// out are the events emitted by the current call.
	out []*kvcastv1.RouterEvent
	// rawIDs are the distinct raw event ids received, by source.
	rawIDs map[int][]uint64
	// mode, sources, ranks and the ignored removes by reason are set for a worker with
	// several sources.
	mode    feed.Consolidate
	sources int
	ranks   map[uint32]*modelRank
	ignored map[string]int
	// announcements is whether an engine announces reused blocks; candidates are the stores of the current batch that may show
	// it, by attention group, and root is the last block of its last store if that was a root store.
	root          *uint64
	announcements map[modelEngine]modelReuses
	candidates    map[int64]modelCandidate
}

// modelBlock identifies a block whose copies are counted.
type modelBlock struct {
	rank uint32
	tier kvblock.Tier
	hash uint64
}

// modelRunKey are the fields that must be equal for two events to merge.
type modelRunKey struct {
	kind       wire.Kind
	rank       uint32
	tier       kvblock.Tier
	lora, salt string
	blockSize  uint32
	hashed     bool
	withTokens bool
}

// modelRun is a run of blocks that may still grow.
type modelRun struct {
	key                  modelRunKey
	parent               *uint64
	hashes, tokensHashes []uint64
	tokenIDs             []uint32
	// storeOps or removeOps are the operations by block.
	storeOps  []modelStoreOp
	removeOps []modelRemoveOp
	// engineTime and ingestTime are those of the last batch that contributed.
	engineTime, ingestTime int64
	deadline               time.Duration
}

func newModel(cfg pipeline.Config, chosen func(worker string, eventID uint64) []uint64) *model {
	if cfg.MaxBlocks == 0 {
		cfg.MaxBlocks = 128
	}
	if cfg.MaxBlocksPerRank == 0 {
		cfg.MaxBlocksPerRank = 4_000_000
	}
	return &model{
		cfg:     cfg,
		workers: make(map[string]*modelWorker),
		lastIDs: make(map[string]uint64),
		entries: make(map[string][]*kvcastv1.Entry),
		chosen:  chosen,
	}
}

func (m *model) add(w feed.Worker) {
	mw := &modelWorker{
		name: w.Name, modelName: w.Model,
		blocks: make(map[modelBlock]*modelCopies), stale: make(map[modelBlock]bool),
		announcements: make(map[modelEngine]modelReuses), candidates: make(map[int64]modelCandidate),
		incomplete: make(map[modelTier]bool), reported: make(map[modelReport]bool), usedTiers: make(map[modelTier]bool), uncertain: make(map[modelTier]bool), groupsOmitted: make(map[uint32]bool),
		rawIDs: make(map[int][]uint64),
		mode:   modelMode(w), sources: len(w.Sources), ranks: make(map[uint32]*modelRank), ignored: make(map[string]int),
	}
	m.workers[w.Name] = mw
	m.emit(mw, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{
		Model: w.Model, BlockSize: w.BlockSize, Endpoint: w.Endpoint, Labels: w.Labels, Ranks: w.Ranks,
	}}})
	m.commit(mw, 0, 0)
}

func (m *model) remove(name string, reason feed.RemoveReason) {
	mw := m.workers[name]
	m.flushAlone(mw)
	m.emit(mw, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
		Reason: kvcastv1.WorkerRemoved_Reason(reason),
	}}})
	m.commit(mw, 0, 0)
	delete(m.workers, name)
}

func (m *model) close() {
	for _, mw := range m.workers {
		m.flushAlone(mw)
	}
}

// pass advances time.
func (m *model) pass(d time.Duration) {
	m.now += d
	for _, mw := range m.workers {
		if mw.pending != nil && mw.pending.deadline <= m.now {
			m.flushAlone(mw)
		}
	}
}

func (m *model) gap(name string, g feed.Gap) {
	mw := m.workers[name]
	m.flushAlone(mw)
	if m.cfg.OnGap == pipeline.OnGapClear && g.Reason != feed.GapJoinedLate {
		m.clear(mw, g.Rank, kvcastv1.Cleared_REASON_UNREPAIRED_GAP)
		mw.gapOf(g.Rank, -1)
		m.commit(mw, 0, g.At)
		return
	}
	if mw.mode == feed.ConsolidateDedup {
		for name, h := range mw.rankOf(g.Rank).names {
			if name.source == g.Source {
				h.copies, h.unsure, h.sure = min(h.copies, 1), 0, false
			}
		}
	} else {
		for b, c := range mw.blocks {
			if b.rank == g.Rank {
				c.copies, c.unsure, mw.stale[b] = 1, 0, true
			}
		}
	}
	mw.gapOf(g.Rank, g.Source)
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: proto.Uint32(g.Rank), Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{
		Reason: kvcastv1.Gap_Reason(g.Reason), MissedBatches: g.Missed, FirstSeq: g.FirstSeq, LastSeq: g.LastSeq,
	}}})
	m.commit(mw, 0, g.At)
}

func (m *model) restarted(name string, r feed.Restart) {
	mw := m.workers[name]
	m.flushAlone(mw)
	if mw.mode == "" {
		m.clear(mw, r.Rank, kvcastv1.Cleared_REASON_ENGINE_RESTARTED)
	} else {
		m.releaseSource(mw, feed.Batch{Source: r.Source, Rank: r.Rank, IngestTime: r.At}, kvcastv1.Cleared_REASON_ENGINE_RESTARTED, 0)
		m.flush(mw)
	}
	m.commit(mw, 0, r.At)
}

func (m *model) batch(name string, b feed.Batch) {
	mw := m.workers[name]
	clear(mw.candidates)
	mw.root = nil
	if b.GroupsOmitted && !mw.groupsOmitted[b.Rank] {
		m.flush(mw)
		m.emit(mw, &kvcastv1.RouterEvent{DpRank: &b.Rank, Event: &kvcastv1.RouterEvent_GroupsOmitted{
			GroupsOmitted: &kvcastv1.GroupsOmitted{},
		}})
	}
	for _, e := range b.Events {
		mw.rawIDs[b.Source] = append(mw.rawIDs[b.Source], e.RawID)
		if e.ReplacesBlockSize {
			m.replaceBlockSize(mw, e.BlockSize)
		}
		if e.Kind != wire.KindCleared && mw.isUncertain(b, e.Tier) {
			m.doubt(mw, b, kvcastv1.Gap_REASON_TIER_NOT_CLEARED, "", e.Tier)
			delete(mw.uncertain, modelTier{b.Rank, e.Tier})
		}
		switch {
		case mw.mode != "":
			m.consolidated(mw, b, e)
		case e.Kind == wire.KindStored:
			m.store(mw, b, e)
		case e.Kind == wire.KindRemoved:
			m.removed(mw, b, e.Tier, mw.removeOps(b, e), e.BlockHashes...)
		case e.Kind == wire.KindCleared:
			m.flush(mw)
			m.cleared(mw, b, e)
		}
	}
	if m.cfg.Timeout == 0 {
		m.flush(mw)
	}
	if b.CopyRule == feed.CopyRuleDetected && mw.announcements[modelEngine{b.Rank, b.Source}].open {
		m.doubt(mw, b, kvcastv1.Gap_REASON_COPIES_UNSURE, "", kvblock.TierDevice)
	}
	for _, d := range b.Doubts {
		var tiers []kvblock.Tier
		for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
			if d.Tiers.Has(tier) {
				tiers = append(tiers, tier)
			}
		}
		m.doubt(mw, b, kvcastv1.Gap_Reason(d.Reason), d.Detail, tiers...)
	}
	m.commit(mw, b.EngineTime, b.IngestTime)
}

// replaceBlockSize removes the blocks of another size.
func (m *model) replaceBlockSize(mw *modelWorker, size uint32) {
	m.flush(mw)
	gone := make(map[modelBlock]bool)
	for b, c := range mw.blocks {
		gone[b] = c.blockSize != 0 && c.blockSize != size
	}
	for _, rank := range []uint32{0, 1, 200} {
		for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
			var hashes []uint64
			for b, is := range gone {
				if is && b.rank == rank && b.tier == tier {
					hashes = append(hashes, b.hash)
					delete(mw.blocks, b)
					delete(mw.stale, b)
				}
			}
			slices.Sort(hashes)
			for part := range slices.Chunk(hashes, m.cfg.MaxBlocks) {
				m.emitRemoved(mw, rank, tier, part)
			}
			if mw.mode == feed.ConsolidateDedup {
				r := mw.rankOf(rank)
				for _, block := range slices.Clone(r.blocks) {
					if slices.Contains(hashes, block.first) {
						r.forget(block)
					}
				}
			}
		}
	}
}

// removed adds removes to the pending run. A nil ops means blocks with one copy.
func (m *model) removed(mw *modelWorker, b feed.Batch, tier kvblock.Tier, ops []modelRemoveOp, hashes ...uint64) {
	for i, h := range hashes {
		var op modelRemoveOp
		if ops != nil {
			op = ops[i]
		}
		key := modelRunKey{kind: wire.KindRemoved, rank: b.Rank, tier: tier}
		if mw.pending == nil || mw.pending.key != key {
			m.flush(mw)
			mw.pending = &modelRun{key: key, deadline: m.now + m.cfg.Timeout}
		}
		mw.pending.hashes = append(mw.pending.hashes, h)
		mw.pending.removeOps = append(mw.pending.removeOps, op)
		m.contributed(mw, b)
	}
}

// holes returns the number of missing raw event ids by worker; workers without any are
// absent.
func (m *model) holes() map[string]float64 {
	var all map[string]float64
	for name, mw := range m.workers {
		for _, ids := range mw.rawIDs {
			if n := slices.Max(ids) - uint64(len(ids)); n > 0 {
				if all == nil {
					all = make(map[string]float64)
				}
				all[name] += float64(n)
			}
		}
	}
	return all
}

// store treats a store of many blocks as a sequence of stores of one block, each continuing
// the previous one.
func (m *model) store(mw *modelWorker, b feed.Batch, e wire.Event) {
	if len(e.BlockHashes) == 0 {
		return
	}
	var parent *uint64
	size := int(e.BlockSize)
	key := modelRunKey{
		kind: wire.KindStored, rank: b.Rank, tier: e.Tier, lora: e.LoRAName, salt: e.CacheSalt, blockSize: e.BlockSize,
		hashed:     len(e.TokensHashes) > 0,
		withTokens: m.cfg.EmitTokenIDs && size > 0 && size <= maxRunTokens && len(e.Tokens) >= len(e.BlockHashes)*size,
	}
	if p := mw.pending; p != nil && p.key != key {
		m.flush(mw) // knowsZero depends on the flushed state
	}
	if e.HasParent && (e.Parent != 0 || m.knowsZero(mw, b.Rank)) {
		parent = &e.Parent
	}
	if key.hashed && mw.mode != feed.ConsolidateDedup && e.Tier > kvblock.TierDevice && mw.deviceDiffers(b.Rank, parent, e.BlockHashes) {
		m.doubt(mw, b, kvcastv1.Gap_REASON_UNKNOWN_CONTENT, "a store says of a block that device memory holds that it has another parent", e.Tier)
		e.HasParent, e.TokensHashes, e.Tokens = false, nil, nil
		m.store(mw, b, e)
		return
	}
	if parent == nil {
		m.flush(mw) // the operations depend on the flushed state
	}
	op := modelCopy
	if mw.mode != feed.ConsolidateDedup {
		op = mw.sawStore(b, e, parent == nil, func(h uint64) bool { return mw.blocks[modelBlock{b.Rank, e.Tier, h}] != nil })
	}
	for i, h := range e.BlockHashes {
		p := mw.pending
		if p == nil || p.key != key || parent == nil || *parent != p.hashes[len(p.hashes)-1] {
			m.flush(mw)
			p = &modelRun{key: key, parent: parent, deadline: m.now + m.cfg.Timeout}
			mw.pending = p
		}
		p.hashes = append(p.hashes, h)
		p.storeOps = append(p.storeOps, op)
		if key.hashed {
			p.tokensHashes = append(p.tokensHashes, e.TokensHashes[i])
		}
		if key.withTokens {
			p.tokenIDs = append(p.tokenIDs, e.Tokens[i*size:(i+1)*size]...)
		}
		m.contributed(mw, b)
		parent = &h
	}
}

// deviceDiffers reports whether device memory holds one of a chain of blocks after another parent.
func (mw *modelWorker) deviceDiffers(rank uint32, parent *uint64, chain []uint64) bool {
	for _, h := range chain {
		held := mw.blocks[modelBlock{rank, kvblock.TierDevice, h}]
		inChunk := parent != nil && *parent == wire.PartBefore(h)
		if held != nil && held.blockSize > 0 && !inChunk && !equalPointers(held.parent, parent) {
			return true
		}
		parent = &h
	}
	return false
}

func equalPointers(a, b *uint64) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}

// contributed records that the pending run grew by a block, and flushes it at the cap.
func (m *model) contributed(mw *modelWorker, b feed.Batch) {
	p := mw.pending
	p.engineTime, p.ingestTime = b.EngineTime, b.IngestTime
	full := len(p.hashes) == m.cfg.MaxBlocks
	if p.key.withTokens && len(p.tokenIDs)+int(p.key.blockSize) > maxRunTokens {
		full = true
	}
	if full {
		m.flush(mw)
	}
}

// knowsZero reports whether a block with hash 0 is stored or pending. If not, a parent of 0
// means no parent.
func (*model) knowsZero(mw *modelWorker, rank uint32) bool {
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		if mw.blocks[modelBlock{rank, tier, 0}] != nil {
			return true
		}
	}
	p := mw.pending
	return p != nil && p.key.kind == wire.KindStored && p.key.rank == rank && slices.Contains(p.hashes, 0)
}

// forgetRank empties a rank's tables.
func (*model) forgetRank(mw *modelWorker, rank uint32) {
	maps.DeleteFunc(mw.blocks, func(b modelBlock, _ *modelCopies) bool { return b.rank == rank })
	maps.DeleteFunc(mw.stale, func(b modelBlock, _ bool) bool { return b.rank == rank })
}

func (m *model) clear(mw *modelWorker, rank uint32, reason kvcastv1.Cleared_Reason) {
	m.forgetRank(mw, rank)
	mw.closeGates(rank, everySource)
	delete(mw.ranks, rank)
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: &rank, Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{
		Reason: reason,
	}}})
}

// flush ends the pending run and emits its changes for routers.
func (m *model) flush(mw *modelWorker) {
	p := mw.pending
	mw.pending = nil
	if p == nil {
		return
	}
	if p.key.kind == wire.KindStored {
		m.flushStored(mw, p)
		return
	}
	var gone []uint64
	for i, h := range p.hashes {
		b, op := modelBlock{p.key.rank, p.key.tier, h}, p.removeOps[i]
		if mw.blocks[b] == nil && mw.reported[modelReport{modelTier{p.key.rank, p.key.tier}, kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH}] {
			continue // it was skipped when it was stored
		}
		if c := mw.blocks[b]; c != nil && !c.remove(op, mw.hasChild(b)) || c == nil && op.remaining != nil && *op.remaining > 0 {
			if op.remaining != nil {
				delete(mw.stale, b) // the engine reports remaining copies
			}
			continue
		}
		delete(mw.blocks, b)
		delete(mw.stale, b)
		gone = append(gone, h)
	}
	m.emitRemoved(mw, p.key.rank, p.key.tier, gone)
}

func (m *model) emitRemoved(mw *modelWorker, rank uint32, tier kvblock.Tier, gone []uint64) {
	if len(gone) > 0 {
		m.emit(mw, &kvcastv1.RouterEvent{DpRank: &rank, Tier: kvcastv1.Tier(tier), Event: &kvcastv1.RouterEvent_Removed{
			Removed: &kvcastv1.Removed{BlockHashes: gone},
		}})
	}
}

// flushAlone makes the pending run an entry of its own.
func (m *model) flushAlone(mw *modelWorker) {
	if p := mw.pending; p != nil {
		m.flush(mw)
		m.commit(mw, p.engineTime, p.ingestTime)
	}
}

func (m *model) emit(mw *modelWorker, e *kvcastv1.RouterEvent) {
	m.lastIDs[mw.name]++
	e.EventId = m.lastIDs[mw.name]
	mw.out = append(mw.out, e)
	switch rank := e.GetDpRank(); {
	case e.GetGap() != nil:
		for _, tier := range namedTiers(e.GetGap().GetTiers()) {
			mw.incomplete[modelTier{rank, tier}] = true
			mw.reported[modelReport{modelTier{rank, tier}, e.GetGap().GetReason()}] = true
			if len(e.GetGap().GetTiers()) > 0 {
				mw.usedTiers[modelTier{rank, tier}] = true
			}
		}
	case e.GetGroupsOmitted() != nil:
		mw.groupsOmitted[rank] = true
	case e.GetCleared() != nil:
		for _, tier := range namedTiers(e.GetCleared().GetTiers()) {
			for r := range mw.reported {
				if r.modelTier == (modelTier{rank, tier}) && r.reason != kvcastv1.Gap_REASON_REPLAY_UNPROVED && tier != kvblock.TierDevice && len(e.GetCleared().GetTiers()) == 0 &&
					e.GetCleared().GetReason() != kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
					mw.uncertain[r.modelTier] = true
				}
			}
			if len(e.GetCleared().GetTiers()) > 0 || e.GetCleared().GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED {
				delete(mw.uncertain, modelTier{rank, tier})
			}
			delete(mw.incomplete, modelTier{rank, tier})
			maps.DeleteFunc(mw.reported, func(r modelReport, _ bool) bool { return r.modelTier == modelTier{rank, tier} })
			if e.GetCleared().GetReason() == kvcastv1.Cleared_REASON_UNREPAIRED_GAP {
				mw.incomplete[modelTier{rank, tier}] = true
				mw.reported[modelReport{modelTier{rank, tier}, kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE}] = true
			}
		}
		if len(e.GetCleared().GetTiers()) == 0 {
			maps.DeleteFunc(mw.usedTiers, func(t modelTier, _ bool) bool { return t.rank == rank })
			if e.GetCleared().GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED {
				delete(mw.groupsOmitted, rank)
			}
		}
	}
}

// modelTier is a tier of a rank, modelReport what a Gap reports of it.
type modelTier struct {
	rank uint32
	tier kvblock.Tier
}

type modelReport struct {
	modelTier
	reason kvcastv1.Gap_Reason
}

// namedTiers returns the tiers that an event names: all if it names none.
func namedTiers(named []kvcastv1.Tier) (tiers []kvblock.Tier) {
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		if len(named) == 0 || slices.Contains(named, kvcastv1.Tier(tier)) {
			tiers = append(tiers, tier)
		}
	}
	return tiers
}

// incompleteRanks returns the ranks with an incomplete tier, in order.
func (mw *modelWorker) incompleteRanks() (ranks []uint32) {
	for t := range mw.incomplete {
		if !slices.Contains(ranks, t.rank) {
			ranks = append(ranks, t.rank)
		}
	}
	slices.Sort(ranks)
	return ranks
}

// doubt reports why tiers may differ, unless Gaps have reported it of all of them.
func (m *model) doubt(mw *modelWorker, b feed.Batch, reason kvcastv1.Gap_Reason, detail string, tiers ...kvblock.Tier) {
	if mw.mode != "" && len(tiers) < kvblock.TierEnd-1 { // the source uses them
		r := mw.rankOf(b.Rank)
		if r.used[b.Source] == nil && len(tiers) > 0 {
			r.used[b.Source] = make(map[kvblock.Tier]bool)
		}
		for _, tier := range tiers {
			r.used[b.Source][tier] = true
		}
	}
	if mw.mode == feed.ConsolidateDedup {
		tiers = namedTiers(nil)
	}
	if mw.mode != "" {
		mw.gapOf(b.Rank, b.Source)
		if reason == kvcastv1.Gap_REASON_TIER_NOT_CLEARED {
			for _, tier := range tiers {
				delete(mw.rankOf(b.Rank).uncertain, modelSourceTier{b.Source, tier})
			}
		}
	}
	told := true
	var named []kvcastv1.Tier
	for _, tier := range tiers {
		told = told && mw.reported[modelReport{modelTier{b.Rank, tier}, reason}]
		named = append(named, kvcastv1.Tier(tier))
	}
	if told {
		return
	}
	if len(named) == kvblock.TierEnd-1 {
		named = nil
	}
	m.flush(mw)
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: &b.Rank, Event: &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: reason, Tiers: named, Detail: detail}}})
}

// cleared applies a clear of an engine that is the worker's only source.
func (m *model) cleared(mw *modelWorker, b feed.Batch, e wire.Event) {
	var others []kvblock.Tier
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd && e.Tier != 0; tier++ {
		at := modelTier{b.Rank, tier}
		matters := false
		for k := range mw.blocks {
			matters = matters || k.rank == b.Rank && k.tier == tier
		}
		for r := range mw.reported {
			matters = matters || r.modelTier == at
		}
		if tier != e.Tier && mw.usedTiers[at] && matters {
			others = append(others, tier)
		}
	}
	if e.Tier == 0 || e.Tier == kvblock.TierDevice && len(others) == 0 {
		var certain []kvcastv1.Tier // that the clear is of, of those of which anything was in doubt
		for _, tier := range namedTiers(nil) {
			at := modelTier{b.Rank, tier}
			inDoubt := mw.uncertain[at]
			for r := range mw.reported {
				inDoubt = inDoubt || r.modelTier == at && r.reason != kvcastv1.Gap_REASON_REPLAY_UNPROVED
			}
			if inDoubt && tier != kvblock.TierDevice && e.Tier == 0 {
				certain = append(certain, kvcastv1.Tier(tier))
			}
		}
		if len(certain) > 0 {
			m.emitCleared(mw, b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED, certain...)
		}
		m.clear(mw, b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED)
		return
	}
	if e.Tier == kvblock.TierDevice {
		mw.closeGates(b.Rank, everySource)
	}
	maps.DeleteFunc(mw.blocks, func(k modelBlock, _ *modelCopies) bool { return k.rank == b.Rank && k.tier == e.Tier })
	maps.DeleteFunc(mw.stale, func(k modelBlock, _ bool) bool { return k.rank == b.Rank && k.tier == e.Tier })
	m.emitCleared(mw, b.Rank, kvcastv1.Cleared_REASON_ENGINE_CLEARED, kvcastv1.Tier(e.Tier))
	if e.Medium == "" {
		m.doubt(mw, b, kvcastv1.Gap_REASON_TIER_NOT_CLEARED, "", others...)
	}
}

// commit puts the events of the call into an entry, or into several if one would be too
// large.
func (m *model) commit(mw *modelWorker, engineTime, ingestTime int64) {
	var entry *kvcastv1.Entry
	for _, e := range mw.out {
		if entry != nil {
			entry.Events = append(entry.Events, e)
			if proto.Size(entry) <= maxEntryBytes {
				continue
			}
			entry.Events = entry.Events[:len(entry.Events)-1]
		}
		entry = &kvcastv1.Entry{
			Worker: mw.name, Model: mw.modelName,
			EngineTimeUnixNano: engineTime, IngestTimeUnixNano: ingestTime,
			Events: []*kvcastv1.RouterEvent{e},
		}
		m.entries[mw.name] = append(m.entries[mw.name], entry)
	}
	mw.out = nil
}

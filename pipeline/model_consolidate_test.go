package pipeline_test

import (
	"cmp"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// modelRank is the model's state of one dp rank of a worker with several sources.
type modelRank struct {
	// names are the current and former names of blocks by source: a name resolves until its
	// block is removed. blocks are in order of arrival.
	names  map[modelName]*modelNameState
	blocks []*modelTracked
	// releases counts the names that were released.
	releases int
	// spare are the units that the current store has freed, of which it uses none yet: fewer are evicted for it.
	spare int
	// incomplete are the tiers of sources that lost events or had blocks refused since they were last
	// cleared; used are the tiers that each source has stored into since then.
	incomplete map[modelSourceTier]bool
	used       map[int]map[kvblock.Tier]bool
	// uncertain are those that were incomplete when the source had cleared its device memory, and used no tier.
	uncertain map[modelSourceTier]bool
}

type modelSourceTier struct {
	source int
	tier   kvblock.Tier
}

// isUncertain reports whether a tier may have blocks of a batch's source that are older than a clear of device memory.
func (mw *modelWorker) isUncertain(b feed.Batch, tier kvblock.Tier) bool {
	if mw.mode == "" {
		return mw.uncertain[modelTier{b.Rank, tier}]
	}
	return mw.rankOf(b.Rank).uncertain[modelSourceTier{b.Source, tier}]
}

type modelName struct {
	source int
	hash   uint64
}

// modelNameState is a name's block and count of copies. It is certain unless a gap followed
// its last store. Of the names with no copies, the one with the lowest number was released
// first.
type modelNameState struct {
	modelCopies
	block    *modelTracked
	sure     bool
	released int
	hasChild bool // a store has named it as a parent
}

// modelIdleNames bounds the names without copies per block and source, not counting the name
// that routers know.
const modelIdleNames = 4

// modelTracked is a block, identified by its content or, where that is unknown, by its name.
type modelTracked struct {
	content *modelContent
	first   uint64
}

type modelContent struct {
	lora, salt string
	sequence   uint64
}

// modelMode returns a worker's consolidation mode: "" for a single source.
func modelMode(w feed.Worker) feed.Consolidate {
	if len(w.Sources) < 2 {
		return ""
	}
	return cmp.Or(w.Consolidate, feed.ConsolidateDedup)
}

func (mw *modelWorker) rankOf(rank uint32) *modelRank {
	if mw.ranks[rank] == nil {
		mw.ranks[rank] = &modelRank{
			names: make(map[modelName]*modelNameState), incomplete: make(map[modelSourceTier]bool), uncertain: make(map[modelSourceTier]bool), used: make(map[int]map[kvblock.Tier]bool),
		}
	}
	return mw.ranks[rank]
}

// resolve returns the block that a source's hash names.
func (r *modelRank) resolve(mw *modelWorker, source int, hash uint64) *modelTracked {
	if h := r.nameOf(mw, source, hash); h != nil {
		return h.block
	}
	return nil
}

// nameOf returns the name that a hash is for a source; nil if there is none.
func (r *modelRank) nameOf(mw *modelWorker, source int, hash uint64) *modelNameState {
	if h := r.names[modelName{source, hash}]; h != nil {
		return h
	}
	for other := range mw.sources {
		if h := r.names[modelName{other, hash}]; h != nil {
			return h
		}
	}
	return nil
}

// isFresh reports whether a block has a live name that is not stale.
func (r *modelRank) isFresh(b *modelTracked) bool {
	for _, h := range r.names {
		if h.block == b && h.copies > 0 && h.sure {
			return true
		}
	}
	return false
}

// units returns what the blocks and names count of the budget of all workers.
func (r *modelRank) units() int { return 2*len(r.blocks) + len(r.names) }

// liveNames returns the number of live names.
func (r *modelRank) liveNames() (n int) {
	for _, h := range r.names {
		if h.copies > 0 {
			n++
		}
	}
	return n
}

// release drops a name's copies. The name still resolves, unless its source has too many
// such names for the block: then the earliest released is deleted, of those without children if there are any.
func (r *modelRank) release(name modelName) {
	released := r.names[name]
	r.releases++
	released.copies, released.released = 0, r.releases
	var idle []modelName
	for n, h := range r.names {
		if n.source == name.source && h.block == released.block && h.copies == 0 && n.hash != h.block.first {
			idle = append(idle, n)
		}
	}
	if len(idle) > modelIdleNames {
		childless := slices.DeleteFunc(slices.Clone(idle), func(n modelName) bool { return r.names[n].hasChild })
		if len(childless) > 0 {
			idle = childless
		}
		delete(r.names, slices.MinFunc(idle, func(a, b modelName) int { return r.names[a].released - r.names[b].released }))
	}
}

// merge moves a block's names to another block that has proved to be the same.
func (r *modelRank) merge(from, into *modelTracked) {
	var idle []modelName
	for n, h := range r.names {
		switch {
		case h.block != from:
		case h.copies > 0:
			h.block = into
		default:
			idle = append(idle, n)
		}
	}
	slices.SortFunc(idle, func(a, b modelName) int { return r.names[a].released - r.names[b].released })
	for _, n := range idle {
		r.names[n].block = into
		r.release(n)
	}
}

// forget deletes a block and its names.
func (r *modelRank) forget(b *modelTracked) {
	maps.DeleteFunc(r.names, func(_ modelName, h *modelNameState) bool { return h.block == b })
	r.blocks = slices.DeleteFunc(r.blocks, func(other *modelTracked) bool { return other == b })
}

// consolidated applies an event of one of several sources.
func (m *model) consolidated(mw *modelWorker, b feed.Batch, e wire.Event) {
	r := mw.rankOf(b.Rank)
	switch {
	case e.Kind == wire.KindCleared:
		m.flush(mw)
		m.clearedSource(mw, b, e)
	case e.Kind == wire.KindStored:
		if r.used[b.Source] == nil {
			r.used[b.Source] = make(map[kvblock.Tier]bool)
		}
		if len(e.BlockHashes) > 0 {
			r.used[b.Source][e.Tier] = true
		}
		if mw.mode == feed.ConsolidatePassthrough {
			m.store(mw, b, e)
		} else {
			m.track(mw, b, e)
		}
	case mw.mode == feed.ConsolidatePassthrough:
		m.removed(mw, b, e.Tier, mw.removeOps(b, e), e.BlockHashes...)
	default:
		ops := mw.removeOps(b, e)
		for i, hash := range e.BlockHashes {
			m.untrack(mw, b, hash, ops[i])
		}
	}
}

// track applies a store block by block, and emits what changes for routers.
func (m *model) track(mw *modelWorker, b feed.Batch, e wire.Event) {
	r := mw.rankOf(b.Rank)
	hashed := len(e.TokensHashes) > 0
	rooted, parentHash := !e.HasParent, e.Parent
	var parent *modelContent
	if e.HasParent {
		switch p := r.resolve(mw, b.Source, e.Parent); {
		case p != nil:
			parent, parentHash = p.content, p.first
			r.nameOf(mw, b.Source, e.Parent).hasChild = true
		case e.Parent == 0:
			rooted = true
		}
	}
	if len(e.BlockHashes) == 0 {
		return
	}
	r.spare = 0
	one := modelStore{hashed: hashed}
	one.op = mw.sawStore(b, e, rooted, func(hash uint64) bool {
		h := r.names[modelName{b.Source, hash}]
		return h != nil && h.copies > 0
	})
	if !rooted {
		one.parent = &e.Parent
	}
	refused := 0
	for i, hash := range e.BlockHashes {
		var content *modelContent
		switch {
		case hashed && rooted:
			content = &modelContent{e.LoRAName, e.CacheSalt, e.TokensHashes[i]}
		case hashed && parent != nil:
			content = &modelContent{e.LoRAName, e.CacheSalt, kvblock.SequenceHash(parent.sequence, e.TokensHashes[i])}
		}
		block, isNew := m.storeBlock(mw, b, hash, content, one)
		one.parent = &hash
		if isNew {
			emitted := e
			emitted.Tier, emitted.HasParent, emitted.Parent = kvblock.TierDevice, !rooted, parentHash
			emitted.BlockHashes = e.BlockHashes[i : i+1]
			if hashed {
				emitted.TokensHashes = e.TokensHashes[i : i+1]
			}
			emitted.Tokens = nil
			if size := int(e.BlockSize); len(e.Tokens) >= size*len(e.BlockHashes) {
				emitted.Tokens = e.Tokens[size*i : size*(i+1)]
			}
			m.store(mw, b, emitted)
		}
		rooted, parent, parentHash = false, nil, hash
		if block == nil {
			refused++
		} else {
			parent, parentHash = block.content, block.first
			if i+1 < len(e.BlockHashes) {
				r.names[modelName{b.Source, hash}].hasChild = true
			}
		}
	}
	if refused > 0 {
		mw.refused += refused
		mw.gapOf(b.Rank, b.Source)
		if !mw.overfull(b.Rank, namedTiers(nil)) {
			m.flush(mw)
		}
		m.emitOverfull(mw, b.Rank, kvblock.TierDevice)
	}
}

// modelStore is a source's store of one block.
type modelStore struct {
	op modelStoreOp
	// parent is the source's name of the block's parent; nil if it has none.
	parent *uint64
	hashed bool
}

// storeBlock stores a block for a source. It returns a nil block if there is no room.
func (m *model) storeBlock(
	mw *modelWorker, b feed.Batch, hash uint64, content *modelContent, s modelStore,
) (block *modelTracked, isNew bool) {
	r := mw.rankOf(b.Rank)
	before := r.units()
	defer func() { r.spare = max(0, r.spare+before-r.units()) }()
	meant := r.resolve(mw, b.Source, hash)
	if content == nil {
		block = meant
	} else {
		for _, other := range r.blocks {
			if other.content != nil && *other.content == *content {
				block = other
			}
		}
		if meant != nil && meant.content == nil { // its content becomes known
			m.removed(mw, b, kvblock.TierDevice, nil, meant.first)
			if block == nil {
				meant.content = content
				block, isNew = meant, true
			} else {
				r.merge(meant, block)
				r.forget(meant)
			}
		}
	}
	name := modelName{b.Source, hash}
	var copies modelCopies
	if h := r.names[name]; h != nil {
		copies = h.modelCopies
		if h.block != block { // the name is another block's now
			delete(r.names, name)
			if h.copies > 0 && !r.isFresh(h.block) {
				m.leaves(mw, b, h.block)
			}
		}
	}
	if copies.copies == 0 || r.names[name] == nil {
		if r.liveNames() >= mw.sources*m.cfg.MaxBlocksPerRank || block == nil && !m.roomFor(mw, b) {
			return nil, false
		}
		units := 0
		if r.names[name] == nil {
			units++
		}
		if block == nil {
			units += 2
		}
		if over := m.units() + units - m.limit(); over > 0 && m.lowerBlocks() >= over {
			m.evictTotal(mw, nil, units-(r.spare+before-r.units()))
		}
		if m.units()+units > m.limit() && (block != nil || !m.expireOldest(mw, b)) {
			return nil, false
		}
		if block == nil {
			block, isNew = &modelTracked{content: content, first: hash}, true
			r.blocks = append(r.blocks, block)
		}
	}
	if copies.copies == 0 {
		copies = modelCopies{copies: 1, parent: s.parent}
	} else {
		copies.store(s.op)
		if s.hashed {
			copies.parent = s.parent
		}
	}
	earlier := r.names[name] // of the same block
	r.names[name] = &modelNameState{modelCopies: copies, block: block, sure: true, hasChild: earlier != nil && earlier.hasChild}
	return block, isNew
}

// roomFor reports whether the rank has room for another block. It may remove the oldest stale
// block.
func (m *model) roomFor(mw *modelWorker, b feed.Batch) bool {
	return len(mw.rankOf(b.Rank).blocks) < m.cfg.MaxBlocksPerRank || m.expireOldest(mw, b)
}

// expireOldest removes the oldest stale block, if there is one.
func (m *model) expireOldest(mw *modelWorker, b feed.Batch) bool {
	r := mw.rankOf(b.Rank)
	for _, block := range r.blocks {
		if !r.isFresh(block) {
			mw.expired++
			m.leaves(mw, b, block)
			return true
		}
	}
	return false
}

func (m *model) leaves(mw *modelWorker, b feed.Batch, block *modelTracked) {
	mw.rankOf(b.Rank).forget(block)
	m.removed(mw, b, kvblock.TierDevice, nil, block.first)
}

// untrack applies a remove of one block, and emits what changes for routers.
func (m *model) untrack(mw *modelWorker, b feed.Batch, hash uint64, op modelRemoveOp) {
	r := mw.rankOf(b.Rank)
	name := modelName{b.Source, hash}
	switch h := r.names[name]; {
	case h != nil && h.copies == 0: // it has let go of that already
		mw.ignored["not_held"]++
		return
	case h == nil:
		block := r.resolve(mw, b.Source, hash)
		if block == nil {
			mw.ignored["unknown"]++
			return
		}
		var own []uint64
		for n, h := range r.names {
			if n.source == b.Source && h.block == block && h.copies > 0 {
				own = append(own, n.hash)
			}
		}
		if len(own) == 0 {
			mw.ignored["not_held"]++
			return
		}
		name.hash = slices.Min(own)
	}
	h := r.names[name]
	if !h.remove(op, r.hasChild(name)) {
		h.sure = h.sure || op.remaining != nil // the engine reports remaining copies
		return
	}
	r.release(name)
	if !r.isFresh(h.block) {
		m.leaves(mw, b, h.block)
	}
}

// clearedSource applies a clear of one of several sources.
func (m *model) clearedSource(mw *modelWorker, b feed.Batch, e wire.Event) {
	var others []kvblock.Tier
	for _, tier := range slices.Sorted(maps.Keys(mw.rankOf(b.Rank).used[b.Source])) {
		if tier != e.Tier {
			others = append(others, tier)
		}
	}
	if mw.mode == feed.ConsolidateDedup && e.Tier > kvblock.TierDevice {
		m.doubt(mw, b, kvcastv1.Gap_REASON_TIER_NOT_CLEARED, "", namedTiers(nil)...)
		return
	}
	m.releaseSource(mw, b, kvcastv1.Cleared_REASON_ENGINE_CLEARED, e.Tier)
	if e.Tier != 0 && (e.Medium == "" || mw.mode == feed.ConsolidateDedup) && len(others) > 0 { // of which nothing is left, if they are deduplicated
		m.doubt(mw, b, kvcastv1.Gap_REASON_TIER_NOT_CLEARED, "", others...)
	}
}

// releaseSource deletes all names of a source; with passthrough those of one tier, unless it is 0.
func (m *model) releaseSource(mw *modelWorker, b feed.Batch, reason kvcastv1.Cleared_Reason, tier kvblock.Tier) {
	r := mw.rankOf(b.Rank)
	used := r.used[b.Source]
	if tier != 0 && mw.mode == feed.ConsolidatePassthrough {
		left := maps.Clone(used)
		delete(left, tier)
		used = map[kvblock.Tier]bool{tier: used[tier]}
		if !used[tier] {
			used = nil
		}
		r.used[b.Source] = left
	} else {
		delete(r.used, b.Source)
	}
	if len(r.used[b.Source]) == 0 {
		delete(r.used, b.Source)
	}
	for _, cleared := range namedTiers(nil) {
		if tier == 0 || tier == cleared {
			delete(r.incomplete, modelSourceTier{b.Source, cleared})
			delete(r.uncertain, modelSourceTier{b.Source, cleared})
		}
	}
	if r.used[b.Source] == nil && !r.incomplete[modelSourceTier{b.Source, kvblock.TierDevice}] {
		for _, lower := range namedTiers(nil) {
			if at := (modelSourceTier{b.Source, lower}); r.incomplete[at] {
				delete(r.incomplete, at)
				r.uncertain[at] = true
			}
		}
	}
	mw.closeGates(b.Rank, b.Source)
	if mw.mode == feed.ConsolidatePassthrough {
		m.clearTiersOf(mw, b, reason, used)
	} else {
		m.removeBlocksOf(mw, b)
	}
}

// emitEmpty emits Cleared if no source of the rank has a block. The rank is then complete
// unless a source is uncertain.
func (m *model) emitEmpty(mw *modelWorker, rank uint32, reason kvcastv1.Cleared_Reason) {
	m.forgetRank(mw, rank)
	if len(mw.rankOf(rank).incomplete) > 0 {
		reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	}
	m.emitCleared(mw, rank, reason)
}

func (m *model) emitCleared(mw *modelWorker, rank uint32, reason kvcastv1.Cleared_Reason, tiers ...kvcastv1.Tier) {
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_Cleared{
		Cleared: &kvcastv1.Cleared{Reason: reason, Tiers: tiers},
	}})
}

// clearTiersOf emits Cleared for the tiers that only this source has used. In shared tiers,
// the owner of a block is unknown.
func (m *model) clearTiersOf(mw *modelWorker, b feed.Batch, reason kvcastv1.Cleared_Reason, used map[kvblock.Tier]bool) {
	r := mw.rankOf(b.Rank)
	others := make(map[kvblock.Tier]bool)
	for _, tiers := range r.used {
		maps.Copy(others, tiers)
	}
	if len(others) == 0 {
		m.emitEmpty(mw, b.Rank, reason)
		return
	}
	for _, doubted := range []map[modelSourceTier]bool{r.incomplete, r.uncertain} {
		for at := range doubted {
			if at.source != b.Source && used[at.tier] {
				reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
			}
		}
	}
	var cleared, shares []kvcastv1.Tier
	var shared []modelBlock
	for _, tier := range slices.Sorted(maps.Keys(used)) {
		var blocks []modelBlock
		for k := range mw.blocks {
			if k.rank == b.Rank && k.tier == tier {
				blocks = append(blocks, k)
			}
		}
		if others[tier] {
			shared = append(shared, blocks...)
			if len(blocks) > 0 {
				shares = append(shares, kvcastv1.Tier(tier))
			}
			if m.cfg.OnGap != pipeline.OnGapClear || len(blocks) == 0 {
				continue
			}
		}
		cleared = append(cleared, kvcastv1.Tier(tier))
		for _, k := range blocks {
			delete(mw.blocks, k)
			delete(mw.stale, k)
		}
	}
	if m.cfg.OnGap == pipeline.OnGapClear && len(shared) > 0 {
		reason = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	}
	if len(cleared) > 0 {
		m.emitCleared(mw, b.Rank, reason, cleared...)
	}
	if m.cfg.OnGap == pipeline.OnGapClear || len(shared) == 0 {
		return
	}
	for _, k := range shared {
		mw.blocks[k].copies, mw.blocks[k].unsure, mw.stale[k] = 1, 0, true
	}
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: proto.Uint32(b.Rank), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_SHARED_TIER, Tiers: allAsNone(shares)},
	}})
}

// allAsNone returns tiers as events name them: none if they are all.
func allAsNone(tiers []kvcastv1.Tier) []kvcastv1.Tier {
	if len(tiers) == kvblock.TierEnd-1 {
		return nil
	}
	return tiers
}

// removeBlocksOf removes the blocks that only this source has.
func (m *model) removeBlocksOf(mw *modelWorker, b feed.Batch) {
	r := mw.rankOf(b.Rank)
	var gone []*modelTracked
	for _, block := range r.blocks {
		var live []modelName
		for n, h := range r.names {
			if n.source == b.Source && h.block == block && h.copies > 0 {
				live = append(live, n)
			}
		}
		slices.SortFunc(live, func(a, b modelName) int { return cmp.Compare(a.hash, b.hash) })
		for _, n := range live {
			r.release(n)
		}
		if len(live) > 0 && !r.isFresh(block) {
			gone = append(gone, block)
		}
	}
	for _, block := range gone {
		r.forget(block)
	}
	if len(r.blocks) == 0 {
		m.emitEmpty(mw, b.Rank, kvcastv1.Cleared_REASON_SOURCE_CLEARED)
		return
	}
	for _, block := range gone {
		m.removed(mw, b, kvblock.TierDevice, nil, block.first)
	}
}

// gapOf records which source lost events, or all sources where the mode does not distinguish
// them.
func (mw *modelWorker) gapOf(rank uint32, source int) {
	if mw.mode == "" {
		return
	}
	r := mw.rankOf(rank)
	for s := range mw.sources {
		if source < 0 || s == source {
			for _, tier := range namedTiers(nil) {
				r.incomplete[modelSourceTier{s, tier}] = true
			}
		}
	}
}

// tracked returns the number of blocks, or of names, by worker with several sources.
func (m *model) tracked(names bool) map[string]float64 {
	return m.count(func(w *modelWorker) (n int) {
		for _, r := range w.ranks {
			if names {
				n += len(r.names)
			} else {
				n += len(r.blocks)
			}
		}
		return n
	})
}

// ignoredRemoves returns the number of ignored removes by reason.
func (m *model) ignoredRemoves() (all map[string]float64) {
	for _, w := range m.workers {
		for why, n := range w.ignored {
			if all == nil {
				all = make(map[string]float64)
			}
			all[why] += float64(n)
		}
	}
	return all
}

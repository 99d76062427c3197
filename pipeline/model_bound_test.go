package pipeline_test

import (
	"math"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// flushStored decides which blocks of a run are admitted, and which stale blocks and blocks of lower
// tiers they displace.
func (m *model) flushStored(mw *modelWorker, p *modelRun) {
	at := func(h uint64) modelBlock { return modelBlock{p.key.rank, p.key.tier, h} }
	for _, h := range p.hashes {
		delete(mw.stale, at(h))
	}
	m.makeRoom(mw, p)
	room := m.cfg.MaxBlocksPerRank - mw.rankBlocks(p.key.rank) + len(mw.staleOf(p.key.rank))
	replaced, stale := 0, len(mw.staleOf(p.key.rank))
	passes := make([]bool, len(p.hashes))
	for i, h := range p.hashes {
		// With dedup, room for the sources' blocks was reserved earlier.
		fits := mw.mode == feed.ConsolidateDedup || m.units()-replaced < m.limit()
		switch {
		case mw.blocks[at(h)] != nil:
			mw.blocks[at(h)].store(p.storeOps[i])
		case room > 0 && (fits || replaced < stale):
			room--
			if !fits {
				replaced++
			}
			mw.blocks[at(h)] = &modelCopies{copies: 1, parent: p.parentOf(i), blockSize: p.key.blockSize}
		default:
			mw.refused++
			continue
		}
		passes[i] = true
		if p.key.hashed {
			mw.blocks[at(h)].parent, mw.blocks[at(h)].blockSize = p.parentOf(i), p.key.blockSize
		}
	}
	for i := 0; i < len(passes); i++ {
		first := i
		for i < len(passes) && passes[i] {
			i++
		}
		if first < i {
			m.emitStored(mw, p, first, i)
		}
	}
	m.expire(mw, p.key.rank, replaced)
	if slices.Contains(passes, false) {
		m.emitOverfull(mw, p.key.rank, p.key.tier)
	}
}

// parentOf returns the parent of block i of a run; nil if it has none.
func (p *modelRun) parentOf(i int) *uint64 {
	if i > 0 {
		return &p.hashes[i-1]
	}
	return p.parent
}

// emitOverfull reports, once, that a tier of a rank exceeds the rank's block limit.
func (m *model) emitOverfull(mw *modelWorker, rank uint32, tier kvblock.Tier) {
	tiers := []kvblock.Tier{tier}
	if mw.mode == feed.ConsolidateDedup {
		tiers = namedTiers(nil)
	}
	if mw.overfull(rank, tiers) {
		return
	}
	var named []kvcastv1.Tier
	for _, t := range tiers {
		named = append(named, kvcastv1.Tier(t))
	}
	m.emit(mw, &kvcastv1.RouterEvent{DpRank: proto.Uint32(rank), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, Tiers: allAsNone(named)},
	}})
}

// overfull reports whether that was reported of the tiers.
func (mw *modelWorker) overfull(rank uint32, tiers []kvblock.Tier) bool {
	for _, tier := range tiers {
		if !mw.reported[modelReport{modelTier{rank, tier}, kvcastv1.Gap_REASON_TOO_MANY_BLOCKS}] {
			return false
		}
	}
	return true
}

// emitStored emits the blocks of a run from i up to j.
func (m *model) emitStored(mw *modelWorker, p *modelRun, i, j int) {
	mw.usedTiers[modelTier{p.key.rank, p.key.tier}] = true
	s := &kvcastv1.Stored{ParentHash: p.parent, BlockHashes: p.hashes[i:j], BlockSize: p.key.blockSize}
	if i > 0 {
		s.ParentHash = &p.hashes[i-1]
	}
	if p.key.hashed {
		s.TokensHashes = p.tokensHashes[i:j]
	}
	if size := int(p.key.blockSize); p.key.withTokens {
		s.TokenIds = p.tokenIDs[i*size : j*size]
	}
	if p.key.lora != "" {
		s.LoraName = proto.String(p.key.lora)
	}
	m.emit(mw, &kvcastv1.RouterEvent{
		DpRank: proto.Uint32(p.key.rank), Tier: kvcastv1.Tier(p.key.tier),
		Event: &kvcastv1.RouterEvent_Stored{Stored: s},
	})
}

// units returns the use of the process's block budget: one per block or, for consolidated
// sources, two per block and one per name.
func (m *model) units() (n int) {
	for _, mw := range m.workers {
		if mw.mode != feed.ConsolidateDedup {
			n += len(mw.blocks)
		}
		for _, r := range mw.ranks {
			n += r.units()
		}
	}
	return n
}

// limit returns the process's block budget.
func (m *model) limit() int {
	if n := m.cfg.Blocks.Limit(); n > 0 {
		return int(n)
	}
	return math.MaxInt
}

// expire evicts stale blocks while the rank exceeds its limit, and as many as replaced
// reports for the process's budget. The pipeline chooses which blocks of a tier are evicted.
func (m *model) expire(mw *modelWorker, rank uint32, replaced int) {
	over := max(mw.rankBlocks(rank)-m.cfg.MaxBlocksPerRank, replaced)
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		var stale []uint64
		for _, b := range mw.staleOf(rank) {
			if b.tier == tier {
				stale = append(stale, b.hash)
			}
		}
		n := min(len(stale), over)
		if n <= 0 {
			continue
		}
		over -= n
		gone := m.chosen(mw.name, m.lastIDs[mw.name]+1)
		if !subset(gone, stale) || len(gone) != n {
			slices.Sort(stale)
			gone = stale[:n] // fallback: the pipeline's choice is invalid
		}
		for _, h := range gone {
			delete(mw.blocks, modelBlock{rank, tier, h})
			delete(mw.stale, modelBlock{rank, tier, h})
		}
		mw.expired += n
		m.emitRemoved(mw, rank, tier, gone)
	}
}

// subset reports whether some has no duplicates and is a subset of all.
func subset(some, all []uint64) bool {
	seen := make(map[uint64]bool)
	for _, h := range some {
		if seen[h] || !slices.Contains(all, h) {
			return false
		}
		seen[h] = true
	}
	return true
}

// rankBlocks returns the number of blocks of a rank.
func (mw *modelWorker) rankBlocks(rank uint32) (n int) {
	for b := range mw.blocks {
		if b.rank == rank {
			n++
		}
	}
	return n
}

// staleOf returns a rank's stale blocks.
func (mw *modelWorker) staleOf(rank uint32) (all []modelBlock) {
	for b := range mw.stale {
		if b.rank == rank {
			all = append(all, b)
		}
	}
	return all
}

// count applies of to each worker, and omits results of 0.
func (m *model) count(of func(*modelWorker) int) map[string]float64 {
	var all map[string]float64
	for name, mw := range m.workers {
		if n := of(mw); n > 0 {
			if all == nil {
				all = make(map[string]float64)
			}
			all[name] = float64(n)
		}
	}
	return all
}

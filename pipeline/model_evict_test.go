package pipeline_test

import (
	"cmp"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// makeRoom evicts blocks of lower tiers for the new blocks of a run that do not fit beside the rank's blocks that are not stale.
func (m *model) makeRoom(mw *modelWorker, p *modelRun) {
	fresh := make(map[uint64]bool)
	for _, h := range p.hashes {
		if mw.blocks[modelBlock{p.key.rank, p.key.tier, h}] == nil {
			fresh[h] = true
		}
	}
	stale := len(mw.staleOf(p.key.rank))
	if over := mw.rankBlocks(p.key.rank) - stale + len(fresh) - m.cfg.MaxBlocksPerRank; over > 0 {
		m.evictFrom(mw, func(t modelTier) bool { return t.rank == p.key.rank }, p, over)
	}
	if mw.mode == feed.ConsolidateDedup {
		return // room for the sources' blocks was made earlier
	}
	admitted := min(len(fresh), m.cfg.MaxBlocksPerRank-(mw.rankBlocks(p.key.rank)-stale))
	if need := admitted - stale; need > m.limit()-m.units() {
		m.evictTotal(mw, p, need)
	}
}

// evictTotal evicts n blocks of lower tiers, from the worker with most of them first. mw is the worker that stores, and p its run,
// if it is one of the blocks of lower tiers.
func (m *model) evictTotal(mw *modelWorker, p *modelRun, n int) {
	holders := slices.SortedFunc(maps.Values(m.workers), func(a, b *modelWorker) int {
		return cmp.Or(cmp.Compare(b.lowerBlocks(), a.lowerBlocks()), cmp.Compare(a.name, b.name))
	})
	for _, holder := range holders {
		if holder == mw {
			n -= m.evictFrom(holder, func(modelTier) bool { return true }, p, n)
			continue
		}
		n -= m.evictFrom(holder, func(modelTier) bool { return true }, nil, n)
		if len(holder.out) > 0 {
			m.commit(holder, 0, 0)
		}
	}
}

// evictFrom evicts up to n blocks of a worker's lower tiers, and returns how many. The pipeline chooses which blocks of a tier, but
// none that the run p stores, and no stale ones of its rank. Elsewhere, stale blocks go first.
func (m *model) evictFrom(mw *modelWorker, of func(modelTier) bool, p *modelRun, n int) (evicted int) {
	all, stale := make(map[modelTier][]uint64), make(map[modelTier][]uint64)
	for b := range mw.blocks {
		t := modelTier{b.rank, b.tier}
		switch {
		case b.tier == kvblock.TierDevice || !of(t):
		case p != nil && p.key.rank == b.rank && (mw.stale[b] || p.key.tier == b.tier && slices.Contains(p.hashes, b.hash)):
		default:
			all[t] = append(all[t], b.hash)
			if mw.stale[b] {
				stale[t] = append(stale[t], b.hash)
			}
		}
	}
	tiers := slices.SortedFunc(maps.Keys(all), func(a, b modelTier) int {
		return cmp.Or(cmp.Compare(len(all[b]), len(all[a])), cmp.Compare(a.rank, b.rank), cmp.Compare(a.tier, b.tier))
	})
	for _, t := range tiers {
		take := min(n-evicted, len(all[t]))
		evicted += take
		expired := 0
		for left := take; left > 0; {
			size := min(left, m.cfg.MaxBlocks)
			gone := m.chosen(mw.name, m.lastIDs[mw.name]+1)
			if !subset(gone, all[t]) || len(gone) != size {
				slices.Sort(all[t])
				gone = all[t][:size] // fallback: the pipeline's choice is invalid
			}
			for _, h := range gone {
				if slices.Contains(stale[t], h) {
					expired++
				}
				delete(mw.blocks, modelBlock{t.rank, t.tier, h})
				delete(mw.stale, modelBlock{t.rank, t.tier, h})
			}
			all[t] = slices.DeleteFunc(slices.Clone(all[t]), func(h uint64) bool { return slices.Contains(gone, h) })
			m.emitRemoved(mw, t.rank, t.tier, gone)
			left -= size
		}
		if want := min(take, len(stale[t])); expired != want {
			mw.evicted += 1 << 20 // makes the metrics differ
		}
		if take > 0 {
			mw.evicted += take
			m.emitEvicted(mw, t)
		}
	}
	return evicted
}

// emitEvicted reports, once, that blocks of a tier are missing because of a limit.
func (m *model) emitEvicted(mw *modelWorker, t modelTier) {
	if !mw.overfull(t.rank, []kvblock.Tier{t.tier}) {
		m.emit(mw, &kvcastv1.RouterEvent{DpRank: proto.Uint32(t.rank), Event: &kvcastv1.RouterEvent_Gap{
			Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, Tiers: []kvcastv1.Tier{kvcastv1.Tier(t.tier)}},
		}})
	}
}

// lowerBlocks returns the number of blocks in lower tiers of all workers.
func (m *model) lowerBlocks() (n int) {
	for _, mw := range m.workers {
		n += mw.lowerBlocks()
	}
	return n
}

func (mw *modelWorker) lowerBlocks() (n int) {
	for b := range mw.blocks {
		if b.tier != kvblock.TierDevice {
			n++
		}
	}
	return n
}

package pipeline

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// storeWithin stores and emits as much of a run as fits into a rank. After each engine batch a rank has at most MaxBlocksPerRank blocks, in
// all its tiers together; within a batch it has at most a run more:
//
//  1. Blocks that the run's tier has are stored again, and are no longer stale.
//  2. For new blocks that do not fit beside the rank's blocks that are not stale, blocks of lower
//     tiers are evicted.
//  3. New blocks are stored in the run's order, as many as fit.
//  4. The other new blocks are refused: neither the table nor the journal has them. The block
//     after a refused block begins a new event, whose parent is the refused block. A Gap reports
//     the first refusal since the tier was last cleared.
//  5. Stale blocks are removed until the rank is within its limit, with a Removed for each tier.
//     Which stale blocks is unspecified.
//
// If the process has reached the limit of blocks of all workers, each new block replaces a stale block of the rank. Hence nothing is
// refused while the rank has a stale block or, for a block in device memory, while any lane has a block of a lower tier that it can evict;
// see evict.go. No stale block is removed without need.
func (l *Lane) storeWithin(rank *rankState, t *table, r *run, slot uint32) {
	for _, hash := range r.hashes {
		if b := t.blocks.table.Find(hash); b != nil && t.blocks.isStale(b) {
			t.blocks.refresh(b)
		}
	}
	units, credit := l.makeRoom(rank, t, r)
	stale := rank.stale()
	room := l.cfg.MaxBlocksPerRank - (rank.blocks() - stale)
	first, replaced := 0, 0
	var refused [consolidate.NumRefusals]int
	for i, hash := range r.hashes {
		if !t.has(hash) {
			why, fits := consolidate.RefusedRank, room > 0
			switch {
			case !fits:
			case units > 0:
				units--
			case l.tableBlocks.Reserve(1):
			case replaced < stale:
				replaced++
			case credit > 0:
				credit--
				l.tableBlocks.Adjust(1)
			default:
				why, fits = consolidate.RefusedTotal, false
			}
			if !fits {
				l.emitSlice(r, first, i)
				first = i + 1
				refused[why]++
				continue
			}
			room--
			l.countLower(r.key.tier, 1)
		}
		one := r.slice(i, i+1)
		t.storeRun(&one, slot)
	}
	l.emitSlice(r, first, len(r.hashes))
	l.tableBlocks.Release(int64(units))
	l.expire(rank, r, replaced)
	for why, n := range refused {
		l.reportRefused(rank, r.key.rank, l.tiersOfRun(r), consolidate.Refusal(why), n)
	}
}

// emitSlice emits a run's blocks from i up to j, if there are any.
func (l *Lane) emitSlice(r *run, i, j int) {
	part := r.slice(i, j)
	l.emitStored(&part)
}

// expire removes as many stale blocks as the rank has beyond its limit, or as many as were replaced
// if that is more. It reuses the memory of the run's hashes.
func (l *Lane) expire(rank *rankState, r *run, replaced int) {
	over := max(rank.blocks()-l.cfg.MaxBlocksPerRank, replaced)
	for tier, t := range &rank.tables {
		if t == nil || over <= 0 {
			continue
		}
		gone := t.expire(over, r.hashes[:0])
		l.emitRemoved(r.key.rank, kvblock.Tier(tier), gone, "")
		l.counts.staleRemoved += uint64(len(gone))
		over -= len(gone)
		kept := min(replaced, len(gone)) // units used by the blocks that replaced them
		replaced -= kept
		l.tableBlocks.Release(int64(len(gone) - kept))
		l.countLower(kvblock.Tier(tier), -len(gone))
	}
}

var refusalNames = [consolidate.NumRefusals]string{
	consolidate.RefusedRank:       "rank",
	consolidate.RefusedTotal:      "total",
	consolidate.RefusedAttributes: "attributes",
}

// gapReason returns the reason of the Gap that reports a refusal.
func gapReason(why consolidate.Refusal) kvcastv1.Gap_Reason {
	if why == consolidate.RefusedAttributes {
		return kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES
	}
	return kvcastv1.Gap_REASON_TOO_MANY_BLOCKS
}

// tiersOfRun returns the tiers that lack a run's blocks if they are refused: all if the sources are deduplicated.
func (l *Lane) tiersOfRun(r *run) kvblock.Tiers {
	if l.consolidation == dedup {
		return kvblock.AllTiers
	}
	return 1 << r.key.tier
}

// reportRefused counts refused blocks, and reports them.
func (l *Lane) reportRefused(rank *rankState, name uint32, tiers kvblock.Tiers, why consolidate.Refusal, blocks int) {
	l.counts.blocksRefused[why] += uint64(blocks)
	if blocks > 0 {
		l.logLimit(limitRefuses, why, name, tiers, blocks)
		l.reportOmitted(rank, name, tiers, gapReason(why))
	}
}

// reportOmitted emits a Gap for the first blocks that are refused or evicted since the tiers were last cleared, since the rank
// lacks blocks of the engine from then on.
func (l *Lane) reportOmitted(rank *rankState, name uint32, tiers kvblock.Tiers, reason kvcastv1.Gap_Reason) {
	if rank.hasReported(reason, tiers) {
		return
	}
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(name), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: reason, Tiers: tiersOf(tiers)},
	}})
}

// blocks returns the number of blocks of the rank.
func (r *rankState) blocks() (n int) {
	for _, t := range &r.tables {
		if t != nil {
			n += t.blocks.table.Len()
		}
	}
	return n + r.otherGroups.Len()
}

// stale returns the number of stale blocks of the rank.
func (r *rankState) stale() (n int) {
	for _, t := range &r.tables {
		if t != nil {
			n += t.blocks.stale
		}
	}
	return n
}

// gap makes all blocks of the rank stale, with one copy each. It returns false if a table has had maxGeneration gaps.
func (r *rankState) gap() bool {
	ok := true
	for _, t := range &r.tables {
		if t != nil && !t.gap() {
			ok = false
		}
	}
	r.otherGroups.Gap()
	return ok
}

// replaceBlockSize removes the blocks of all ranks that have another size, in tokens. They are partial blocks, which are no prefix of any
// request. Usually they are the few blocks that the engine stored before its first whole block.
func (l *Lane) replaceBlockSize(size uint32) {
	l.flush(flushUnmergeable)
	for _, name := range slices.Sorted(maps.Keys(l.ranks)) {
		r := l.ranks[name]
		for tier, t := range &r.tables {
			if t == nil {
				continue
			}
			gone := t.removeOtherSizes(size)
			l.releaseBlocks(kvblock.Tier(tier), len(gone))
			for part := range slices.Chunk(gone, l.cfg.MaxBlocks) {
				l.emitRemoved(name, kvblock.Tier(tier), part, "")
			}
			if tr := l.tracker(name); tr != nil {
				tr.RemoveBlocks(gone)
			}
		}
	}
}

// removeOtherSizes removes the blocks of a known size other than this, and returns their hashes, sorted.
func (t *table) removeOtherSizes(size uint32) (gone []uint64) {
	other := func(a attribute.Set) bool { return a.BlockSize != 0 && a.BlockSize != size }
	found := false
	for _, set := range t.attrs.All() {
		found = found || other(set)
	}
	if !found {
		return nil
	}
	for b := range t.blocks.table.All() {
		if other(t.attrs.At(b.Value.attr)) {
			gone = append(gone, b.Key())
		}
	}
	slices.Sort(gone)
	for _, hash := range gone {
		t.remove(hash, copies.RemoveAll)
	}
	return gone
}

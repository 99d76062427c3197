package pipeline

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/pipeline/attribute"
	"github.com/kvcast/kvcast/pipeline/consolidate"
	"github.com/kvcast/kvcast/pipeline/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// storeWithin applies and emits a run of stores to a rank that has no room for all of it. A
// rank has at most MaxBlocksPerRank blocks, in all its tiers together, after each engine
// batch, and within one at most a run's more:
//
//  1. Blocks that the run's tier has already are stored again, and are no longer stale.
//  2. Of the others as many are stored, in the run's order, as the rank has room for beside
//     its blocks that are not stale.
//  3. The rest is refused: it is neither in the table nor in the journal. What follows a
//     refused block begins a new event, with that block as its parent. The first refusal
//     since the rank was last cleared is reported by a Gap.
//  4. Then stale blocks are removed until the rank is within its limit, with a Removed for
//     each tier. Which of them is unspecified.
//
// Where the process has reached its block limit, over all workers together, a new block is
// stored only in place of a stale one of the rank.
//
// So nothing is refused while the rank has a stale block, and no block is removed without
// need.
func (l *Lane) storeWithin(rank *rankState, t *table, r *run, slot uint32) {
	for _, hash := range r.hashes {
		if s, i, ok := t.blocks.table.Find(hash); ok && t.blocks.isStale(&s.Slots[i]) {
			t.blocks.refresh(s, i)
		}
	}
	stale := rank.stale()
	room := l.cfg.MaxBlocksPerRank - (rank.blocks() - stale)
	first, replaced := 0, 0
	var refused [consolidate.NumRefusals]int
	for i, hash := range r.hashes {
		if !t.has(hash) {
			why, fits := consolidate.RefusedRank, room > 0
			if fits && !l.tableBlocks.Reserve(1) {
				why, fits = consolidate.RefusedTotal, replaced < stale
				replaced++
			}
			if !fits {
				l.emitSlice(r, first, i)
				first = i + 1
				refused[why]++
				continue
			}
			room--
		}
		one := r.slice(i, i+1)
		t.storeRun(&one, slot)
	}
	l.emitSlice(r, first, len(r.hashes))
	l.expire(rank, r, min(replaced, stale))
	for why, n := range refused {
		l.reportRefused(rank, r.key.rank, consolidate.Refusal(why), n)
	}
}

// emitSlice emits a run's blocks from i up to j, if there are any.
func (l *Lane) emitSlice(r *run, i, j int) {
	part := r.slice(i, j)
	l.emitStored(&part)
}

// expire removes the rank's blocks beyond its limit, and as many stale blocks as were
// replaced: at most as many as the run has, whose memory it uses.
func (l *Lane) expire(rank *rankState, r *run, replaced int) {
	over := max(rank.blocks()-l.cfg.MaxBlocksPerRank, replaced)
	for tier, t := range &rank.tables {
		if t == nil || over <= 0 {
			continue
		}
		gone := t.expire(over, r.hashes[:0])
		l.emitRemoved(r.key.rank, wire.Tier(tier), gone)
		l.counts.staleRemoved += uint64(len(gone))
		over -= len(gone)
		kept := min(replaced, len(gone)) // for the blocks that replaced them
		replaced -= kept
		l.tableBlocks.Release(int64(len(gone) - kept))
	}
}

var refusalNames = [consolidate.NumRefusals]string{
	consolidate.RefusedRank:       "rank",
	consolidate.RefusedTotal:      "total",
	consolidate.RefusedAttributes: "attributes",
}

// gapReported reports whether a Gap for this reason was emitted since the rank was last
// cleared.
func (r *rankState) gapReported(why consolidate.Refusal) bool {
	if why == consolidate.RefusedAttributes {
		return r.attributesLacking
	}
	return r.overfull
}

// reportRefused counts refused blocks. The first time since the rank was cleared it emits a
// Gap: the rank's blocks are then not all that the engine has.
func (l *Lane) reportRefused(rank *rankState, name uint32, why consolidate.Refusal, blocks int) {
	l.counts.blocksRefused[why] += uint64(blocks)
	if blocks == 0 || rank.gapReported(why) {
		return
	}
	reason := kvcastv1.Gap_REASON_TOO_MANY_BLOCKS
	if why == consolidate.RefusedAttributes {
		reason = kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES
	}
	l.emit(&kvcastv1.RouterEvent{DpRank: proto.Uint32(name), Event: &kvcastv1.RouterEvent_Gap{
		Gap: &kvcastv1.Gap{Reason: reason},
	}})
}

// blocks returns the number of blocks of the rank.
func (r *rankState) blocks() (n int) {
	for _, t := range &r.tables {
		if t != nil {
			n += t.blocks.len()
		}
	}
	return n
}

// stale returns how many of them are from before the last gap.
func (r *rankState) stale() (n int) {
	for _, t := range &r.tables {
		if t != nil {
			n += t.blocks.stale
		}
	}
	return n
}

// gap makes all blocks of the rank stale, with one copy each. It returns false
// where there have been more gaps than can be numbered: 33,554,431.
func (r *rankState) gap() bool {
	numbered := true
	for _, t := range &r.tables {
		if t != nil && !t.gap() {
			numbered = false
		}
	}
	return numbered
}

// replaceBlockSize removes the blocks of all ranks that have another size: the engine's
// stores have shown that these are partial blocks, which are no prefix of a request.
// As a rule they are few: those before its first whole block.
func (l *Lane) replaceBlockSize(size uint32) {
	l.flush(flushUnmergeable)
	for _, name := range slices.Sorted(maps.Keys(l.ranks)) {
		r := l.ranks[name]
		for tier, t := range &r.tables {
			if t == nil {
				continue
			}
			gone := t.removeOtherSizes(size)
			l.tableBlocks.Release(int64(len(gone)))
			for part := range slices.Chunk(gone, l.cfg.MaxBlocks) {
				l.emitRemoved(name, wire.Tier(tier), part)
			}
			if tr := l.tracker(name); tr != nil {
				tr.RemoveBlocks(gone)
			}
		}
	}
}

// removeOtherSizes removes the blocks that are known to have another size, and returns their
// hashes in order.
func (t *table) removeOtherSizes(size uint32) (gone []uint64) {
	other := func(a attribute.Set) bool { return a.BlockSize != 0 && a.BlockSize != size }
	if !slices.ContainsFunc(slices.Collect(t.attrs.All()), other) {
		return nil
	}
	for s := range t.blocks.table.Segments() {
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && other(t.attrs.At(b.Value.attr)) {
				gone = append(gone, b.Key())
			}
		}
	}
	slices.Sort(gone)
	for _, hash := range gone {
		t.remove(hash, copies.RemoveAll)
	}
	return gone
}

package pipeline

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Blocks of lower tiers make room, if a limit is reached: nothing else bounds a tier that an engine never removes from. Blocks in
// device memory do not make room for others.
//
//   - A full dp rank evicts blocks of its own.
//   - If all workers together are at the limit, the lane that stores evicts blocks of the lane with most of them. If that is
//     another lane, it appends the removes as an entry of that lane, in a turn of that lane.
//   - A lane never waits for the turn of another. If a lane is in use, its blocks are owed: the limit is exceeded, by at most
//     maxOwed, and the owner evicts as many at its next batch. Only blocks in device memory are stored on credit.
//   - Of a tier, the stale blocks go first. The others are visited in turn, and one that was stored since the last visit is passed
//     over once (CLOCK), unless too many are. So old blocks go before new ones, roughly.

const (
	// evictShift makes an eviction as large as 1/4096 of the limit, so that not every store evicts.
	evictShift = 12
	// maxOwed bounds the blocks beyond the limit of all workers, or 1/64 of the limit if that is more.
	maxOwed = 1024
	// maxPaid bounds the blocks that a lane evicts with one batch because it owes them.
	maxPaid = 16_384
)

// holders are the lanes with blocks in lower tiers.
type holders struct {
	blocks atomic.Int64 // in lower tiers, of all lanes
	lanes  sync.Map     // the keys are *Lane
}

// bySize returns the lanes that have blocks in lower tiers, the one with most of them first.
func (h *holders) bySize() (lanes []holder) {
	for key := range h.lanes.Range {
		l := key.(*Lane)
		if n := l.lower.Load(); n > 0 {
			lanes = append(lanes, holder{l, n})
		}
	}
	slices.SortFunc(lanes, func(a, b holder) int {
		return cmp.Or(cmp.Compare(b.blocks, a.blocks), cmp.Compare(a.lane.worker, b.lane.worker))
	})
	return lanes
}

// holder is a lane and its number of blocks in lower tiers.
type holder struct {
	lane   *Lane
	blocks int64
}

// countLower counts n blocks more in a tier; n may be negative.
func (l *Lane) countLower(tier kvblock.Tier, n int) {
	if tier <= kvblock.TierDevice || n == 0 {
		return
	}
	l.lower.Add(int64(n))
	l.holders.blocks.Add(int64(n))
	if !l.isHolder {
		l.isHolder = true
		l.holders.lanes.Store(l, nil)
	}
}

// releaseBlocks returns the units of n blocks that a tier has no longer.
func (l *Lane) releaseBlocks(tier kvblock.Tier, n int) {
	l.tableBlocks.Release(int64(n))
	l.countLower(tier, -n)
}

// storing is a run that is being stored, whose blocks are not evicted.
type storing struct {
	rank  *rankState
	table *table
	// hashes are the blocks of the run.
	hashes map[uint64]struct{}
}

// makeRoom evicts blocks of lower tiers for the new blocks of a run. It returns how many units of the process's budget the lane
// has got for them, and how many it may use beyond the limit.
func (l *Lane) makeRoom(rank *rankState, t *table, r *run) (units, credit int) {
	if own, all := rank.lower(), l.holders.blocks.Load(); own == 0 && (all == 0 || l.tableBlocks.Room() >= int64(len(r.hashes))) {
		return 0, 0
	}
	s := storing{rank: rank, table: t, hashes: make(map[uint64]struct{}, len(r.hashes))}
	fresh := 0
	for _, hash := range r.hashes {
		if _, ok := s.hashes[hash]; !ok && !t.has(hash) {
			fresh++
		}
		s.hashes[hash] = struct{}{}
	}
	limit, stale := l.cfg.MaxBlocksPerRank, rank.stale()
	if lack := rank.blocks() - stale + fresh - limit; lack > 0 {
		evicted := l.evictTables(map[uint32]*rankState{r.key.rank: rank}, max(lack, limit>>evictShift), &s, consolidate.RefusedRank)
		l.tableBlocks.Release(int64(evicted))
	}
	admitted := min(fresh, limit-(rank.blocks()-stale))
	need := admitted - stale
	if int64(need) <= l.tableBlocks.Room() {
		return 0, 0
	}
	evicted, owed := l.evictHolders(need, &s)
	if r.key.tier > kvblock.TierDevice {
		owed = 0
	}
	return evicted, min(owed, need-evicted)
}

// reserveEvicting reserves units of the process's budget, of which there are too few, for a tracker of the lane. It evicts blocks of
// lower tiers for that, if there are enough.
func (l *Lane) reserveEvicting(units int64) bool {
	budget := l.cfg.Blocks
	if units-budget.Room() > l.holders.blocks.Load() {
		return false
	}
	n, owed := l.evictHolders(int(units), nil)
	rest := units - int64(n)
	switch {
	case budget.Reserve(rest):
		return true
	case int64(owed) >= rest:
		budget.Adjust(rest)
		return true
	default:
		budget.Release(int64(n))
		return false
	}
}

// evictHolders evicts blocks of lower tiers of the lanes with most of them, for as many units of the process's budget. It returns
// how many units the caller has got, which remain reserved, so that no other lane takes them, and how many more it may use beyond
// the limit, since busy lanes owe them.
func (l *Lane) evictHolders(units int, s *storing) (evicted, owed int) {
	budget := l.cfg.Blocks
	want := max(units, int(budget.Limit()>>evictShift))
	for _, h := range l.holders.bySize() {
		if evicted >= units {
			break
		}
		switch n := want - evicted; {
		case h.lane == l:
			evicted += l.evictTables(l.ranks, n, s, consolidate.RefusedTotal)
		case budget.IsLargePart(): // no other worker makes room for it
		case h.lane.turn.TryLock():
			l.mu.Unlock() // an append may wait
			h.lane.mu.Lock()
			n = h.lane.evictForOther(n)
			h.lane.cfg.Blocks.MoveTo(budget, int64(n))
			evicted += n
			h.lane.unlock()
			l.mu.Lock()
		default:
			owed += int(h.blocks)
		}
	}
	if evicted > units {
		budget.Release(int64(evicted - units))
		evicted = units
	}
	credit := max(maxOwed, budget.Limit()>>6) - budget.Excess()
	return evicted, max(0, min(owed, int(credit)))
}

// evictForOther evicts up to n blocks, as an entry, for another lane, which has locked this one.
func (l *Lane) evictForOther(n int) (evicted int) {
	if l.end.closed {
		return 0
	}
	l.entry.begin(0, 0)
	evicted = l.evictTables(l.ranks, n, nil, consolidate.RefusedTotal)
	l.commit()
	return evicted
}

// payOwed evicts the blocks that are beyond the limit of all workers, because other lanes could not evict them.
func (l *Lane) payOwed() {
	if l.lower.Load() == 0 {
		return
	}
	if n := l.tableBlocks.Excess(); n > 0 {
		l.tableBlocks.Release(int64(l.evictTables(l.ranks, int(min(n, maxPaid)), nil, consolidate.RefusedTotal)))
	}
}

// evictTables evicts up to n blocks of lower tiers of some of the lane's ranks, from the largest of their tables first. It emits
// removes, and a Gap for each tier of a rank unless a Gap has reported its refusals or evictions. The units of the blocks remain
// reserved. s is the run that the lane is storing, if any: the stale blocks of its rank make room anyway.
func (l *Lane) evictTables(ranks map[uint32]*rankState, n int, s *storing, why consolidate.Refusal) (evicted int) {
	type candidate struct {
		rank  uint32
		tier  kvblock.Tier
		table *table
		size  int
	}
	var all []candidate
	for _, name := range slices.Sorted(maps.Keys(ranks)) {
		for tier := kvblock.TierDevice + 1; tier < kvblock.TierEnd; tier++ {
			if t := ranks[name].tables[tier]; t != nil {
				all = append(all, candidate{name, tier, t, t.evictable(ranks[name], s)})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Compare(b.size, a.size) })
	for _, c := range all {
		take := min(n-evicted, c.size)
		if take <= 0 {
			break
		}
		rank := ranks[c.rank]
		gone := c.table.evict(take, rank, s)
		for part := range slices.Chunk(gone, l.cfg.MaxBlocks) {
			l.emitRemoved(c.rank, c.tier, part, "")
		}
		l.countLower(c.tier, -len(gone))
		l.counts.blocksEvicted[why] += uint64(len(gone))
		evicted += len(gone)
		l.logLimit(limitEvicts, why, c.rank, 1<<c.tier, len(gone))
		l.reportOmitted(rank, c.rank, 1<<c.tier, kvcastv1.Gap_REASON_TOO_MANY_BLOCKS)
	}
	return evicted
}

// evictable returns how many blocks evict can remove.
func (t *table) evictable(rank *rankState, s *storing) int {
	n := t.blocks.table.Len()
	if s == nil || s.rank != rank {
		return n
	}
	n -= t.blocks.stale
	if s.table == t {
		for hash := range s.hashes {
			if b := t.blocks.table.Find(hash); b != nil && !t.blocks.isStale(b) {
				n--
			}
		}
	}
	return n
}

// evict removes n blocks, of at least as many that are evictable, and returns their hashes.
func (t *table) evict(n int, rank *rankState, s *storing) (gone []uint64) {
	own := s != nil && s.rank == rank
	if !own {
		gone = t.expire(n, gone)
	}
	// patience is the number of segments whose recently stored blocks are passed over: a bound for the time under the lock.
	patience := 4 + 2*n/hashtable.MaxSegment
	for len(gone) < n {
		segment, next := t.blocks.table.SegmentAt(t.evictFrom)
		segment.Prefetch()
		first := len(gone)
		for i := range segment.Len() {
			b := segment.At(i)
			if b == nil || len(gone) == n || own && t.blocks.isStale(b) {
				continue
			}
			if s.has(t, b.Key()) {
				continue
			}
			if b.Value.flags&flagRecent != 0 && patience > 0 {
				b.Value.flags &^= flagRecent
				continue
			}
			gone = append(gone, b.Key())
		}
		for _, hash := range gone[first:] {
			t.remove(hash, copies.RemoveAll)
		}
		if len(gone) < n {
			t.evictFrom = next
		}
		patience--
	}
	return gone
}

// has reports whether a run that is stored into a table has a block.
func (s *storing) has(t *table, hash uint64) bool {
	if s == nil || s.table != t {
		return false
	}
	_, ok := s.hashes[hash]
	return ok
}

// lower returns the number of blocks of the rank in lower tiers.
func (r *rankState) lower() (n int) {
	for _, t := range r.tables[kvblock.TierDevice+1:] {
		if t != nil {
			n += t.blocks.table.Len()
		}
	}
	return n
}

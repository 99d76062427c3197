package radix

import (
	"math/bits"
	"slices"

	"github.com/kvcast/kvcast/internal/hashtable"
)

// sweep is the release of the blocks of a retired rank, or of retired tiers of a rank, and its progress.
type sweep struct {
	rank   *Rank // nil: retired
	model  *model
	number uint32
	table  *table
	tiers  uint8  // bits to remove
	from   uint64 // identifies the next segment to visit, see hashtable.Table.SegmentAt
}

// retire makes matches ignore the blocks of a rank. The rank's number has no rank until the sweep is complete.
func (x *Index) retire(r *Rank) {
	x.ranks[r.number] = numbered{}
	x.sweeps = slices.DeleteFunc(x.sweeps, func(s *sweep) bool { return s.rank == r })
	table := r.table
	x.sweeps = append(x.sweeps, &sweep{model: r.model, number: r.number, table: &table, tiers: allTiers})
}

// retireTier gives a tier of a rank another bit. The blocks that have the old bit are ignored.
func (x *Index) retireTier(r *Rank, tier int) {
	unused := ^(r.live | r.stale)
	if unused == 0 {
		// The tiers of the rank were cleared as many times since the last complete sweep as there are further bits.
		i := slices.IndexFunc(x.sweeps, func(s *sweep) bool { return s.rank == r })
		for r.stale != 0 {
			x.sweepSegment(x.sweeps[i])
		}
		x.sweeps = slices.Delete(x.sweeps, i, i+1)
		unused = ^r.live
	}
	if r.stale == 0 {
		x.sweeps = append(x.sweeps, &sweep{rank: r, number: r.number, table: &r.table, tiers: r.bits[tier]})
	}
	r.stale |= r.bits[tier]
	r.bits[tier] = 1 << bits.TrailingZeros8(unused)
	r.blocks[tier], r.digests[tier] = 0, 0
	x.number(r)
}

// limitSweeps sweeps if there are many sweeps.
func (x *Index) limitSweeps() {
	if len(x.sweeps) > x.tree.limits.sweeps {
		x.Sweep()
	}
}

// Sweep releases blocks of ranks that were removed, and of ranks and tiers that were cleared. It visits twice as many
// slots as blocks were stored since the last sweep, and at least 1,024, so that such blocks cannot accumulate if it is
// called regularly. It reports whether any such blocks are left. It also forgets runs, if too many are unheld.
func (x *Index) Sweep() (more bool) {
	budget := x.tree.limits.minSweep + 2*x.stored
	x.stored = 0
	x.tree.forgetUnheld(budget)
	for len(x.sweeps) > 0 && budget > 0 {
		budget -= hashtable.SegmentSlots
		s := x.sweeps[0]
		done := x.sweepSegment(s)
		if s.from != 0 {
			continue
		}
		x.sweeps[0] = nil
		if x.sweeps = x.sweeps[1:]; !done { // others first, since tiers of the rank may be retired without end
			x.sweeps = append(x.sweeps, s)
		}
	}
	return len(x.sweeps) > 0
}

// sweepSegment visits the next segment of a table, and reports whether the sweep is complete.
//
// The first slot of a run releases all blocks that the rank holds there in the tiers, since releasing them one by one
// takes longer. The places of later slots may then no longer exist; releaseRun ignores them.
func (x *Index) sweepSegment(s *sweep) (done bool) {
	visiting, next := s.table.SegmentAt(s.from)
	x.hashes = x.hashes[:0]
	for i := range visiting.Slots {
		t := &visiting.Slots[i].Value.tag
		if t.has(s.tiers) && t.isPlaced() {
			x.tree.releaseRun(t.place().run, s.number, s.tiers)
		}
		if s.rank != nil && t.has(s.tiers) {
			if *t &^= tag(s.tiers); !t.has(allTiers) {
				x.hashes = append(x.hashes, visiting.Slots[i].Key())
			}
		}
	}
	for _, hash := range x.hashes {
		found, i, _ := s.table.Find(hash)
		s.rank.drop(found, i)
	}
	s.from = next
	return next == 0 && x.completeSweep(s)
}

// completeSweep reuses what a sweep of all segments has released. It returns false if another sweep is needed, since
// further tiers were retired meanwhile.
func (x *Index) completeSweep(s *sweep) bool {
	if r := s.rank; r != nil {
		r.stale &^= s.tiers
		s.tiers = r.stale
		return r.stale == 0
	}
	x.freeNumbers = append(x.freeNumbers, s.number)
	if s.model.ranks--; s.model.ranks == 0 {
		x.tree.drop(s.model.root)
		delete(x.models, s.model.name)
	}
	return true
}

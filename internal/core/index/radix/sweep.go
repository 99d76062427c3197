package radix

import (
	"math/bits"
	"slices"
)

// sweep is the release of the blocks of a retired rank, or of retired tiers of a rank, and its progress.
type sweep struct {
	rank   *Rank // nil: retired
	model  *model
	number uint32
	table  *table
	tiers  uint8 // bits to remove
	rest   int   // slots that are not visited, the first of the table; 0: the sweep has not begun
}

// retire makes matches ignore the blocks of a rank. The rank's number has no rank until the sweep is complete.
func (x *Index) retire(r *Rank) {
	x.setNumbered(r.number, numbered{})
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
			x.sweepSome(x.sweeps[i])
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
		budget -= sweepStep
		s := x.sweeps[0]
		done := x.sweepSome(s)
		if s.rest != 0 {
			continue
		}
		x.sweeps[0] = nil
		if x.sweeps = x.sweeps[1:]; !done { // others first, since tiers of the rank may be retired without end
			x.sweeps = append(x.sweeps, s)
		}
	}
	return len(x.sweeps) > 0
}

// sweepStep is the number of slots that sweepSome visits at most.
const sweepStep = 32

// sweepSome visits the next slots of a table, and reports whether the sweep is complete.
//
// The table may change, also by this. Only new blocks, and the last block of the table, get the slots of deleted ones, so that the blocks that are
// not yet visited stay in the first ones.
//
// The first slot of a run releases all blocks that the rank holds there in the tiers, since releasing them one by one
// takes longer. The places of later slots may then no longer exist; releaseRun ignores them.
func (x *Index) sweepSome(s *sweep) (done bool) {
	if s.rest = min(s.rest, s.table.Slots()); s.rest == 0 {
		s.rest = s.table.Slots()
	}
	for to := max(0, s.rest-sweepStep); s.rest > to; s.rest-- {
		e := s.table.At(s.rest)
		if e == nil {
			continue
		}
		t := &e.Value.tag
		if !t.has(s.tiers) {
			continue
		}
		if t.isPlaced() {
			x.tree.releaseRun(t.place().run, s.number, s.tiers)
		}
		if s.rank != nil {
			if *t &^= tag(s.tiers); !t.has(allTiers) {
				s.rank.drop(e)
			}
		}
	}
	return s.rest == 0 && x.completeSweep(s)
}

// completeSweep reuses what a sweep of all blocks has released. It returns false if another sweep is needed, since
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

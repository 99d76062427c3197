package radix

import "github.com/kvcast/kvcast/internal/hashtable"

// retiredRank is the blocks of a removed rank, and the progress of the sweep of its table. Matches ignore the rank,
// since its number has no rank until the sweep is complete.
type retiredRank struct {
	model  *model
	number uint32
	table  hashtable.Table[slot, tag]
	from   uint64 // identifies the next segment to sweep, see hashtable.Table.SegmentAt
	slot   int    // next slot of the segment
	swept  bool
}

// retire makes matches ignore the blocks of a rank.
func (x *Index) retire(r *Rank) {
	x.ranks[r.number] = nil
	x.retired = append(x.retired, &retiredRank{model: r.model, number: r.number, table: r.table})
}

// limitRetired sweeps if there are many retired ranks.
func (x *Index) limitRetired() {
	if len(x.retired) > x.tree.limits.retired {
		x.Sweep()
	}
}

// Sweep releases blocks of ranks that were cleared or removed. It visits twice as many slots as blocks were stored
// since the last sweep, and at least 1,024, so that such blocks cannot accumulate if it is called regularly.
func (x *Index) Sweep() {
	budget := x.tree.limits.minSweep + 2*x.stored
	x.stored = 0
	for len(x.retired) > 0 && budget > 0 {
		g := x.retired[0]
		if budget = g.sweep(&x.tree, budget); !g.swept {
			return
		}
		x.freeNumbers = append(x.freeNumbers, g.number)
		if g.model.ranks--; g.model.ranks == 0 {
			x.tree.drop(g.model.root)
			delete(x.models, g.model.name)
		}
		x.retired[0] = nil
		x.retired = x.retired[1:]
	}
}

// sweep visits up to budget slots, and returns the rest of the budget.
//
// The first slot of a run releases all blocks that the rank holds there, since releasing them one by one would split
// the run. The places of later slots may then no longer exist; releaseRun ignores them.
func (g *retiredRank) sweep(t *tree, budget int) int {
	for !g.swept {
		s, next := g.table.SegmentAt(g.from)
		for ; g.slot < len(s.Slots); g.slot++ {
			if budget == 0 {
				return 0
			}
			budget--
			tag := s.Tags[g.slot]
			if !tag.hasPlace() {
				continue
			}
			for tier := range NumTiers {
				if tag&tierBit(tier) != 0 {
					t.releaseRun(s.Slots[g.slot].Value.at, newHolder(g.number, tier))
				}
			}
		}
		g.from, g.slot, g.swept = next, 0, next == 0
	}
	return budget
}

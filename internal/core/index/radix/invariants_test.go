package radix

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
)

// names counts the names of blocks by rank and tier bit.
type names map[position]map[holderBit]uint32

type holderBit struct {
	rank uint32
	bit  uint8
}

func (n names) add(at position, number uint32, tiers uint8) {
	for ; tiers != 0; tiers &= tiers - 1 {
		if n[at] == nil {
			n[at] = make(map[holderBit]uint32)
		}
		n[at][holderBit{number, tiers & -tiers}]++
	}
}

// checkInvariants returns an error that describes what is wrong with an index.
func checkInvariants(x *Index) error {
	t := &x.tree
	want, stale := make(names), make(names) // stale has names by run
	sweeps := make(map[*Rank]*sweep)
	for _, s := range x.sweeps {
		if s.rank != nil && sweeps[s.rank] != nil {
			return fmt.Errorf("rank %d has two sweeps", s.number)
		}
		sweeps[s.rank] = s
	}
	for number, n := range x.ranks {
		if n.rank == nil {
			continue
		}
		if err := checkRank(x, n, uint32(number), sweeps[n.rank], want, stale); err != nil {
			return fmt.Errorf("rank %d: %w", number, err)
		}
	}
	reachable := make(map[uint32]bool)
	children := make(map[position]uint32)
	for id := uint32(1); id < t.runs; id++ {
		if r := t.run(id); len(r.tokens) > 0 {
			reachable[id] = true
			if r.after.run == 0 {
				return fmt.Errorf("run %d follows no block", id)
			}
			children[r.after]++
		} else if r.detached {
			reachable[id] = true
		}
	}
	for name, m := range x.models {
		root := t.run(m.root)
		if len(root.tokens) > 0 || root.isHeld() || root.after.run != 0 || name != m.name || reachable[m.root] {
			return fmt.Errorf("root of %q: %+v", name, root)
		}
		reachable[m.root] = true
	}
	free := make(map[uint32]bool)
	for _, id := range t.free {
		free[id] = true
	}
	heads, unheld, detached := 0, 0, 0
	for id := uint32(1); id < t.runs; id++ {
		if reachable[id] == free[id] {
			return fmt.Errorf("run %d: reachable is %t, free is %t", id, reachable[id], free[id])
		}
		r := t.run(id)
		if r.unheld {
			unheld++
		}
		if r.detached {
			detached++
		}
		if err := checkRun(x, id, r, want, stale, children); err != nil {
			return fmt.Errorf("run %d, %+v: %w", id, r, err)
		}
		if len(r.tokens) > 0 {
			if t.byHead.Find(t.headHash(r.after, r.tokens[0]), func(n uint32) bool { return n == id }) != id {
				return fmt.Errorf("run %d is not found", id)
			}
			heads++
		}
	}
	for at, holders := range want {
		if len(holders) > 0 {
			return fmt.Errorf("the tree does not have the names %v of %v", holders, at)
		}
	}
	if len(children) > 0 {
		return fmt.Errorf("no run has the branches %v", children)
	}
	if len(t.free)+len(reachable) != int(t.runs)-1 || len(free) != len(t.free) {
		return fmt.Errorf("%d of %d runs are free, %d reachable", len(t.free), t.runs-1, len(reachable))
	}
	if unheld != t.unheldRuns || detached != t.detachedRuns {
		return fmt.Errorf("%d runs are unheld, %d detached, want %d and %d", t.unheldRuns, t.detachedRuns, unheld, detached)
	}
	if heads != t.byHead.Len() {
		return fmt.Errorf("%d runs are found, but there are %d heads", heads, t.byHead.Len())
	}
	return nil
}

// checkRank checks a rank, and adds the names of its blocks to want, and those in stale tiers to stale.
func checkRank(x *Index, n numbered, number uint32, s *sweep, want, stale names) error {
	r := n.rank
	live := uint8(0)
	for tier, bit := range r.bits {
		if bits.OnesCount8(bit) != 1 || live&bit != 0 || int(n.tiers[bits.TrailingZeros8(bit)]) != tier {
			return fmt.Errorf("bits %b, tiers %v", r.bits, n.tiers)
		}
		live |= bit
	}
	if r.number != number || live != r.live || live != n.live || live&r.stale != 0 {
		return fmt.Errorf("number %d, live bits %b, %b, %b, stale bits %b", r.number, live, r.live, n.live, r.stale)
	}
	if (s != nil) != (r.stale != 0) || s != nil && (s.table != &r.table || s.tiers&^r.stale != 0) {
		return fmt.Errorf("stale bits %b, sweep %+v", r.stale, s)
	}
	sets := map[uint32]bool{0: true} // the rank uses it itself
	orphaned, hidden := 0, 0
	hashes := make(map[position]int)
	if err := checkRankNames(x, r); err != nil {
		return err
	}
	for e := range r.table.All() {
		if t := e.Value.tag; t.has(r.live) && t.isPlaced() {
			hashes[t.place()]++
		}
	}
	for e := range r.table.All() {
		t := e.Value.tag
		if !t.has(r.live | r.stale) {
			return fmt.Errorf("block %x has no tier", e.Key())
		}
		sets[t.attr()] = true
		if t&tagOrphan != 0 {
			orphaned++
		}
		if t&tagNoContent != 0 {
			hidden++
		}
		placed := t.has(r.live) && t.isPlaced()
		if place, only, ok := x.PlaceOf(r, e.Key()); ok != placed || ok && (place != t.place().number() || only != (hashes[t.place()] == 1)) {
			return fmt.Errorf("block %x has the place %v, of which there are %d; got %d, %t, %t", e.Key(), t.place(), hashes[t.place()], place, only, ok)
		}
		if t.isPlaced() {
			stale.add(position{run: t.place().run}, r.number, uint8(t)&r.stale)
			want.add(t.place(), r.number, uint8(t)&r.live)
		}
	}
	if got := r.attrs.Len(); got != len(sets) {
		return fmt.Errorf("%d combinations of attributes, but its blocks have %d", got, len(sets))
	}
	if r.hidden != hidden {
		return fmt.Errorf("%d blocks without content, but %d are counted", hidden, r.hidden)
	}
	listed := 0
	for parent, next := range r.orphans.first {
		for prev := int32(-1); next >= 0; prev, next = next, r.orphans.all[next].next {
			o := r.orphans.all[next]
			s, ok := r.table.Get(o.hash)
			if !ok || s.tag&tagOrphan == 0 || s.tag.orphan() != uint32(next) || o.parent != parent || o.prev != prev {
				return fmt.Errorf("orphan %+v has the slot %+v", o, s)
			}
			listed++
		}
	}
	if listed != orphaned {
		return fmt.Errorf("%d orphans, but %d are listed", orphaned, listed)
	}
	return nil
}

// checkRun checks a run. It takes the names that it has from want, and its branches from children.
func checkRun(x *Index, id uint32, r *run, want, stale names, children map[position]uint32) error {
	n := uint32(len(r.tokens))
	if r.unheld != (n > 0 && !r.isHeld()) || r.unheld && !r.queued {
		return fmt.Errorf("unheld is %t, queued %t", r.unheld, r.queued)
	}
	if r.detached {
		if n > 0 || r.isHeld() || len(r.branches) == 0 {
			return fmt.Errorf("detached")
		}
		n = x.tree.limits.run
	}
	if n > x.tree.limits.run {
		return fmt.Errorf("too many blocks")
	}
	if err := checkChunks(&r.holdings, x.tree.limits.chunk); err != nil {
		return err
	}
	if p := r.plain; p != nil {
		for i, s := range p.sets {
			if s.ranks == 0 || i > 0 && p.sets[i-1].word >= s.word {
				return fmt.Errorf("the plain ranks %d are invalid", i)
			}
		}
		if len(p.sets) == 0 {
			return fmt.Errorf("there are no plain ranks, and memory of them")
		}
	}
	needed := uint32(0)
	all := r.listed()
	for i, e := range all {
		if e.from >= e.to || uint32(e.to) > n || e.tiers == 0 {
			return fmt.Errorf("the holding %d is invalid", i)
		}
		if i > 0 {
			switch prev := all[i-1]; {
			case prev.rank > e.rank || prev.rank == e.rank && prev.to > e.from:
				return fmt.Errorf("the holding %d is not after the one before", i)
			case prev.rank == e.rank && prev.to == e.from && prev.tiers == e.tiers:
				return fmt.Errorf("the holding %d is not merged with the one before", i)
			}
		}
		needed = max(needed, uint32(e.to))
		for tiers := e.tiers & x.ranks[e.rank].live; tiers != 0; tiers &= tiers - 1 {
			bit := tiers & -tiers
			for offset := uint32(e.from); offset < uint32(e.to); offset++ {
				at, count := position{id, offset}, uint32(1)
				count += r.twins()[twin{offset, e.rank, bit}]
				if got := want[at][holderBit{e.rank, bit}]; got != count {
					return fmt.Errorf("offset %d has %d names of rank %d, want %d", offset, count, e.rank, got)
				}
				delete(want[at], holderBit{e.rank, bit})
			}
		}
		if rank := x.ranks[e.rank].rank; rank != nil {
			for tiers := e.tiers &^ rank.live; tiers != 0; tiers &= tiers - 1 {
				if stale[position{run: id}][holderBit{e.rank, tiers & -tiers}] == 0 {
					return fmt.Errorf("no block of rank %d lets a sweep remove the stale tiers of the holding %d", e.rank, i)
				}
			}
		}
	}
	if r.twins() != nil && len(r.twins()) == 0 {
		return fmt.Errorf("there are no twins, and memory of them")
	}
	for w, names := range r.twins() {
		if names == 0 || r.tiers(w.rank, w.offset)&w.tier == 0 {
			return fmt.Errorf("the twin %+v is invalid", w)
		}
	}
	for i, b := range r.branches {
		at := position{id, b.offset}
		if i > 0 && r.branches[i-1].offset >= b.offset || b.offset >= max(n, 1) || children[at] != b.runs || b.runs == 0 {
			return fmt.Errorf("the branch %d is invalid, has %d runs", i, children[at])
		}
		delete(children, at)
		needed = max(needed, b.offset+1)
	}
	if n > 0 && needed != n && !r.detached {
		return fmt.Errorf("%d blocks are needed", needed)
	}
	return nil
}

// listed returns what ranks hold of a run, plain ones too, in the order of holdings.
func (r *run) listed() (all []holding) {
	all = listed(&r.holdings)
	if r.plain == nil {
		return all
	}
	for _, s := range r.plain.sets {
		for ; s.ranks != 0; s.ranks &= s.ranks - 1 {
			all = append(all, r.plain.holding(s.first()))
		}
	}
	slices.SortStableFunc(all, func(a, b holding) int { return cmp.Compare(a.rank, b.rank) })
	return all
}

// listed returns holdings.
func listed(h *holdings) (all []holding) {
	for e := range h.all() {
		all = append(all, *e)
	}
	return all
}

// checkChunks checks the chunks of the holdings of a run.
func checkChunks(h *holdings, most int) error {
	switch {
	case h.many == nil && len(h.few) > most, h.many != nil && (len(h.few) > 0 || len(h.many.all) == 0):
		return fmt.Errorf("%d holdings are not in chunks", len(h.few))
	case h.many == nil:
		return nil
	}
	total := 0
	for i, c := range h.many.all {
		to := uint32(0)
		for _, e := range c.holdings {
			to = max(to, uint32(e.to))
		}
		if len(c.holdings) == 0 || len(c.holdings) > most || c.to != to {
			return fmt.Errorf("chunk %d has %d holdings up to %d, and says %d", i, len(c.holdings), to, c.to)
		}
		total += len(c.holdings)
	}
	if n := len(h.many.all); n > 1+8*total/most {
		return fmt.Errorf("%d chunks for %d holdings", n, total)
	}
	return nil
}

// checkRankNames returns an error if a rank has memory for names that it does not need.
func checkRankNames(x *Index, r *Rank) error {
	placed := make(map[uint32]int)
	for e := range r.table.All() {
		if x.keepsNames && e.Value.tag.isPlaced() {
			placed[e.Value.tag.place().run]++
		}
	}
	for id, n := range r.names {
		if n.placed != placed[id] || len(n.hashes) > int(x.tree.limits.run) {
			return fmt.Errorf("run %d has %d names of %d blocks, want %d", id, n.placed, len(n.hashes), placed[id])
		}
	}
	if len(r.names) != len(placed) {
		return fmt.Errorf("names in %d runs, want %d", len(r.names), len(placed))
	}
	return nil
}

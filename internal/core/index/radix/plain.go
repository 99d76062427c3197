package radix

import (
	"math/bits"
	"slices"
)

// plainBit is the bit of the tier in which plain ranks hold blocks: the first one, unless that tier of the rank was cleared.
const plainBit uint8 = 1

// plain are the ranks that hold exactly the first blocks of a run, up to an offset, in the tier of plainBit and in no other one. Many ranks hold a common
// system prompt in this way. They are kept as bits, so that a match visits 64 of them at once, and have no holding in the run. Before a plain rank
// changes, it is made a rank with a holding: see unplain.
type plain struct {
	sets []rankSet // ascending by word; none is empty
	to   uint32
}

// rankSet is ranks whose numbers are the same but for the last 6 bits.
type rankSet struct {
	ranks uint64 // a bit for each value of the last 6 bits
	word  uint32 // the other bits
}

func (p *plain) find(rank uint32) (int, bool) { return findSet(p.sets, rank/64) }

// findSet returns the index of the set of a word, or the one at which to insert it.
func findSet(sets []rankSet, word uint32) (_ int, ok bool) {
	low, high := 0, len(sets)
	for low < high {
		middle := int(uint(low+high) / 2)
		if sets[middle].word < word {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, low < len(sets) && sets[low].word == word
}

// has reports whether a rank is plain; p may be nil.
func (p *plain) has(rank uint32) bool {
	if p == nil {
		return false
	}
	i, ok := p.find(rank)
	return ok && p.sets[i].ranks>>(rank%64)&1 != 0
}

func (p *plain) add(rank uint32) {
	i, ok := p.find(rank)
	if !ok {
		p.sets = slices.Insert(p.sets, i, rankSet{word: rank / 64})
	}
	p.sets[i].ranks |= 1 << (rank % 64)
}

// len returns the number of ranks; p may be nil.
func (p *plain) len() (n int) {
	if p != nil {
		for _, s := range p.sets {
			n += bits.OnesCount64(s.ranks)
		}
	}
	return n
}

// holding returns what a plain rank holds.
func (p *plain) holding(rank uint32) holding { return holding{rank, 0, uint16(p.to), plainBit} }

// removePlain removes a plain rank with all that it holds.
func (r *run) removePlain(rank uint32) {
	p := r.plain
	i, _ := p.find(rank)
	if p.sets[i].ranks &^= 1 << (rank % 64); p.sets[i].ranks != 0 {
		return
	}
	if p.sets = slices.Delete(p.sets, i, i+1); len(p.sets) == 0 {
		r.plain = nil
	}
}

// unplain makes a holding of what a rank holds, if it is plain.
func (r *run) unplain(rank uint32, t *tree) {
	if !r.plain.has(rank) {
		return
	}
	e := r.plain.holding(rank)
	r.removePlain(rank)
	at, _ := r.holdings.find(rank, 0)
	r.holdings.replace(t.limits.chunk, at, 0, e)
}

// settle makes a rank plain if it holds what plain ranks hold, after its holdings have changed. If the holdings are in chunks, others become plain only with
// the blocks that plain ranks have.
func (r *run) settle(rank uint32, t *tree) {
	h := &r.holdings
	if r.plain == nil && (h.many != nil || len(h.few) < t.limits.plain) {
		return
	}
	at, ok := h.find(rank, 0)
	if !ok {
		return
	}
	e := *h.at(at)
	if next := h.at(h.next(at)); e.tiers != plainBit || next != nil && next.rank == rank {
		return
	}
	switch {
	case r.plain != nil && uint32(e.to) == r.plain.to:
		h.replace(t.limits.chunk, at, 1)
		r.plain.add(rank)
	case h.many == nil && len(h.few)%t.limits.plain == 0: // not each time, since it takes a time in proportion to their number
		r.gather(e.to, t)
	}
}

// gather makes those ranks plain that hold exactly the first blocks up to an offset, if they are more than twice as many as those that are plain: otherwise, one
// rank could make all change again and again.
func (r *run) gather(to uint16, t *tree) {
	all, same := r.holdings.few, 0
	isSame := func(i int) bool {
		return all[i] == holding{all[i].rank, 0, to, plainBit} && (i+1 == len(all) || all[i+1].rank != all[i].rank)
	}
	for i := range all {
		if isSame(i) {
			same++
		}
	}
	if same < t.limits.plain || same <= 2*r.plain.len() {
		return
	}
	former := r.plain
	r.plain = &plain{to: uint32(to)}
	rest := make([]holding, 0, len(all)-same+former.len())
	for i := range all {
		if isSame(i) {
			r.plain.add(all[i].rank)
		} else {
			rest = append(rest, all[i])
		}
	}
	if former != nil {
		for _, s := range former.sets {
			for ; s.ranks != 0; s.ranks &= s.ranks - 1 {
				rest = append(rest, former.holding(s.first()))
			}
		}
		slices.SortFunc(rest, func(a, b holding) int {
			if a.rank != b.rank {
				return int(a.rank) - int(b.rank)
			}
			return int(a.from) - int(b.from)
		})
	}
	r.holdings.few = rest
}

// first returns the first rank of a set, which is not empty.
func (s rankSet) first() uint32 { return s.word*64 + uint32(bits.TrailingZeros64(s.ranks)) }

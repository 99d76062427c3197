package radix

import "slices"

// MatchHashes finds the prefixes of a prompt, given by the block hashes of its blocks, that the ranks of a model hold;
// of all models if the name is empty. It finds blocks of unknown content or with an unknown parent, too. It stores the
// prefixes in m.Found. It allocates only to grow m.
//
// It looks up each hash of a run in one rank, and in further ranks that hold the run only some: a rank that holds the last hash
// in the place where another rank has it holds the same content before it. So a rank in which a block between has another
// block hash is found, too.
//
// Blocks without a place are looked up in each rank. When m.Lookups, which counts that, reaches m.MaxLookups, it sets m.Exceeded, and
// the prefixes are not complete.
//
// A rank is left out if selected is not nil and returns false.
func (x *Index) MatchHashes(modelName string, hashes []uint64, selected func(*Rank) bool, m *Matcher) {
	m.reset(len(x.ranks))
	m.verified = slices.Grow(m.verified[:0], len(hashes))[:len(hashes)]
	clear(m.verified)
	m.Exceeded = false
	model := x.models[modelName]
	for i := range x.ranks {
		r := x.ranks[i].rank
		if r == nil || modelName != "" && r.model != model || selected != nil && !selected(r) {
			continue
		}
		f := Match{Rank: r}
		for f.Blocks < len(hashes) {
			begin := f.Blocks
			s, _ := r.table.Get(hashes[begin])
			if !s.tag.has(r.live) {
				break
			}
			if s.tag.isPlaced() {
				x.extendByRun(&f, s.tag.place(), hashes, m)
				continue
			}
			f.Blocks++
			f.extendTiers(begin, f.Blocks, uint8(s.tag))
			if m.Lookups++; m.Lookups == m.MaxLookups {
				m.Exceeded = true
				return
			}
		}
		if f.Blocks > 0 {
			m.Found = append(m.Found, f)
		}
	}
}

// verified is what is known of hash i of a match, as element i of Matcher.verified: in some rank, the hashes from i up to end,
// exclusive, have the places of one run from at on. Nothing is known if end is 0.
type verified struct {
	at  position
	end int
}

// extendByRun extends a prefix by blocks of one run. The next block has the place at in it.
func (x *Index) extendByRun(f *Match, at position, hashes []uint64, m *Matcher) {
	begin, number := f.Blocks, f.Rank.number
	r := x.tree.run(at.run)
	if r.plain.has(number) {
		end := begin + f.Rank.common(at, hashes[begin:min(len(hashes), begin+int(r.plain.to-at.offset))])
		f.Blocks = m.verify(f.Rank, at, hashes[:end], begin)
		f.extendTiers(begin, f.Blocks, plainBit)
		return
	}
	first, _ := r.holdings.find(number, at.offset)
	held := at.offset // the rank holds the run from the block up to this offset
	for next := first; ; next = r.holdings.next(next) {
		e := r.holdings.at(next)
		if e == nil || e.rank != number || uint32(e.from) > held || e.tiers&f.Rank.live == 0 {
			break
		}
		held = uint32(e.to)
	}
	end := begin + f.Rank.common(at, hashes[begin:min(len(hashes), begin+int(held-at.offset))])
	f.Blocks = m.verify(f.Rank, at, hashes[:end], begin)
	for next := first; ; next = r.holdings.next(next) {
		e := r.holdings.at(next)
		if e == nil || e.rank != number {
			break
		}
		from, to := begin, begin+int(e.to)-int(at.offset)
		if uint32(e.from) > at.offset {
			from += int(uint32(e.from) - at.offset)
		}
		if from >= f.Blocks {
			break
		}
		f.extendTiers(from, min(to, f.Blocks), e.tiers)
	}
}

// verify returns up to where the hashes from begin on have the places in a run that follow at. It looks up those in the rank for
// which that is not known of another rank.
func (m *Matcher) verify(r *Rank, at position, hashes []uint64, begin int) (end int) {
	v := &m.verified[begin]
	if v.end == 0 || v.at != at {
		*v = verified{at, begin + 1}
	}
	if v.end >= len(hashes) {
		return len(hashes)
	}
	r.table.Prefetch(hashes[v.end:])
	for v.end < len(hashes) && r.has(hashes[v.end], position{at.run, at.offset + uint32(v.end-begin)}) {
		v.end++
	}
	return v.end
}

// has reports whether a block has a place.
func (r *Rank) has(hash uint64, at position) bool {
	p, ok := r.locate(hash)
	return ok && p == at
}

// extendTiers extends the prefixes of tiers, given by their bits, that have all blocks before begin.
func (f *Match) extendTiers(begin, end int, tiers uint8) {
	for tier, bit := range f.Rank.bits {
		if tiers&bit != 0 && f.TierBlocks[tier] == begin {
			f.TierBlocks[tier] = end
		}
	}
}

// common returns how many of some hashes, of which the first has a place, have the places that follow in the run, or more if there
// are others between. It looks up few.
func (r *Rank) common(at position, hashes []uint64) int {
	follows := func(n int) bool { return r.has(hashes[n], position{at.run, at.offset + uint32(n)}) }
	low, high := 0, len(hashes)-1 // hashes[low] has its place; those after high have not
	if high > 0 && follows(high) {
		return high + 1
	}
	for high--; low < high; {
		middle := (low + high + 1) / 2
		if follows(middle) {
			low = middle
		} else {
			high = middle - 1
		}
	}
	return low + 1
}

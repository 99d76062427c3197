package radix

// MatchHashes finds the prefixes of a prompt, given by the block hashes of its blocks, that the ranks of a model hold;
// of all models if the name is empty. It finds blocks of unknown content or with an unknown parent, too. It stores the
// prefixes in m.Found. It allocates only to grow m.
//
// It looks up some hashes of each run only, and assumes that the hashes between two blocks of a run are those of the
// blocks between. For hashes that are no chain, and for blocks with several block hashes, a prefix may thus count a hash
// that the rank or the tier does not hold in place of one that it holds for the same place.
func (x *Index) MatchHashes(modelName string, hashes []uint64, m *Matcher) {
	m.reset(len(x.ranks))
	model := x.models[modelName]
	for i := range x.ranks {
		r := x.ranks[i].rank
		if r == nil || modelName != "" && r.model != model {
			continue
		}
		f := Match{Rank: r}
		for f.Blocks < len(hashes) && x.extendHashes(&f, hashes) {
		}
		if f.Blocks > 0 {
			m.Found = append(m.Found, f)
		}
	}
}

// extendHashes extends a prefix by blocks of one run, or by one block without a place. It returns false if the rank does
// not hold the next block.
func (x *Index) extendHashes(f *Match, hashes []uint64) bool {
	begin := f.Blocks
	s, _ := f.Rank.table.Get(hashes[begin])
	t := s.tag
	if !t.has(f.Rank.live) {
		return false
	}
	if f.Blocks++; !t.isPlaced() {
		f.extendTiers(begin, f.Blocks, uint8(t))
		return true
	}
	at, number := t.place(), f.Rank.number
	r := x.tree.run(at.run)
	first, _ := r.find(number, at.offset)
	held := at.offset // the rank holds the run from the block up to this offset
	for i := first; i < len(r.holdings); i++ {
		e := &r.holdings[i]
		if e.rank != number || uint32(e.from) > held || e.tiers&f.Rank.live == 0 {
			break
		}
		held = uint32(e.to)
	}
	f.Blocks = begin + f.Rank.common(at, hashes[begin:min(len(hashes), begin+int(held-at.offset))])
	for i := first; i < len(r.holdings) && r.holdings[i].rank == number; i++ {
		e := &r.holdings[i]
		from, to := begin, begin+int(e.to)-int(at.offset)
		if uint32(e.from) > at.offset {
			from += int(uint32(e.from) - at.offset)
		}
		if from >= f.Blocks {
			break
		}
		f.extendTiers(from, min(to, f.Blocks), e.tiers)
	}
	return true
}

// extendTiers extends the prefixes of tiers, given by their bits, that have all blocks before begin.
func (f *Match) extendTiers(begin, end int, tiers uint8) {
	for tier, bit := range f.Rank.bits {
		if tiers&bit != 0 && f.TierBlocks[tier] == begin {
			f.TierBlocks[tier] = end
		}
	}
}

// common returns how many of some hashes, of which the first has a place, have the places that follow in the run.
func (r *Rank) common(at position, hashes []uint64) int {
	follows := func(n int) bool {
		p, ok := r.locate(hashes[n])
		return ok && p == position{at.run, at.offset + uint32(n)}
	}
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

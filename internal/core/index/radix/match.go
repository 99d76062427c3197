package radix

import "math/bits"

// Match is the longest prefix of a prompt that one rank holds.
type Match struct {
	Rank *Rank
	// Blocks is the number of blocks in the longest prefix. Each block is held in at least one tier.
	Blocks int
	// TierBlocks is the number of blocks in the longest prefix held in one tier.
	TierBlocks [NumTiers]int
}

// Matcher is the memory of matches, for reuse. The zero value is ready for use.
type Matcher struct {
	// Found has the ranks that hold at least the first block, in no order. It is valid until the next match.
	Found []Match
	// Walk makes Match set Walks, which has the walk of each element of Found.
	Walk  bool
	Walks []Walk
	// Lookups counts the lookups of MatchHashes of blocks without a place, and MaxLookups bounds it; 0: it has no bound. Exceeded
	// reports whether the last MatchHashes has reached it. Several matches share the bound if Lookups is not set to 0 between them.
	Lookups, MaxLookups int
	Exceeded            bool
	// KeepPath makes Match keep the places of the prompt's blocks, for Place.
	KeepPath bool
	path     []step
	// verified has an element for each hash of a MatchHashes.
	verified []verified
	// byRank has for each rank the index in Found, if stamp is that of the match.
	byRank []candidate
	stamp  uint32
}

type candidate struct{ stamp, index uint32 }

// step is a part of the prompt of the last match: the blocks from one up to another one, which a run of a model begins with.
type step struct {
	model     *model
	from, end int
	run       uint32
}

// Place returns the place of block n of the prompt of the last Match, from 0, in the model of a rank, as Rank.Place does, and how many
// blocks of the prompt have that place and those after it; 0 if no rank of the model has the block, or KeepPath was not set.
func (m *Matcher) Place(r *Rank, n int) (place uint64, blocks int) {
	for i := len(m.path) - 1; i >= 0; i-- { // most questions are about a prompt's end
		if s := &m.path[i]; s.model == r.model && s.from <= n && n < s.end {
			return position{s.run, uint32(n - s.from)}.number(), s.end - n
		}
	}
	return 0, 0
}

// Walk is the longest prefix of a prompt that a rank can read tier after tier, without returning to an earlier one.
type Walk struct {
	// Ends has for each tier the number of blocks read when the tier, and all before it, have no further block.
	Ends [NumTiers]int
	tier int // that is being read; NumTiers at the end
}

// extend extends the walk by the blocks from begin up to end, which the tiers hold.
func (w *Walk) extend(tiers uint8, begin, end int) {
	if w.Ends[NumTiers-1] != begin {
		return
	}
	for w.tier < NumTiers && tiers&(1<<w.tier) == 0 {
		w.tier++
	}
	for tier := w.tier; tier < NumTiers; tier++ {
		w.Ends[tier] = end
	}
}

// reset prepares a match among some number of ranks.
func (m *Matcher) reset(ranks int) {
	m.Found, m.Walks, m.path = m.Found[:0], m.Walks[:0], m.path[:0]
	if m.stamp++; m.stamp == 0 || len(m.byRank) < ranks {
		m.byRank = make([]candidate, ranks+ranks/4)
		m.stamp = 1
	}
}

// Has reports whether Found has a rank.
func (m *Matcher) Has(r *Rank) bool { return m.byRank[r.number].stamp == m.stamp }

// Match finds the prefixes of a prompt, given by the tokens hashes of its blocks, that the ranks of a model hold; of all
// models if the name is empty. It stores them in m.Found. It allocates only to grow m.
func (x *Index) Match(modelName string, tokens []uint64, m *Matcher) {
	m.reset(len(x.ranks))
	if modelName == "" {
		for _, model := range x.models {
			x.match(model, tokens, m)
		}
	} else if model := x.models[modelName]; model != nil {
		x.match(model, tokens, m)
	}
}

func (x *Index) match(model *model, tokens []uint64, m *Matcher) {
	last := position{run: model.root}
	for depth := 0; depth < len(tokens); {
		next, ok := x.tree.follow(last, tokens[depth])
		if !ok {
			return
		}
		r := x.tree.run(next.run)
		n := commonPrefix(r.tokens, tokens[depth:])
		if m.KeepPath {
			m.path = append(m.path, step{model, depth, depth + n, next.run})
		}
		if !m.extendBy(x.ranks, &r.holdings, depth, n) {
			return
		}
		last = position{next.run, uint32(n - 1)}
		depth += n
	}
}

// extendBy is extend by the holdings of a run.
func (m *Matcher) extendBy(ranks []numbered, h *holdings, depth, n int) (reached bool) {
	if h.many != nil {
		return m.extendByChunks(ranks, h.many.all, depth, n)
	}
	return m.extend(ranks, h.few, depth, n)
}

// extend extends the prefixes that have all blocks before depth, by up to n blocks; all ranks have the prefix of no
// blocks. It reports whether a rank has all n blocks.
func (m *Matcher) extend(ranks []numbered, holdings []holding, depth, n int) (reached bool) {
	for i := range holdings {
		e := &holdings[i]
		rank := &ranks[e.rank]
		tiers := e.tiers & rank.live
		c := &m.byRank[e.rank]
		if c.stamp != m.stamp {
			if depth+int(e.from) > 0 || tiers == 0 {
				continue
			}
			*c = candidate{m.stamp, uint32(len(m.Found))}
			m.Found = append(m.Found, Match{Rank: rank.rank})
			if m.Walk {
				m.Walks = append(m.Walks, Walk{})
			}
		}
		f := &m.Found[c.index]
		begin, end := depth+int(e.from), depth+min(int(e.to), n)
		if f.Blocks != begin || tiers == 0 || begin >= end {
			continue
		}
		f.Blocks = end
		if m.Walk {
			m.Walks[c.index].extend(rank.rank.tiers(tiers), begin, end)
		}
		for ; tiers != 0; tiers &= tiers - 1 {
			if tier := rank.tiers[bits.TrailingZeros8(tiers)]; f.TierBlocks[tier] == begin {
				f.TierBlocks[tier] = end
			}
		}
		reached = reached || end == depth+n
	}
	return reached
}

// extendByChunks is extend for many holdings. It leaves out those of a rank that are after a block that the rank does not hold.
func (m *Matcher) extendByChunks(ranks []numbered, chunks []chunk, depth, n int) (reached bool) {
	for c := range chunks {
		all := chunks[c].holdings
		for i := 0; i < len(all); i++ {
			e := &all[i]
			reached = m.extend(ranks, all[i:i+1], depth, n) || reached
			if c := m.byRank[e.rank]; c.stamp != m.stamp || m.Found[c.index].Blocks != depth+min(int(e.to), n) {
				i = lastOfRank(all, i)
			}
		}
	}
	return reached
}

// lastOfRank returns the index of the last of the holdings that are of the same rank as holding i.
func lastOfRank(holdings []holding, i int) int {
	rank, step := holdings[i].rank, 1
	for i+step < len(holdings) && holdings[i+step].rank == rank {
		i += step
		step *= 2
	}
	for ; step > 0; step /= 2 {
		if i+step < len(holdings) && holdings[i+step].rank == rank {
			i += step
		}
	}
	return i
}

// commonPrefix returns the length of the common prefix of a and b. Arrays are compared with vector instructions.
func commonPrefix(a, b []uint64) int {
	const long, short = 32, 8
	n := min(len(a), len(b))
	i := 0
	for i+long <= n && [long]uint64(a[i:]) == [long]uint64(b[i:]) {
		i += long
	}
	for i+short <= n && [short]uint64(a[i:]) == [short]uint64(b[i:]) {
		i += short
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

package radix

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
	// byRank has for each rank the index in Found, if stamp is that of the match.
	byRank []candidate
	stamp  uint32
}

type candidate struct{ stamp, index uint32 }

// reset prepares a match among some number of ranks.
func (m *Matcher) reset(ranks int) {
	m.Found = m.Found[:0]
	if m.stamp++; m.stamp == 0 || len(m.byRank) < ranks {
		m.byRank = make([]candidate, ranks+ranks/4)
		m.stamp = 1
	}
}

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
		r := x.tree.runs[next.run]
		n := uint32(commonPrefix(r.tokens, tokens[depth:]))
		var reached bool
		if depth == 0 {
			reached = m.begin(x.ranks, r.holdings, n)
		} else {
			reached = m.extend(r.holdings, depth, n)
		}
		if !reached {
			return
		}
		last = position{next.run, n - 1}
		depth += int(n)
	}
}

// MatchHashes finds the prefixes of a prompt, given by the block hashes of its blocks, that the ranks of a model hold;
// of all models if the name is empty. It finds blocks of unknown content or with an unknown parent, too. It stores the
// prefixes in m.Found. It allocates only to grow m.
func (x *Index) MatchHashes(modelName string, hashes []uint64, m *Matcher) {
	m.reset(len(x.ranks))
	for _, r := range x.ranks {
		if r == nil || modelName != "" && r.model.name != modelName {
			continue
		}
		f := Match{Rank: r}
		for i, h := range hashes {
			tiers := r.Tiers(h)
			if tiers == 0 {
				break
			}
			f.Blocks++
			for tier := range NumTiers {
				if tiers&(1<<tier) != 0 && f.TierBlocks[tier] == i {
					f.TierBlocks[tier]++
				}
			}
		}
		if f.Blocks > 0 {
			m.Found = append(m.Found, f)
		}
	}
}

// begin adds the holders of the first n blocks of a prompt, and reports whether a rank has all of them.
func (m *Matcher) begin(ranks []*Rank, holdings []holding, n uint32) (reached bool) {
	for _, e := range holdings {
		number, tier := e.holder.rank(), e.holder.tier()
		c := &m.byRank[number]
		if c.stamp != m.stamp {
			if ranks[number] == nil {
				continue
			}
			*c = candidate{m.stamp, uint32(len(m.Found))}
			m.Found = append(m.Found, Match{Rank: ranks[number]})
		}
		f := &m.Found[c.index]
		f.TierBlocks[tier] = int(min(e.blocks, n))
		f.Blocks = max(f.Blocks, f.TierBlocks[tier])
		reached = reached || e.blocks >= n
	}
	return reached
}

// extend extends the prefixes that have all blocks before depth, by up to n blocks. It reports whether a rank has all
// of them.
func (m *Matcher) extend(holdings []holding, depth int, n uint32) (reached bool) {
	for _, e := range holdings {
		c := m.byRank[e.holder.rank()]
		if c.stamp != m.stamp {
			continue
		}
		f := &m.Found[c.index]
		if f.Blocks < depth {
			continue
		}
		// Before the run, no prefix is longer than depth; within it, other tiers of the rank may have extended
		// Blocks.
		end := depth + int(min(e.blocks, n))
		f.Blocks = max(f.Blocks, end)
		if tier := e.holder.tier(); f.TierBlocks[tier] == depth {
			f.TierBlocks[tier] = end
		}
		reached = reached || e.blocks >= n
	}
	return reached
}

// commonPrefix returns the length of the common prefix of a and b.
func commonPrefix(a, b []uint64) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

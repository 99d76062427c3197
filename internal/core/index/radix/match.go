package radix

import (
	"iter"
	"math/bits"
	"slices"
)

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
	// Group makes Match add ranks that hold the same prefix, each in one tier, to Groups instead of to Found: Has and Place know nothing of them, and they have no
	// walks. The groups of a model are ascending by length.
	Group  bool
	Groups []Group
	// Lookups counts the lookups of MatchHashes of blocks without a place, and MaxLookups bounds it; 0: it has no bound. Exceeded
	// reports whether the last MatchHashes has reached it. Several matches share the bound if Lookups is not set to 0 between them.
	Lookups, MaxLookups int
	Exceeded            bool
	// KeepPath makes Match keep the places of the prompt's blocks, for Place.
	KeepPath bool
	path     []step
	// verified has an element for each hash of a MatchHashes.
	verified []verified
	// byRank has for each rank the index in Found, if stamp is that of the match. Ranks that hold no further block of the prompt may have none.
	byRank []candidate
	stamp  uint32
	// pure are the ranks that are not in Found, and hold all blocks so far in the tier of plainBit. next is memory for the pure ranks of the next run.
	pure, next []rankSet
}

// Group is ranks that hold the same prefix of a prompt, each in one tier.
type Group struct {
	Blocks int
	ranks  rankSet
}

// Numbers yields the numbers of the ranks of a group, see Index.Rank.
func (g Group) Numbers() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for s := g.ranks; s.ranks != 0 && yield(s.first()); s.ranks &= s.ranks - 1 {
		}
	}
}

// Has reports whether a rank with a number is in a group.
func (g Group) Has(number uint32) bool {
	return g.ranks.word == number/64 && g.ranks.ranks&(1<<(number%64)) != 0
}

// TierOf returns the tier in which a rank of a group holds the prefix.
func (g Group) TierOf(r *Rank) int {
	if r.bits[0] == plainBit { // unless that tier was cleared
		return 0
	}
	return slices.Index(r.bits[:], plainBit)
}

// MatchOf returns the match of a rank of a group.
func (g Group) MatchOf(r *Rank) Match {
	f := Match{Rank: r, Blocks: g.Blocks}
	f.TierBlocks[g.TierOf(r)] = g.Blocks
	return f
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
	m.Found, m.Walks, m.Groups, m.path, m.pure = m.Found[:0], m.Walks[:0], m.Groups[:0], m.path[:0], m.pure[:0]
	if m.stamp++; m.stamp == 0 || len(m.byRank) < ranks {
		m.byRank = make([]candidate, ranks+ranks/4)
		m.stamp = 1
	}
}

// Has reports whether Found has a rank, if Match was called with KeepPath.
func (m *Matcher) Has(r *Rank) bool { return m.byRank[r.number].stamp == m.stamp }

// Match finds the prefixes of a prompt, given by the tokens hashes of its blocks, that the ranks of a model hold; of all
// models if the name is empty. It stores them in m.Found and m.Groups. It allocates only to grow m.
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
	last, depth := position{run: model.root}, 0
	for depth < len(tokens) {
		next, ok := x.tree.follow(last, tokens[depth])
		if !ok {
			break
		}
		r := x.tree.run(next.run)
		n := commonPrefix(r.tokens, tokens[depth:])
		if m.KeepPath {
			m.path = append(m.path, step{model, depth, depth + n, next.run})
		}
		if !m.extendByRun(x, r, depth, n, depth+n < len(tokens)) {
			break
		}
		last = position{next.run, uint32(n - 1)}
		depth += n
	}
	for _, s := range m.pure {
		m.found(x.ranks, s, depth)
	}
	m.pure = m.pure[:0]
}

// extendByRun extends the prefixes that have all blocks before depth, by up to n blocks of a run; all ranks have the prefix of no blocks. It
// reports whether a rank has all n blocks. more tells whether the prompt has further blocks.
func (m *Matcher) extendByRun(x *Index, r *run, depth, n int, more bool) (reached bool) {
	switch {
	case r.holdings.many != nil:
		reached = m.extendByChunks(x.ranks, r.holdings.many.all, depth, n)
	case depth == 0 && !m.Walk:
		reached = m.begin(x.ranks, r.holdings.few, n, more || m.KeepPath)
	default:
		reached = m.extend(x.ranks, r.holdings.few, depth, n)
	}
	if r.plain == nil && len(m.pure) == 0 {
		return reached
	}
	return m.extendByPlain(x, r.plain, depth, n) || reached
}

// extendByPlain is extendByRun for the plain ranks of the run, after its holdings; there may be none.
func (m *Matcher) extendByPlain(x *Index, p *plain, depth, n int) (reached bool) {
	if p == nil {
		p = &noPlain
	}
	end := depth + min(int(p.to), n)
	before, pure := m.pure, m.next[:0]
	for _, s := range p.sets {
		s.ranks &= x.plainLive[s.word]
		if depth > 0 {
			for len(before) > 0 && before[0].word < s.word {
				m.found(x.ranks, before[0], depth)
				before = before[1:]
			}
			both := uint64(0)
			if len(before) > 0 && before[0].word == s.word {
				both = before[0].ranks & s.ranks
				m.found(x.ranks, rankSet{before[0].ranks &^ both, s.word}, depth)
				before = before[1:]
			}
			for rest := (rankSet{s.ranks &^ both, s.word}); rest.ranks != 0; rest.ranks &= rest.ranks - 1 {
				e := p.holding(rest.first())
				reached = m.extendBy(x.ranks, &e, depth, n) || reached
			}
			s.ranks = both
		}
		if s.ranks == 0 {
			continue
		}
		pure = append(pure, s)
	}
	for _, s := range before {
		m.found(x.ranks, s, depth)
	}
	if end < depth+n {
		for _, s := range pure {
			m.found(x.ranks, s, end)
		}
		pure = pure[:0]
	}
	m.pure, m.next = pure, m.pure
	return reached || len(pure) > 0
}

var noPlain plain

// found adds a set of ranks that hold a prefix in the tier of plainBit to Groups, or to Found.
func (m *Matcher) found(ranks []numbered, s rankSet, blocks int) {
	if s.ranks == 0 {
		return
	}
	if m.Group {
		m.Groups = append(m.Groups, Group{blocks, s})
		return
	}
	at := len(m.Found)
	n := at + bits.OnesCount64(s.ranks)
	m.Found = slices.Grow(m.Found, n-at)[:n]
	for ; s.ranks != 0; s.ranks &= s.ranks - 1 {
		rank, f := &ranks[s.first()], &m.Found[at]
		*f = Match{Rank: rank.rank, Blocks: blocks}
		f.TierBlocks[rank.tiers[0]%NumTiers] = blocks
		if m.KeepPath {
			m.byRank[s.first()] = candidate{m.stamp, uint32(at)}
		}
		if m.Walk {
			w := Walk{}
			w.extend(rank.rank.tiers(plainBit), 0, blocks)
			m.Walks = append(m.Walks, w)
		}
		at++
	}
}

// take moves a rank from pure to Found, if it is there.
func (m *Matcher) take(ranks []numbered, number uint32, depth int) (ok bool) {
	i, ok := findSet(m.pure, number/64)
	if !ok || m.pure[i].ranks>>(number%64)&1 == 0 {
		return false
	}
	m.pure[i].ranks &^= 1 << (number % 64)
	m.open(&ranks[number], number)
	m.extendMatch(len(m.Found)-1, &ranks[number], plainBit, 0, depth)
	return true
}

// begin is extend for the first blocks of a prompt, without walks. It sets byRank only if that is needed.
func (m *Matcher) begin(ranks []numbered, holdings []holding, n int, needed bool) (reached bool) {
	at := len(m.Found)
	m.Found = slices.Grow(m.Found, len(holdings))
	found := m.Found[:cap(m.Found)]
	before := holding{rank: ^uint32(0)} // the last one that extended a prefix
	for i := range holdings {
		e := &holdings[i]
		rank := &ranks[e.rank]
		tiers, end := e.tiers&rank.live, min(int(e.to), n)
		if tiers == 0 {
			continue
		}
		if e.from == 0 {
			f := &found[at]
			*f = Match{Rank: rank.rank, Blocks: end}
			for ; tiers != 0; tiers &= tiers - 1 {
				f.TierBlocks[rank.tiers[bits.TrailingZeros8(tiers)]%NumTiers] = end
			}
			if needed {
				m.byRank[e.rank] = candidate{m.stamp, uint32(at)}
			}
			at++
		} else if begin := int(e.from); begin >= n || before.rank != e.rank || before.to != e.from {
			continue
		} else {
			found[at-1].extend(rank, tiers, begin, end)
		}
		before, reached = *e, reached || end == n
	}
	m.Found = found[:at]
	return reached
}

// open adds a rank to Found, with no blocks yet.
func (m *Matcher) open(rank *numbered, number uint32) {
	m.byRank[number] = candidate{m.stamp, uint32(len(m.Found))}
	m.Found = append(m.Found, Match{Rank: rank.rank})
	if m.Walk {
		m.Walks = append(m.Walks, Walk{})
	}
}

// extend extends the prefixes that have all blocks before depth, by up to n blocks, by holdings. It reports whether a rank has all n blocks.
func (m *Matcher) extend(ranks []numbered, holdings []holding, depth, n int) (reached bool) {
	for i := range holdings {
		reached = m.extendBy(ranks, &holdings[i], depth, n) || reached
	}
	return reached
}

// extendBy is extend by one holding.
func (m *Matcher) extendBy(ranks []numbered, e *holding, depth, n int) (reached bool) {
	rank := &ranks[e.rank]
	tiers := e.tiers & rank.live
	begin, end := depth+int(e.from), depth+min(int(e.to), n)
	if tiers == 0 || begin >= end {
		return false
	}
	c := &m.byRank[e.rank]
	if c.stamp != m.stamp {
		if begin == 0 {
			m.open(rank, e.rank)
		} else if begin > depth || !m.take(ranks, e.rank, depth) {
			return false
		}
	}
	if m.Found[c.index].Blocks != begin {
		return false
	}
	m.extendMatch(int(c.index), rank, tiers, begin, end)
	return end == depth+n
}

// extendMatch extends the prefix of element i of Found from begin, which it has, up to end.
func (m *Matcher) extendMatch(i int, rank *numbered, tiers uint8, begin, end int) {
	if m.Found[i].extend(rank, tiers, begin, end); m.Walk {
		m.Walks[i].extend(rank.rank.tiers(tiers), begin, end)
	}
}

func (f *Match) extend(rank *numbered, tiers uint8, begin, end int) {
	f.Blocks = end
	for ; tiers != 0; tiers &= tiers - 1 {
		if tier := rank.tiers[bits.TrailingZeros8(tiers)] % NumTiers; f.TierBlocks[tier] == begin {
			f.TierBlocks[tier] = end
		}
	}
}

// extendByChunks is extend for many holdings. It leaves out those of a rank that are after a block that the rank does not hold.
func (m *Matcher) extendByChunks(ranks []numbered, chunks []chunk, depth, n int) (reached bool) {
	for c := range chunks {
		all := chunks[c].holdings
		for i := 0; i < len(all); i++ {
			e := &all[i]
			reached = m.extendBy(ranks, e, depth, n) || reached
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
	n := min(len(a), len(b))
	i := 0
	for i+32 <= n && *(*[32]uint64)(a[i:]) == *(*[32]uint64)(b[i:]) {
		i += 32
	}
	for i+8 <= n && *(*[8]uint64)(a[i:]) == *(*[8]uint64)(b[i:]) {
		i += 8
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

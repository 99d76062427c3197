package index

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Prompt is a prompt to match, given by exactly one of TokenIDs, TokensHashes and BlockHashes.
type Prompt struct {
	// TokenIDs are the tokens. Tokens after the last whole block are ignored.
	TokenIDs []uint32
	// TokensHashes are the tokens hashes of the blocks.
	TokensHashes []uint64
	// BlockHashes are an engine's own hashes of the blocks. Only ranks with the same hashes match.
	BlockHashes []uint64
	// LoRA is the name of the LoRA adapter, and Salt the cache salt; empty: none. They matter only for TokenIDs.
	LoRA, Salt string
	// Eagle must be set for SGLang engines with EAGLE decoding: the tokens hash of a block then includes the next
	// token. It matters only for TokenIDs.
	Eagle bool
	// BlockSize is the number of tokens per block. If it is 0, TokenIDs are matched with the block size of each worker;
	// otherwise, only workers with the block size match.
	BlockSize uint32
	// ExcludeLastToken must be set to find what an engine reuses, which computes the last token always. It matters only for TokenIDs.
	ExcludeLastToken bool
}

// Query selects what to match.
type Query struct {
	// Model selects the workers of a model; empty: of all models.
	Model   string
	Prompts []Prompt
	// Worker selects workers by name; nil: all. It is called while the index is locked.
	Worker func(name string) bool
	// Limit is the maximum number of matches for each prompt; 0: all.
	Limit int
	// Walk makes Match set Match.Walk for prompts that are not given by BlockHashes.
	Walk bool
	// MaxLookups bounds the lookups for BlockHashes of blocks whose content is unknown, of which each rank needs one a block, in
	// all prompts together; 0: no bound.
	MaxLookups int
	// BlockHashes is the maximum number of block hashes of each match, see Matches.BlockHashes; 0: none. Index.KeepBlockHashes must have been called.
	BlockHashes int
	// Now makes Match set Match.Expected, and return ranks that are only expected to hold blocks, as of this time: see NoteRouted. With the zero
	// time, it does not.
	Now time.Time
	// Pools makes Match set Matches.Pools, and return ranks of which only pools hold a part of the prompt, after the others.
	Pools bool
}

// Match is the longest prefix of a prompt that a dp rank holds.
type Match struct {
	Worker, Model string
	// Endpoint is the worker's configured address for requests.
	Endpoint string
	// Labels are the worker's. They must not be modified.
	Labels map[string]string
	Rank   uint32
	// Expected is the number of first blocks that the rank is expected to have soon, if that is more than Blocks; else 0. See NoteRouted.
	Expected uint32
	// Blocks is the number of blocks in the longest prefix, of which each is held in some tier. TierBlocks are the
	// blocks of the longest prefix held in one tier.
	Blocks     int
	TierBlocks [NumTiers]int
	// Walk is set if Query.Walk is: the longest prefix that can be read tier after tier, without returning to an earlier
	// one. Walk[t] is the number of blocks read when the tier t, and all before it, have no further block. In ranks with several attention
	// groups, it is what the engine can reuse from device memory, and with host memory.
	Walk [NumTiers]int
	// BlockSize is the number of tokens in a block; 0: unknown.
	BlockSize uint32
	// Reasons, TierReasons and GroupsOmitted are as in Rank.
	Reasons       Reasons
	TierReasons   [NumTiers]Reasons
	GroupsOmitted bool
	// numHashes and firstHash are what Matches.BlockHashes returns, in Matches.blockHashes.
	numHashes, firstHash uint32
	// numPools and firstPool are what Matches.Pools returns, in Matches.poolPrefixes.
	numPools, firstPool uint32
	// RankIndex is the number of the worker's dp ranks before this one, with Query.BlockHashes.
	RankIndex uint32
	// groups is the prefix in tokens, if the rank has several attention groups and they are followed.
	groups reuse
}

// Tokens returns the number of tokens in the longest prefix; 0 if the block size is unknown. If the rank has several attention groups, the
// prefix may end within a block.
func (m *Match) Tokens() int {
	if m.groups.known {
		return int(m.groups.total)
	}
	return m.Blocks * int(m.BlockSize)
}

// TierTokens returns the number of tokens in the longest prefix that is held in one tier, as Tokens does.
func (m *Match) TierTokens(tier int) int {
	if m.groups.known && tier < numGroupTiers {
		return int(m.groups.tiers[tier])
	}
	return m.TierBlocks[tier] * int(m.BlockSize)
}

// EndedBy returns the attention group that ends the prefix in one tier. ok is false if none does, or if the rank has no others than the main
// group, or they are not followed.
func (m *Match) EndedBy(tier int) (group int, ok bool) {
	if !m.groups.known || tier >= numGroupTiers {
		return 0, false
	}
	group = int(m.groups.endedBy[tier])
	return group, group != hybrid.NoGroup
}

// omitted reports whether the prefix in a tier is an upper bound, since other attention groups may end it.
func (m *Match) omitted(tier int) bool {
	return m.GroupsOmitted && (!m.groups.known || tier >= numGroupTiers)
}

// Trust returns how far the match can be trusted, as far as it follows from entries.
func (m *Match) Trust() kvcastv1.Trust {
	return trust(m.Reasons, m.omitted(deviceTier) || m.GroupsOmitted && m.hasLowest())
}

// hasLowest reports whether a tier of which other attention groups are not followed holds a prefix, or continues one.
func (m *Match) hasLowest() bool {
	return m.groups.continues || slices.Max(m.TierBlocks[numGroupTiers:]) > 0
}

// TierTrust returns how far the prefix in one tier can be trusted, as far as it follows from entries.
func (m *Match) TierTrust(tier int) kvcastv1.Trust {
	return trust(m.TierReasons[tier], m.omitted(tier))
}

// TiersDiffer reports whether the tiers have different reasons or trust.
func (m *Match) TiersDiffer() bool {
	return reasonsDiffer(&m.TierReasons) || m.groups.known && m.GroupsOmitted && m.hasLowest()
}

// HasTier reports whether a tier holds a prefix.
func (m *Match) HasTier(tier int) bool {
	return m.TierBlocks[tier] > 0 || m.groups.known && tier < numGroupTiers && m.groups.tiers[tier] > 0
}

// Matches is the result of a Match, and its memory for reuse. The zero value is ready for use.
type Matches struct {
	// Prompts has the matches of each prompt: by Blocks, or Expected if that is more, then by blocks in the device tier, both descending, then by
	// worker and rank. It is valid until the next Match.
	Prompts [][]Match
	// Exceeded reports whether Query.MaxLookups was reached. The matches are then not complete.
	Exceeded bool

	matcher radix.Matcher
	hashes  []uint64
	lists   []hashList
	sizes   []uint32
	found   []candidate
	keys    []uint64 // reused by addGroup
	// blockHashes has those of all matches.
	blockHashes []uint64
	// pooled are the prefixes of the prompt that is being matched, and poolPrefixes those of all matches.
	pooled       []pooled
	poolPrefixes []PoolPrefix
	// expected has the first blocks that ranks are expected to have, of the list of hashes that is being matched.
	expected map[*rank]int
	// Of engines with several attention groups.
	named  []*hashing // whose names were computed
	names  []names    // that were computed
	needed []*hashing // see hasNamed
	given  names      // see namesFor
	// lacksNames reports whether more names may be computed, and hasNamedAll whether they were for all ranks that need them.
	lacksNames, hasNamedAll bool
	holders                 [numGroupTiers]holder
	last                    lastReuse
	hashBuffer              vllmhash.Buffer
	reuses                  []reuse // of Matcher.Found; empty if there are none
}

// candidate is a match before its prompt's matches are sorted.
type candidate struct {
	// length orders matches: the number of blocks, or of expected ones if they are more, and in the lower half the blocks in the device tier.
	length   uint64
	position uint32 // of the rank, see Index.ordered
	expected uint32 // blocks
	found    int    // in Matcher.Found, and Matcher.Walks
}

// maxSelected is the largest Query.Limit with which the best candidates are selected, which takes time in proportion to the
// limit for each. With a larger one, all are sorted.
const maxSelected = 64

// Match finds the ranks that hold at least the first block of each prompt. It returns the seq at which all answers are
// exact. Blocks are matched by content, which is their tokens and all tokens before, or by block hash. Blocks with
// unknown content match only by block hash. A prefix ends at the first missing block, even if later blocks are held.
func (x *Index) Match(q *Query, m *Matches) (seq uint64) {
	return x.match(q, m, func() {})
}

// match calls a function each time that names were computed.
func (x *Index) match(q *Query, m *Matches, hasNamed func()) (seq uint64) {
	m.hash(x, q)
	// Names are computed without the lock, so that a rank may need them only after that.
	const attempts = 3
	for n := range attempts {
		m.name(x, q, n > 0)
		hasNamed()
		if seq = m.matchAll(x, q); !m.lacksNames || n > 0 && m.hasNamedAll {
			break
		}
	}
	// An idle Matches must not keep ranks alive.
	clear(m.names[:cap(m.names)])
	clear(m.named[:cap(m.named)])
	clear(m.needed[:cap(m.needed)])
	clear(m.expected)
	clear(m.pooled[:cap(m.pooled)])
	m.given, m.holders, m.last.rank = names{}, [numGroupTiers]holder{}, nil
	return seq
}

// matchAll finds the matches of all prompts, whose hashes are computed.
func (m *Matches) matchAll(x *Index, q *Query) (seq uint64) {
	m.blockHashes, m.poolPrefixes = m.blockHashes[:0], m.poolPrefixes[:0]
	for len(m.Prompts) < len(q.Prompts) {
		m.Prompts = append(m.Prompts, nil)
	}
	m.Prompts = m.Prompts[:len(q.Prompts)]
	for i := range m.Prompts {
		m.Prompts[i] = m.Prompts[i][:0]
	}
	m.Exceeded, m.matcher.Lookups, m.matcher.MaxLookups = false, 0, q.MaxLookups
	var selected func(*radix.Rank) bool
	if q.Worker != nil {
		selected = func(r *radix.Rank) bool {
			w := r.Owner.(*rank).worker
			return q.Worker(w.name) || q.Pools && w.isPool()
		}
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	m.hasNamedAll = m.hasNamed(x, q)
	m.lacksNames = !m.hasNamedAll
	for first := 0; first < len(m.lists) && !m.Exceeded; {
		next := first + 1
		for next < len(m.lists) && m.lists[next].prompt == m.lists[first].prompt {
			next++
		}
		m.matchPrompt(x, q, selected, m.lists[first:next])
		first = next
	}
	return x.seq
}

// Queried returns how many tokens and whole blocks a prompt of the query of the last Match has: in blocks of the best match, or
// else of a worker of the model. They are 0 if no worker's block size is known.
func (m *Matches) Queried(q *Query, prompt int) (tokens, blocks int) {
	p := &q.Prompts[prompt]
	var size int
	switch best := m.Prompts[prompt]; {
	case len(best) > 0 && best[0].BlockSize > 0:
		size = int(best[0].BlockSize)
	case p.BlockSize > 0:
		size = int(p.BlockSize)
	case len(m.sizes) > 0:
		size = int(m.sizes[0])
	default:
		return 0, 0
	}
	if n := len(p.TokenIDs); n > 0 {
		return n, n / size
	}
	blocks = max(len(p.TokensHashes), len(p.BlockHashes))
	return blocks * size, blocks
}

// HasModel reports whether the query of the last Match named a model that has workers, whose block size is known.
func (m *Matches) HasModel(q *Query) bool { return q.Model != "" && len(m.sizes) > 0 }

// matchPrompt finds the matches of a prompt, which has a list of hashes for each block size.
func (m *Matches) matchPrompt(x *Index, q *Query, selected func(*radix.Rank) bool, lists []hashList) {
	out := &m.Prompts[lists[0].prompt]
	m.pooled = m.pooled[:0]
	selects := q.Limit > 0 && q.Limit <= maxSelected
	attends := x.learners > 0 || len(m.namesOf(lists[0].prompt)) > 0 // applyGroups needs to know more
	positions := x.ordered()
	for _, l := range lists {
		p := &q.Prompts[l.prompt]
		hashes := p.TokensHashes
		if len(p.TokenIDs) > 0 {
			hashes = m.hashes[l.start:l.end]
		}
		m.expect(x, q, l, hashes)
		m.matcher.Walk, m.matcher.KeepPath, m.matcher.Group = q.Walk, attends || q.BlockHashes > 0, selects && !attends && !q.Walk && len(m.expected) == 0
		switch {
		case len(p.TokenIDs) > 0, len(p.TokensHashes) > 0:
			x.blocks.Match(q.Model, hashes, &m.matcher)
		default:
			x.blocks.MatchHashes(q.Model, p.BlockHashes, selected, &m.matcher)
			m.Exceeded = m.matcher.Exceeded
		}
		m.applyGroups(x, q, l)
		if q.Pools && x.numPools > 0 {
			m.findPools(x, l)
		}
		m.found = m.found[:0]
		for i := range m.matcher.Found {
			f := &m.matcher.Found[i]
			switch {
			case len(m.reuses) > 0 && m.reuses[i].known: // by the rule of its attention groups
				if m.reuses[i].isNothing(f) {
					continue
				}
			case f.Rank.Owner.(*rank).hasChunks && !m.wholeChunks(i):
				continue
			}
			if q.selects(l, f.Rank.Owner.(*rank)) {
				c := newCandidate(f, positions[f.Rank.Number()], i)
				if len(m.expected) > 0 {
					c = m.expecting(c, f)
				}
				m.addCandidate(q, c, selects)
			}
		}
		if len(m.expected) > 0 {
			m.addExpected(q, positions, selects)
		}
		for _, g := range slices.Backward(m.matcher.Groups) { // those of another model may be longer
			m.addGroup(x, q, l, g, positions)
		}
		found := m.found
		if !selects {
			if slices.SortFunc(found, compareCandidates); q.Limit > 0 {
				found = found[:min(len(found), q.Limit)]
			}
		}
		for _, c := range found {
			*out = m.appendMatch(*out, c)
			if q.BlockHashes > 0 {
				m.appendBlockHashes(q, p, &(*out)[len(*out)-1], m.matcher.Found[c.found].Rank)
			}
		}
	}
	if len(lists) > 1 { // each list is sorted
		slices.SortStableFunc(*out, compareMatches)
		if q.Limit > 0 {
			*out = (*out)[:min(len(*out), q.Limit)]
		}
	}
	*out = m.creditPools(x, q, &q.Prompts[lists[0].prompt], *out)
}

// selects reports whether a rank may match a list of hashes.
func (q *Query) selects(l hashList, r *rank) bool {
	return (l.size == 0 || l.size == r.worker.blockSize && !l.pools) && !r.worker.isPool() && (q.Worker == nil || q.Worker(r.worker.name))
}

// addGroup adds the best candidates of a group to m.found.
func (m *Matches) addGroup(x *Index, q *Query, l hashList, g radix.Group, positions []uint32) {
	if len(m.found) == q.Limit && lengthOf(g.Blocks, g.Blocks) < m.found[q.Limit-1].length {
		return
	}
	// Most groups have one length and more ranks than are wanted: the first ones are selected by their positions alone. A key is a position
	// and a number.
	first := m.keys[:0]
	for number := range g.Numbers() {
		key := uint64(positions[number])<<32 | uint64(number)
		if len(first) == q.Limit && key > first[q.Limit-1] {
			continue
		}
		r := x.blocks.Rank(number)
		if !q.selects(l, r.Owner.(*rank)) {
			continue
		}
		if g.TierOf(r) != deviceTier { // those in the device tier are better
			m.addMatch(q, g.MatchOf(r), positions[number])
			continue
		}
		if len(first) < q.Limit {
			first = append(first, 0)
		}
		i := len(first) - 1
		for ; i > 0 && first[i-1] > key; i-- {
			first[i] = first[i-1]
		}
		first[i] = key
	}
	m.keys = first
	for _, key := range first {
		if !m.addMatch(q, g.MatchOf(x.blocks.Rank(uint32(key))), uint32(key>>32)) {
			return
		}
	}
}

// addMatch adds a match to m.matcher.Found and m.found, if it is among the best.
func (m *Matches) addMatch(q *Query, f radix.Match, position uint32) bool {
	if r := f.Rank.Owner.(*rank); r.hasChunks && !r.wholeChunks(&f) {
		return true
	}
	c := newCandidate(&f, position, len(m.matcher.Found))
	if len(m.found) == q.Limit && compareCandidates(c, m.found[q.Limit-1]) > 0 {
		return false
	}
	m.addCandidate(q, c, true)
	m.matcher.Found = append(m.matcher.Found, f)
	return true
}

func newCandidate(f *radix.Match, position uint32, found int) candidate {
	return candidate{length: lengthOf(f.Blocks, f.TierBlocks[0]), position: position, found: found}
}

// expecting returns a candidate with what its rank is expected to have.
func (m *Matches) expecting(c candidate, f *radix.Match) candidate {
	r := f.Rank.Owner.(*rank)
	if n := m.expected[r]; n > f.Blocks {
		c.length, c.expected = lengthOf(n, f.TierBlocks[0]), uint32(n)
	}
	delete(m.expected, r)
	return c
}

// addExpected adds the ranks of m.expected, which hold nothing of the prompt, to m.matcher.Found and m.found.
func (m *Matches) addExpected(q *Query, positions []uint32, selects bool) {
	for r, n := range m.expected {
		c := candidate{length: lengthOf(n, 0), position: positions[r.blocks.Number()], expected: uint32(n), found: len(m.matcher.Found)}
		m.matcher.Found = append(m.matcher.Found, radix.Match{Rank: r.blocks})
		if len(m.reuses) > 0 {
			m.reuses = append(m.reuses, reuse{})
		}
		if q.Walk {
			m.matcher.Walks = append(m.matcher.Walks, radix.Walk{})
		}
		m.addCandidate(q, c, selects)
	}
}

// lengthOf returns candidate.length.
func lengthOf(blocks, deviceBlocks int) uint64 { return uint64(blocks)<<32 | uint64(deviceBlocks) }

// addCandidate adds a candidate to m.found. If selects is set, m.found has only the best ones, sorted.
func (m *Matches) addCandidate(q *Query, c candidate, selects bool) {
	if !selects {
		m.found = append(m.found, c)
		return
	}
	best := m.found
	if len(best) == q.Limit {
		if compareCandidates(c, best[q.Limit-1]) > 0 {
			return
		}
		best = best[:q.Limit-1]
	}
	i := len(best) // most come in order
	if i > 0 && compareCandidates(c, best[i-1]) < 0 {
		i, _ = slices.BinarySearchFunc(best, c, compareCandidates)
	}
	m.found = slices.Insert(best, i, c)
}

func compareCandidates(a, b candidate) int {
	if a.length != b.length {
		return cmp.Compare(b.length, a.length)
	}
	return cmp.Compare(a.position, b.position)
}

func compareMatches(a, b Match) int {
	return cmp.Or(max(b.Blocks, int(b.Expected))-max(a.Blocks, int(a.Expected)), b.TierBlocks[0]-a.TierBlocks[0], cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
}

// MaxBlockHashes bounds the block hashes of all matches of a query.
const MaxBlockHashes = 1 << 16

// appendBlockHashes sets the block hashes of a match of the prompt that the matcher has matched last.
func (m *Matches) appendBlockHashes(q *Query, p *Prompt, f *Match, r *radix.Rank) {
	first := len(m.blockHashes)
	most := min(f.Blocks, q.BlockHashes, MaxBlockHashes-first)
	if len(p.BlockHashes) > 0 {
		m.blockHashes = append(m.blockHashes, p.BlockHashes[:most]...)
	} else {
		m.blockHashes = m.matcher.Names(r, most, m.blockHashes)
	}
	f.firstHash, f.numHashes = uint32(first), uint32(len(m.blockHashes)-first)
	for _, number := range r.Owner.(*rank).worker.added.GetRanks() {
		if number < f.Rank {
			f.RankIndex++
		}
	}
}

// BlockHashes returns the engine's block hashes of the first blocks of the prefix of a match: at most Query.BlockHashes, and MaxBlockHashes of all matches.
// There may be fewer, if a block has had several. They are valid until the next Match.
func (m *Matches) BlockHashes(f *Match) []uint64 {
	return m.blockHashes[f.firstHash:][:f.numHashes]
}

// appendMatch appends the match of a candidate of the prompt that the matcher has matched last. It sets the fields one by one, because the compiler copies a
// Match that is returned twice.
func (m *Matches) appendMatch(out []Match, c candidate) []Match {
	out = slices.Grow(out, 1)[:len(out)+1]
	f := &out[len(out)-1]
	found := &m.matcher.Found[c.found]
	r := found.Rank.Owner.(*rank)
	w := r.worker
	f.Worker, f.Model, f.Endpoint, f.Labels, f.Rank = w.name, w.model, w.added.GetEndpoint(), w.added.GetLabels(), r.number
	f.Blocks, f.TierBlocks, f.Expected, f.BlockSize = found.Blocks, found.TierBlocks, c.expected, w.blockSize
	f.Reasons, f.TierReasons, f.GroupsOmitted = r.all, r.reasons, r.groupsOmitted
	f.groups, f.Walk, f.firstHash, f.numHashes, f.RankIndex, f.firstPool, f.numPools = reuse{}, [NumTiers]int{}, 0, 0, 0, 0, 0
	if len(m.reuses) > 0 {
		if f.groups = m.reuses[c.found]; f.groups.continues {
			f.groups.total = uint32(f.Blocks) * f.BlockSize
		}
	}
	if len(m.matcher.Walks) > 0 {
		f.Walk = m.matcher.Walks[c.found].Ends
	}
	return out
}

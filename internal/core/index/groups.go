package index

import (
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Tiers of attention groups: kvcast follows other groups than the main group in device and host memory.
const (
	deviceTier = iota
	hostTier
	numGroupTiers
)

// attention is what is known of the attention groups of a dp rank.
type attention struct {
	// described is the last Groups that holds; nil: blocks came before it, from the middle of a stream.
	described *kvcastv1.Groups
	// rule is the engine's rule; nil: it cannot be applied.
	rule *hybrid.Rule
	// hashing is how the engine computes hashes; nil: that is unknown.
	hashing *hashing
	learned learned
	// main is the index of the main group; -1: there is none. mainBlock is the number of tokens in its blocks.
	main, mainBlock int
	// held are the groups that hold a block, by hash, in each tier: bit n is group n. They do not include whole blocks of the
	// main group.
	held [numGroupTiers]hashtable.Table[uint64]
	// digests are those of held.
	digests [numGroupTiers]Digest
}

// maxHashings bounds the ways in which the engines of a model compute hashes: each takes time for each prompt. Of further engines,
// prefixes are upper bounds.
const maxHashings = 4

// hashing is how the engines of a model compute hashes.
type hashing struct {
	hasher vllmhash.Hasher
	unit   int
	key    string // of all this
	ranks  []*rank
}

// maxPaths bounds the paths of an adapter of the engines that compute hashes in one way. Of engines with further ones, prefixes of
// prompts with the adapter are upper bounds.
const maxPaths = 4

// withAttention returns the attention groups of a rank, which it adds if there are none.
func (r *rank) withAttention() *attention {
	if r.attention == nil {
		r.attention = &attention{main: -1}
		for tier := range r.attention.held {
			r.attention.held[tier] = hashtable.New[uint64]()
		}
	}
	return r.attention
}

// groups returns the groups that are described.
func (r *rank) groups() *kvcastv1.Groups {
	if r.attention == nil {
		return nil
	}
	return r.attention.described
}

// followed reports whether the engine's rule can be applied: to prompts given by token ids, or also to others.
func (r *rank) followed() bool {
	return r.attention != nil && (r.attention.hashing != nil || r.attention.learned.applies)
}

// setGroups applies a Groups event.
func (x *Index) setGroups(r *rank, g *kvcastv1.Groups) {
	x.dropHashing(r)
	a := r.withAttention()
	a.described, a.rule, a.main, a.mainBlock = g, nil, -1, 0
	var groups []hybrid.Group
	for _, d := range g.GetGroups() {
		groups = append(groups, hybrid.Group{
			Index: int(d.GetIndex()), Kind: hybrid.Kind(d.GetKind()), BlockSize: int(d.GetBlockSize()), Window: int(d.GetWindow()),
			Chunk: int(d.GetChunk()), Drops: d.GetDrops(),
		})
		if d.GetMain() {
			a.main, a.mainBlock = int(d.GetIndex()), int(d.GetBlockSize())
		}
	}
	if w := r.worker; a.main < 0 && w.blockSize == 0 { // no Stored tells it
		for _, g := range groups {
			if g.BlockSize > int(w.blockSize) {
				x.setBlockSize(w, uint32(g.BlockSize))
			}
		}
	}
	if rule, err := hybrid.New(groups, int(g.GetUnit())); err == nil && g.GetMissing() == "" {
		a.rule = &rule
	}
	x.models[r.worker.model].addHashing(r, g)
	x.setLearned(r)
}

// clearGroups removes the blocks of all attention groups but the main group from some tiers; from all if none is named.
func (r *rank) clearGroups(tiers []kvcastv1.Tier) {
	if r.attention == nil {
		return
	}
	for tier := range r.attention.held {
		if len(tiers) == 0 || slices.Contains(tiers, kvcastv1.Tier(tier+1)) {
			r.attention.held[tier] = hashtable.New[uint64]()
			r.attention.digests[tier] = Digest{}
			r.attention.learned.clearTier(tier)
		}
	}
}

// forgetGroups forgets the attention groups of a rank whose engine restarted.
func (x *Index) forgetGroups(r *rank) {
	x.dropHashing(r)
	x.forgetLearned(r)
	r.attention = nil
}

// holdGroup changes whether an attention group holds blocks.
func (r *rank) holdGroup(tier int, group uint64, hashes []uint64, holds bool) {
	if tier >= numGroupTiers || group >= hybrid.MaxGroups {
		return
	}
	a := r.withAttention()
	t, d, bit := &a.held[tier], &a.digests[tier], uint64(1)<<group
	t.Prefetch(hashes)
	for _, hash := range hashes {
		if holds {
			b, _ := t.Put(hash)
			if b.Value&bit != 0 {
				continue
			}
			b.Value |= bit
			d.Blocks++
		} else {
			b := t.Find(hash)
			if b == nil || b.Value&bit == 0 {
				continue
			}
			if b.Value &^= bit; b.Value == 0 {
				t.Delete(b)
			}
			d.Blocks--
		}
		d.XOR ^= kvblock.GroupDigest(group, hash)
	}
}

// addHashing adds how a rank's engine computes hashes to its model.
func (m *model) addHashing(r *rank, g *kvcastv1.Groups) {
	h := g.GetHashing()
	algorithm, ok := map[kvcastv1.BlockHashing_Algorithm]vllmhash.Algorithm{
		kvcastv1.BlockHashing_ALGORITHM_SHA256: vllmhash.SHA256, kvcastv1.BlockHashing_ALGORITHM_SHA256_CBOR: vllmhash.SHA256CBOR,
	}[h.GetAlgorithm()]
	if !ok || r.attention.rule == nil {
		return
	}
	seed := h.GetSeed()
	if seed == "" {
		seed = vllmhash.DefaultSeed
	}
	hasher, err := vllmhash.New(algorithm, seed, int(g.GetUnit()))
	if err != nil {
		return
	}
	key := fmt.Sprintf("%d %d %q", algorithm, g.GetUnit(), seed)
	i := slices.IndexFunc(m.hashings, func(known *hashing) bool { return known.key == key })
	if i < 0 {
		if i = len(m.hashings); i == maxHashings {
			return
		}
		m.hashings = append(m.hashings, &hashing{hasher: hasher, unit: int(g.GetUnit()), key: key})
	}
	m.hashings[i].ranks = append(m.hashings[i].ranks, r)
	r.attention.hashing = m.hashings[i]
}

// dropHashing removes how a rank's engine computes hashes from its model.
func (x *Index) dropHashing(r *rank) {
	if r.attention == nil || r.attention.hashing == nil {
		return
	}
	m, h := x.models[r.worker.model], r.attention.hashing
	if h.ranks = slices.DeleteFunc(h.ranks, func(o *rank) bool { return o == r }); len(h.ranks) == 0 {
		m.hashings = slices.DeleteFunc(m.hashings, func(o *hashing) bool { return o == h })
	}
	r.attention.hashing = nil
}

// groupEncoded applies an encoded GroupStored or GroupRemoved.
func (x *Index) groupEncoded(r *rank, tier int, b []byte, holds bool) error {
	d := &x.decoder
	var group uint64
	var err error
	if group, d.blocks, err = encode.GroupBlocks(b, d.blocks[:0]); err != nil {
		return err
	}
	x.applyGroup(r, tier, group, d.blocks, holds)
	d.release()
	return nil
}

// applyGroup applies a GroupStored, or a GroupRemoved.
func (x *Index) applyGroup(r *rank, tier int, group uint64, hashes []uint64, holds bool) {
	if holds {
		r.usedTiers |= 1 << tier
	} else {
		r.removed = x.seq + 1
	}
	r.holdGroup(tier, group, hashes, holds)
	x.learnAll(r, hashes)
}

// names are the hashes of a prompt's units, as engines compute them, or the places of its blocks.
type names struct {
	prompt  int
	hashing *hashing // nil: the hashes are given, or there are places
	path    string   // of the prompt's adapter
	unit    int      // in tokens
	hashes  []uint64
	limit   int // the longest prefix that is allowed, in tokens
	hashed  int // the tokens in whole units
	// places finds the places of the prompt's blocks, by which a rank has learned what its groups hold; nil: hashes has all names. Of the first
	// held tokens, the rank holds all blocks in some tier.
	places *radix.Matcher
	index  *Index
	held   int
}

// reuse is how much of a prompt an engine with several attention groups can reuse, in tokens.
type reuse struct {
	known bool
	tiers [numGroupTiers]uint32 // of each tier alone
	total uint32                // of device memory, and what host memory adds to it
	// endedBy is the attention group that ends the prefix in each tier; hybrid.NoGroup if none does.
	endedBy [numGroupTiers]int8
}

// isNothing reports whether a rank with several attention groups can reuse nothing, though its main group holds blocks.
func (u *reuse) isNothing(f *radix.Match) bool { return u.known && u.total == 0 && f.Blocks == 0 }

// walk sets the ends of a walk, which the main group alone has had, to what the engine can reuse. In lower tiers than host memory, they
// remain those of the main group where it has further blocks.
func (u *reuse) walk(ends *[NumTiers]int, blockSize uint32) {
	main := ends[hostTier]
	ends[deviceTier], ends[hostTier] = int(u.tiers[deviceTier]/blockSize), int(u.total/blockSize)
	for tier := numGroupTiers; tier < NumTiers; tier++ {
		if ends[tier] == main {
			ends[tier] = ends[hostTier]
		}
	}
}

// name computes the hashes of prompts for the engines of a model that need them, or for all. It is called without the index's lock.
func (m *Matches) name(x *Index, q *Query, all bool) {
	x.mu.RLock()
	m.named, m.names = x.appendHashings(m.named[:0], q, all), m.names[:0]
	for i := range q.Prompts {
		if p := &q.Prompts[i]; len(p.TokenIDs) > 0 {
			for _, h := range m.named {
				m.names = h.appendNames(m.names, i, p)
			}
		}
	}
	x.mu.RUnlock()
	known := m.names[:0]
	for _, n := range m.names {
		p := &q.Prompts[n.prompt]
		var err error
		n.unit = n.hashing.unit
		if n.hashes, err = n.hashing.hasher.Append(nil, p.TokenIDs, vllmhash.Content{LoRAName: p.LoRA, LoRAPath: n.path, CacheSalt: p.Salt}, &m.hashBuffer); err == nil {
			n.hashed = len(n.hashes) * n.unit
			known = append(known, n)
		} // else a name is too long
	}
	clear(m.names[len(known):])
	m.names = known
}

// limit returns the longest prefix of a prompt with token ids that is allowed, in tokens.
func (p *Prompt) limit() int {
	if p.ExcludeLastToken {
		return len(p.TokenIDs) - 1
	}
	return len(p.TokenIDs)
}

// appendHashings appends how the engines of a query's models compute hashes: those of which a rank needs names, or all. There are none if no
// prompt has token ids.
func (x *Index) appendHashings(to []*hashing, q *Query, all bool) []*hashing {
	if !slices.ContainsFunc(q.Prompts, func(p Prompt) bool { return len(p.TokenIDs) > 0 }) {
		return to
	}
	if q.Model != "" {
		return x.appendModelHashings(to, x.models[q.Model], all)
	}
	for _, m := range x.models {
		to = x.appendModelHashings(to, m, all)
	}
	return to
}

// appendModelHashings does it for a model, which may be nil.
func (x *Index) appendModelHashings(to []*hashing, m *model, all bool) []*hashing {
	if m == nil {
		return to
	}
	for _, h := range m.hashings {
		if all || slices.ContainsFunc(h.ranks, x.needsNames) {
			to = append(to, h)
		}
	}
	return to
}

// hasNamed reports whether hashes were computed for all engines that need names now.
func (m *Matches) hasNamed(x *Index, q *Query) bool {
	m.needed = x.appendHashings(m.needed[:0], q, false)
	return !slices.ContainsFunc(m.needed, func(h *hashing) bool { return !slices.Contains(m.named, h) })
}

// appendNames appends the names of a prompt, without the hashes: one, or with an adapter one for each path.
func (h *hashing) appendNames(to []names, prompt int, p *Prompt) []names {
	n := names{prompt: prompt, hashing: h, limit: p.limit()}
	if p.LoRA == "" {
		return append(to, n)
	}
	first := len(to)
	for _, r := range h.ranks {
		n.path = r.attention.pathOf(p.LoRA)
		if n.path != "" && len(to) < first+maxPaths && !slices.ContainsFunc(to[first:], func(o names) bool { return o.path == n.path }) {
			to = append(to, n)
		}
	}
	return to
}

// pathOf returns the path of an adapter; empty if it is not known.
func (a *attention) pathOf(lora string) string { return a.described.GetHashing().GetLoraPaths()[lora] }

// applyGroups applies the rules of engines with several attention groups to what the matcher has found for a prompt and a block size. It
// adds the ranks whose main group holds no block, or which have none.
func (m *Matches) applyGroups(x *Index, q *Query, l hashList) {
	m.reuses = m.reuses[:0]
	all := m.namesOf(l.prompt)
	if len(all) == 0 && x.learners == 0 {
		return
	}
	for i := range m.matcher.Found {
		f := &m.matcher.Found[i]
		r := f.Rank.Owner.(*rank)
		u := m.applyRule(x, all, f, r, q, l)
		if m.reuses = append(m.reuses, u); u.known && i < len(m.matcher.Walks) {
			u.walk(&m.matcher.Walks[i].Ends, r.worker.blockSize)
		}
	}
	for _, h := range all {
		for _, r := range h.hashing.ranks {
			if m.matcher.Has(r.blocks) || !x.needsNames(r) || h.path != r.attention.pathOf(q.Prompts[l.prompt].LoRA) {
				continue
			}
			f := radix.Match{Rank: r.blocks}
			if u := m.applyRule(x, all, &f, r, q, l); u.total > 0 {
				m.matcher.Found, m.reuses = append(m.matcher.Found, f), append(m.reuses, u)
				if q.Walk {
					var w radix.Walk
					u.walk(&w.Ends, r.worker.blockSize)
					m.matcher.Walks = append(m.matcher.Walks, w)
				}
			}
		}
	}
}

// namesOf returns the names that were computed for a prompt.
func (m *Matches) namesOf(prompt int) []names {
	all := m.names
	for len(all) > 0 && all[0].prompt != prompt {
		all = all[1:]
	}
	for i := range all {
		if all[i].prompt != prompt {
			return all[:i]
		}
	}
	return all
}

// applyRule applies a rank's rule to a match, if the hashes of the prompt are known for its engine. all are those that were computed for
// the prompt.
func (m *Matches) applyRule(x *Index, all []names, f *radix.Match, r *rank, q *Query, l hashList) (u reuse) {
	p := &q.Prompts[l.prompt]
	if r.attention == nil || l.size != r.worker.blockSize && (l.size != 0 || len(p.TokenIDs) > 0) || q.Model != "" && q.Model != r.worker.model ||
		q.Worker != nil && !q.Worker(r.worker.name) {
		return reuse{}
	}
	computed, computable := r.attention.computed(all, p)
	if !x.needsNames(r) || computed == nil && !computable {
		if n := m.namesFor(x, r, f, p, l); n != nil {
			u = m.reuse(r, n, &f.TierBlocks)
		}
	}
	if !u.known && computed != nil {
		u = m.reuse(r, computed, &f.TierBlocks)
	}
	m.lacksNames = m.lacksNames || !u.known && computed == nil && computable
	if !u.known {
		return reuse{}
	}
	for tier, tokens := range u.tiers {
		f.TierBlocks[tier] = int(tokens / r.worker.blockSize)
	}
	f.Blocks = int(u.total / r.worker.blockSize)
	for _, blocks := range f.TierBlocks {
		f.Blocks = max(f.Blocks, blocks)
	}
	return u
}

// needsNames reports whether a rank may hold more of a prompt than it has learned, so that names are computed if that is possible.
func (x *Index) needsNames(r *rank) bool { return !r.learns() || x.blocks.HasUnplaced(r.blocks) }

// computed returns the names of a prompt that were computed for an engine; nil if there are none. able reports whether they can be.
func (a *attention) computed(all []names, p *Prompt) (n *names, able bool) {
	if a.hashing == nil || len(p.TokenIDs) == 0 {
		return nil, false
	}
	path := a.pathOf(p.LoRA)
	for i := range all {
		if all[i].hashing == a.hashing && all[i].path == path {
			return &all[i], true
		}
	}
	return nil, p.LoRA == "" || path != ""
}

// namesFor returns the names of a prompt's blocks that are given with it, or their places, if a rank has learned. Otherwise it returns nil.
// They are valid until the next call.
func (m *Matches) namesFor(x *Index, r *rank, f *radix.Match, p *Prompt, l hashList) *names {
	a := r.attention
	if !a.learned.applies || a.mainBlock != int(r.worker.blockSize) {
		return nil
	}
	n := &m.given
	*n = names{prompt: l.prompt, unit: a.mainBlock, places: &m.matcher, index: x, held: f.Blocks * a.mainBlock}
	switch {
	case len(p.TokenIDs) > 0:
		n.limit, n.hashed = p.limit(), (l.end-l.start)*n.unit
		if n.hashed < len(p.TokenIDs)/n.unit*n.unit && a.rule.Drops() { // an engine that drops a block looks at the last one
			return nil
		}
	case len(p.TokensHashes) > 0:
		n.hashed = len(p.TokensHashes) * n.unit
		n.limit = n.hashed
	default:
		n.places, n.hashes = nil, p.BlockHashes
		n.hashed = len(n.hashes) * n.unit
		n.limit = n.hashed
	}
	return n
}

// holder implements hybrid.Holder for a prompt, a rank and a tier.
type holder struct {
	rank  *rank
	tier  int
	names *names
	// dense is the number of tokens that the main group holds from the first on.
	dense int
	// unknown reports whether it was asked for a prefix without a name, so that the answer is not known.
	unknown bool
}

func (h *holder) Run(group, from, step, n int) (run int, ok bool) {
	a := h.rank.attention
	if group == a.main && h.tier == deviceTier && step%a.mainBlock == 0 && from%a.mainBlock == 0 {
		return min(max((h.dense-from)/step, 0), n), true // without blocks that follow a missing one
	}
	return 0, false
}

func (h *holder) Held(group, from, step, n int) (held uint64) {
	if run, ok := h.Run(group, from, step, n); ok {
		return 1<<run - 1
	}
	a := h.rank.attention
	if h.names.places != nil && group != a.main && step == h.names.unit {
		return h.learned(uint64(group), from/step, n)
	}
	for i := range n {
		at := from + (i+1)*step
		switch {
		case group != a.main || at%a.mainBlock != 0:
			if h.holds(uint64(group), at) {
				held |= 1 << i
			}
		case at <= h.dense || h.tier == hostTier && h.holdsMain(at): // what host memory adds may begin within a prompt
			held |= 1 << i
		}
	}
	return held
}

// holds reports whether a group holds the prefix of a number of tokens.
func (h *holder) holds(group uint64, tokens int) bool {
	if h.names.places != nil {
		return h.learned(group, tokens/h.names.unit-1, 1) != 0
	}
	mask, _ := h.rank.attention.held[h.tier].Get(h.names.hashes[tokens/h.names.unit-1])
	return mask&(1<<group) != 0
}

// learned returns which of n blocks from one on a group holds, as bits.
func (h *holder) learned(group uint64, block, n int) (held uint64) {
	l, end := &h.rank.attention.learned, min(block+n, h.names.held/h.names.unit)
	h.unknown = h.unknown || end < block+n
	for first := block; block < end; {
		place, blocks := h.names.places.Place(h.rank.blocks, block)
		if blocks = min(blocks, end-block, wordBits-int(place%wordBits)); blocks == 0 || l.areAmbiguous(place, blocks) {
			h.unknown = true
			return held
		}
		held |= l.holds(h.tier, group, place, blocks) << (block - first)
		block += blocks
	}
	return held
}

// holdsMain reports whether the main group holds the block that ends with a number of tokens.
func (h *holder) holdsMain(tokens int) bool {
	n := h.names
	if n.places == nil {
		return h.rank.blocks.Tiers(n.hashes[tokens/n.unit-1])&(1<<h.tier) != 0
	}
	place, blocks := n.places.Place(h.rank.blocks, tokens/n.unit-1)
	return blocks > 0 && n.index.blocks.Holds(h.rank.blocks, place, h.tier)
}

// extend extends the blocks that the main group holds by those whose content is unknown.
func (h *holder) extend() {
	block, end := h.rank.attention.mainBlock, h.names.hashed
	if block == 0 {
		h.dense = 0
		return
	}
	if h.names.places != nil { // by content, only blocks whose content is known are found
		return
	}
	for h.dense+block <= end && h.holdsMain(h.dense+block) {
		h.dense += block
	}
}

// reuse returns how much of a prompt a rank can reuse. blocks are those that the main group holds in each tier.
func (m *Matches) reuse(r *rank, n *names, blocks *[NumTiers]int) (u reuse) {
	rule, holders := r.attention.rule, &m.holders
	for tier := range holders {
		h := &holders[tier]
		*h = holder{rank: r, tier: tier, names: n, dense: blocks[tier] * r.attention.mainBlock}
		u.endedBy[tier] = hybrid.NoGroup
		if r.usedTiers&(1<<tier) == 0 {
			continue
		}
		h.extend()
		tokens, endedBy := rule.Longest(h, n.limit, n.hashed)
		u.tiers[tier], u.endedBy[tier] = uint32(tokens), int8(endedBy)
	}
	u.total = u.tiers[deviceTier]
	if r.usedTiers&(1<<hostTier) != 0 {
		u.total = uint32(rule.LongestWithHost(&holders[hostTier], int(u.total), n.limit, n.hashed))
	}
	u.known = !holders[deviceTier].unknown && !holders[hostTier].unknown
	return u
}

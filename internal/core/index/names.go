package index

import (
	"fmt"
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

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

// pathOf returns the path of an adapter; empty if it is not known, or without an adapter.
func (a *attention) pathOf(lora string) string {
	if lora == "" {
		return ""
	}
	return a.described.GetHashing().GetLoraPaths()[lora]
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

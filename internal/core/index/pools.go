package index

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/index/radix"
)

// A pool is a worker whose blocks others can load. It is no match: its prefix is one of Matches.Pools of the matches of the workers
// that name it.

// PoolPrefix is the longest prefix of a prompt that a pool holds.
type PoolPrefix struct {
	Pool string
	// Rank is the dp rank of the pool that holds it.
	Rank uint32
	// Blocks is the number of blocks of the pool, and Tokens of tokens in them, which is above 0.
	Blocks, Tokens int
	Reasons        Reasons
}

// pools are the pools of a model, and its workers that name pools.
type pools struct {
	all   []*worker
	users map[string][]*worker // by the name of a pool, which may not exist
}

// add adds a worker, if it is a pool or names some.
func (p *pools) add(w *worker) {
	if w.added.GetPool() {
		p.all = append(p.all, w)
	}
	for _, name := range w.added.GetPools() {
		if p.users == nil {
			p.users = make(map[string][]*worker)
		}
		p.users[name] = append(p.users[name], w)
	}
}

// remove removes a worker.
func (p *pools) remove(w *worker) {
	isIt := func(o *worker) bool { return o == w }
	p.all = slices.DeleteFunc(p.all, isIt)
	for _, name := range w.added.GetPools() {
		if p.users[name] = slices.DeleteFunc(p.users[name], isIt); len(p.users[name]) == 0 {
			delete(p.users, name)
		}
	}
}

// isPool reports whether the worker is a pool.
func (w *worker) isPool() bool { return w.added.GetPool() }

// pooled is the prefix of a prompt that a pool holds.
type pooled struct {
	PoolPrefix
	pool *worker
}

func comparePooled(a, b pooled) int {
	return cmp.Or(cmp.Compare(b.Tokens, a.Tokens), strings.Compare(a.Pool, b.Pool))
}

// findPools adds the pools that hold a part of the list of hashes that the matcher has matched last to m.pooled.
func (m *Matches) findPools(x *Index, l hashList) {
	for i := range m.matcher.Found {
		f := &m.matcher.Found[i]
		m.foundPool(l, f.Rank, f.Blocks)
	}
	for _, model := range x.models {
		for _, w := range model.pools.all {
			for _, r := range w.ranks {
				if i := slices.IndexFunc(m.matcher.Groups, func(g radix.Group) bool { return g.Has(r.blocks.Number()) }); i >= 0 {
					m.foundPool(l, r.blocks, m.matcher.Groups[i].Blocks)
				}
			}
		}
	}
}

// foundPool adds what a rank holds, if it is one of a pool.
func (m *Matches) foundPool(l hashList, of *radix.Rank, blocks int) {
	r := of.Owner.(*rank)
	w := r.worker
	if !w.isPool() || l.size != 0 && l.size != w.blockSize || blocks*int(w.blockSize) == 0 {
		return
	}
	found := pooled{PoolPrefix{Pool: w.name, Rank: r.number, Blocks: blocks, Tokens: blocks * int(w.blockSize), Reasons: r.all}, w}
	i := slices.IndexFunc(m.pooled, func(p pooled) bool { return p.pool == w })
	switch {
	case i < 0:
		m.pooled = append(m.pooled, found)
	case found.Tokens > m.pooled[i].Tokens:
		m.pooled[i] = found
	}
}

// creditPools adds the prefixes of m.pooled to the matches of a prompt, and after them the ranks of which only pools hold a part of the prompt.
func (m *Matches) creditPools(x *Index, q *Query, p *Prompt, out []Match) []Match {
	if len(m.pooled) == 0 {
		return out
	}
	slices.SortFunc(m.pooled, comparePooled)
	for i := range out {
		m.credit(x.workers[out[i].Worker], &out[i])
	}
	if q.Limit > 0 && len(out) >= q.Limit {
		return out
	}
	type key struct {
		worker string
		rank   uint32
	}
	present := make(map[key]bool, len(out))
	for i := range out {
		present[key{out[i].Worker, out[i].Rank}] = true
	}
	own := len(out)
	for i := range m.pooled {
		pool := m.pooled[i].pool
		for _, w := range x.models[pool.model].pools.users[pool.name] {
			if p.BlockSize != 0 && p.BlockSize != w.blockSize || q.Worker != nil && !q.Worker(w.name) {
				continue
			}
			for _, r := range w.ranks {
				if k := (key{w.name, r.number}); !present[k] {
					present[k] = true
					out = append(out, Match{
						Worker: w.name, Model: w.model, Endpoint: w.added.GetEndpoint(), Labels: w.added.GetLabels(), Rank: r.number, BlockSize: w.blockSize,
						Reasons: r.all, TierReasons: r.reasons, GroupsOmitted: r.groupsOmitted,
					})
					m.credit(w, &out[len(out)-1])
				}
			}
		}
	}
	slices.SortFunc(out[own:], func(a, b Match) int {
		return cmp.Or(
			cmp.Compare(m.Pools(&b)[0].Tokens, m.Pools(&a)[0].Tokens), strings.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	if q.Limit > 0 {
		out = out[:min(len(out), q.Limit)]
	}
	return out
}

// credit sets the pools of a match of a worker.
func (m *Matches) credit(w *worker, f *Match) {
	names := w.added.GetPools()
	if len(names) == 0 {
		return
	}
	f.firstPool = uint32(len(m.poolPrefixes))
	for i := range m.pooled {
		if p := &m.pooled[i]; p.pool.model == w.model && slices.Contains(names, p.Pool) {
			m.poolPrefixes = append(m.poolPrefixes, p.PoolPrefix)
		}
	}
	f.numPools = uint32(len(m.poolPrefixes)) - f.firstPool
}

// HasPools reports whether Matches.Pools has any of the match.
func (m *Match) HasPools() bool { return m.numPools > 0 }

// Pools returns the longest prefix in each pool of a match's worker that holds some of the prompt: by tokens, descending, then by name. They
// are valid until the next Match.
func (m *Matches) Pools(f *Match) []PoolPrefix { return m.poolPrefixes[f.firstPool:][:f.numPools] }

package index

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/index/radix"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
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
	// Reasons are as in Rank, for all tiers.
	Reasons Reasons
	// groupsOmitted reports whether the pool has other attention groups than the main group, by which the prefix is.
	groupsOmitted bool
}

// Trust returns how far the prefix can be trusted, as far as it follows from entries.
func (p *PoolPrefix) Trust() kvcastv1.Trust { return trust(p.Reasons, p.groupsOmitted) }

// pools are the pools of a model, and its workers that name pools.
type pools struct {
	all   []*worker
	users map[string][]*worker // by the name of a pool, which may not exist; ascending by name
}

// add adds a worker, if it is a pool or names some.
func (p *pools) add(w *worker) {
	if w.isPool() {
		p.all = append(p.all, w)
	}
	for _, name := range w.added.GetPools() {
		if p.users == nil {
			p.users = make(map[string][]*worker)
		}
		i, _ := slices.BinarySearchFunc(p.users[name], w, compareNames)
		p.users[name] = slices.Insert(p.users[name], i, w)
	}
}

func compareNames(a, b *worker) int { return strings.Compare(a.name, b.name) }

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
	for _, f := range m.matcher.Found {
		m.foundPool(l, f)
	}
	for _, model := range x.models {
		for _, w := range model.pools.all {
			for _, r := range w.ranks {
				if i := slices.IndexFunc(m.matcher.Groups, func(g radix.Group) bool { return g.Has(r.blocks.Number()) }); i >= 0 {
					m.foundPool(l, m.matcher.Groups[i].MatchOf(r.blocks))
				}
			}
		}
	}
}

// foundPool adds what a rank holds, if it is one of a pool.
func (m *Matches) foundPool(l hashList, f radix.Match) {
	r := f.Rank.Owner.(*rank)
	w := r.worker
	if !w.isPool() || l.size != 0 && l.size != w.blockSize || r.hasChunks && !r.wholeChunks(&f) || f.Blocks*int(w.blockSize) == 0 {
		return
	}
	found := pooled{PoolPrefix{
		Pool: w.name, Rank: r.number, Blocks: f.Blocks, Tokens: f.Blocks * int(w.blockSize), Reasons: r.all, groupsOmitted: r.groupsOmitted,
	}, w}
	i := slices.IndexFunc(m.pooled, func(p pooled) bool { return p.pool == w })
	switch {
	case i < 0:
		m.pooled = append(m.pooled, found)
	case found.Tokens > m.pooled[i].Tokens:
		m.pooled[i] = found
	}
}

// creditPools adds the prefixes of m.pooled to the matches of a prompt, and after them the ranks of which only pools hold a part of the
// prompt: those with the longest prefix in a pool first, then by worker and rank.
func (m *Matches) creditPools(x *Index, q *Query, p *Prompt, out []Match) []Match {
	if len(m.pooled) == 0 {
		return out
	}
	slices.SortFunc(m.pooled, comparePooled)
	present := make(map[*rank]bool)
	for i := range out {
		w := x.workers[out[i].Worker]
		m.credit(w, &out[i])
		present[x.findRank(w.name, out[i].Rank)] = true
	}
	for rest := m.pooled; len(rest) > 0; {
		longest := rest[:1]
		for len(longest) < len(rest) && rest[len(longest)].Tokens == rest[0].Tokens {
			longest = rest[:len(longest)+1]
		}
		for _, w := range usersOf(x, longest) {
			if p.BlockSize != 0 && p.BlockSize != w.blockSize || q.Worker != nil && !q.Worker(w.name) {
				continue
			}
			for i, r := range w.ranks {
				if q.Limit > 0 && len(out) >= q.Limit {
					return out
				}
				if present[r] {
					continue
				}
				present[r] = true
				out = append(out, Match{
					Worker: w.name, Model: w.model, Endpoint: w.added.GetEndpoint(), Labels: w.added.GetLabels(), Rank: r.number, BlockSize: w.blockSize,
					Reasons: r.all, TierReasons: r.reasons, GroupsOmitted: r.groupsOmitted, RankIndex: uint32(i),
				})
				m.credit(w, &out[len(out)-1])
			}
		}
		rest = rest[len(longest):]
	}
	return out
}

// usersOf returns the workers of pools, ascending by name.
func usersOf(x *Index, pools []pooled) []*worker {
	of := func(p pooled) []*worker { return x.models[p.pool.model].pools.users[p.Pool] }
	if len(pools) == 1 {
		return of(pools[0])
	}
	var all []*worker
	for _, p := range pools {
		all = append(all, of(p)...)
	}
	slices.SortFunc(all, compareNames)
	return slices.Compact(all)
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

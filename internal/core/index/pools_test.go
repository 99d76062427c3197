package index_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// pooledRank is a dp rank of a worker or a pool, and the contents from the start of a prompt that it holds.
type pooledRank struct {
	worker, model string
	rank          uint32
	size          int
	pool          bool
	pools         []string
	held          map[string]bool
}

// prefix returns how many blocks of a prompt the rank holds.
func (r *pooledRank) prefix(tokens []uint32) (blocks int) {
	for ; (blocks+1)*r.size <= len(tokens) && r.held[fmt.Sprint(tokens[:(blocks+1)*r.size])]; blocks++ {
	}
	return blocks
}

// pooledMatch is a match with what its pools hold, as text.
type pooledMatch struct {
	Worker string
	Rank   uint32
	Blocks int
	Pools  string
	best   int // tokens in a pool
}

// poolWorld is an index beside the ranks that it should have.
type poolWorld struct {
	index *index.Index
	ranks []*pooledRank
	names map[string]uint64 // of blocks, by content
	seq   uint64
}

func (w *poolWorld) apply(r *pooledRank, kind any) {
	w.seq++
	w.index.ApplyEntry(&kvcastv1.Entry{Seq: w.seq, Worker: r.worker, Model: r.model, Events: []*kvcastv1.RouterEvent{event(r.rank, kind)}})
}

// add adds a worker with some ranks, in place of one of the same name.
func (w *poolWorld) add(t *rapid.T, name string) {
	w.remove(name)
	r := pooledRank{
		worker: name, model: rapid.SampledFrom([]string{"m", "m", "n"}).Draw(t, "model"), size: rapid.IntRange(1, 2).Draw(t, "size"),
		pool: rapid.Bool().Draw(t, "pool"),
	}
	if r.pool {
		r.size *= 2
	} else {
		r.pools = rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 3, rapid.ID).Draw(t, "pools")
	}
	ranks := rapid.SampledFrom([][]uint32{{0}, {0, 3}}).Draw(t, "ranks")
	w.apply(&r, &kvcastv1.WorkerAdded{Model: r.model, BlockSize: uint32(r.size), Ranks: ranks, Pool: r.pool, Pools: r.pools})
	for _, number := range ranks {
		one := r
		one.rank, one.held = number, make(map[string]bool)
		w.ranks = append(w.ranks, &one)
	}
}

func (w *poolWorld) remove(name string) {
	isIt := func(r *pooledRank) bool { return r.worker == name }
	if i := slices.IndexFunc(w.ranks, isIt); i >= 0 {
		w.apply(w.ranks[i], &kvcastv1.WorkerRemoved{})
		w.ranks = slices.DeleteFunc(w.ranks, isIt)
	}
}

func (w *poolWorld) hash(content string) uint64 {
	if _, ok := w.names[content]; !ok {
		w.names[content] = uint64(len(w.names) + 1)
	}
	return w.names[content]
}

// store stores the first blocks of a prompt.
func (w *poolWorld) store(r *pooledRank, tokens []uint32) {
	hashes := kvblock.AppendTokensHashes(nil, tokens, r.size, kvblock.Seed("", ""), false, nil)
	if len(hashes) == 0 {
		return
	}
	stored := &kvcastv1.Stored{BlockSize: uint32(r.size), TokensHashes: hashes}
	for end := r.size; end <= len(tokens); end += r.size {
		content := fmt.Sprint(tokens[:end])
		r.held[content] = true
		stored.BlockHashes = append(stored.BlockHashes, w.hash(content))
	}
	w.apply(r, stored)
}

// want returns the matches of a prompt.
func (w *poolWorld) want(model string, tokens []uint32, workers []string, limit int) (all []pooledMatch) {
	for _, r := range w.ranks {
		if r.pool || model != "" && r.model != model || workers != nil && !slices.Contains(workers, r.worker) {
			continue
		}
		m := pooledMatch{Worker: r.worker, Rank: r.rank, Blocks: r.prefix(tokens)}
		best := make(map[string]int)
		for _, p := range w.ranks {
			if n := p.prefix(tokens) * p.size; n > best[p.worker] && p.pool && p.model == r.model && slices.Contains(r.pools, p.worker) {
				best[p.worker] = n
			}
		}
		var pools []string
		for name, n := range best {
			pools = append(pools, fmt.Sprintf("%03d %s", 999-n, name))
			m.best = max(m.best, n)
		}
		slices.Sort(pools)
		if m.Pools = strings.Join(pools, ","); m.Blocks > 0 || m.best > 0 {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b pooledMatch) int {
		return cmp.Or(b.Blocks-a.Blocks, onlyPools(a, b), strings.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
	})
	if limit > 0 {
		all = all[:min(limit, len(all))]
	}
	return all
}

// onlyPools orders matches of which only pools hold something.
func onlyPools(a, b pooledMatch) int {
	if a.Blocks+b.Blocks > 0 {
		return 0
	}
	return b.best - a.best
}

// TestPoolsAreCreditedToTheirWorkers adds workers, pools and blocks at random, and compares the matches with what follows from the definition.
func TestPoolsAreCreditedToTheirWorkers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &poolWorld{index: index.New(), names: make(map[string]uint64)}
		tokens := rapid.SliceOfN(rapid.Uint32Range(1, 2), 1, 8)
		names := rapid.SampledFrom([]string{"a", "b", "c", "d", "e"})
		for range 3 {
			w.add(t, names.Draw(t, "worker"))
		}
		var found index.Matches
		for range 60 {
			switch n := rapid.IntRange(0, 9).Draw(t, "step"); {
			case n < 2 || len(w.ranks) == 0:
				w.add(t, names.Draw(t, "worker"))
			case n == 2:
				w.remove(names.Draw(t, "worker"))
			case n == 3:
				r := rapid.SampledFrom(w.ranks).Draw(t, "rank")
				if prompt := tokens.Draw(t, "removed"); len(prompt) >= r.size {
					content := fmt.Sprint(prompt[:len(prompt)/r.size*r.size])
					delete(r.held, content)
					w.apply(r, &kvcastv1.Removed{BlockHashes: []uint64{w.hash(content)}})
				}
			default:
				w.store(rapid.SampledFrom(w.ranks).Draw(t, "rank"), tokens.Draw(t, "stored"))
			}
			w.check(t, &found, tokens)
		}
	})
}

// check compares the matches of two prompts.
func (w *poolWorld) check(t *rapid.T, found *index.Matches, tokens *rapid.Generator[[]uint32]) {
	q := index.Query{
		Model: rapid.SampledFrom([]string{"", "m"}).Draw(t, "model"), Limit: rapid.SampledFrom([]int{0, 1, 3, 100}).Draw(t, "limit"), Pools: true,
	}
	var workers []string
	if rapid.IntRange(0, 3).Draw(t, "some workers") == 0 {
		workers = []string{"a", "c", "e"}
		q.Worker = func(name string) bool { return slices.Contains(workers, name) }
	}
	for range 2 {
		q.Prompts = append(q.Prompts, index.Prompt{TokenIDs: tokens.Draw(t, "prompt")})
	}
	w.index.Match(&q, found)
	for i, p := range q.Prompts {
		var got []pooledMatch
		for j := range found.Prompts[i] {
			m := &found.Prompts[i][j]
			var pools []string
			for _, pool := range found.Pools(m) {
				pools = append(pools, fmt.Sprintf("%03d %s", 999-pool.Tokens, pool.Pool))
			}
			got = append(got, pooledMatch{Worker: m.Worker, Rank: m.Rank, Blocks: m.Blocks, Pools: strings.Join(pools, ",")})
		}
		want := w.want(q.Model, p.TokenIDs, workers, q.Limit)
		if d := gocmp.Diff(want, got, cmpopts.IgnoreUnexported(pooledMatch{})); d != "" {
			t.Fatalf("matches of %v (-want +got):\n%s", p.TokenIDs, d)
		}
	}
}

// TestPoolAmongManyRanks has a prompt that many ranks and a pool hold, which are then matched as a group, and a pool of two ranks.
func TestPoolAmongManyRanks(t *testing.T) {
	w := &poolWorld{index: index.New(), names: make(map[string]uint64)}
	add := func(name string, added *kvcastv1.WorkerAdded, held map[uint32]int) {
		added.Model, added.BlockSize = "m", 2
		w.apply(&pooledRank{worker: name, model: "m"}, added)
		for rank, tokens := range held {
			w.store(&pooledRank{worker: name, model: "m", rank: rank, size: 2, held: make(map[string]bool)}, []uint32{1, 2, 3, 4, 5, 6}[:tokens])
		}
	}
	for i := range 100 {
		add(fmt.Sprintf("w%02d", i), &kvcastv1.WorkerAdded{Pools: []string{"one", "two", "none"}}, map[uint32]int{0: 4})
	}
	add("one", &kvcastv1.WorkerAdded{Pool: true}, map[uint32]int{0: 4})
	add("two", &kvcastv1.WorkerAdded{Pool: true, Ranks: []uint32{0, 1, 2}}, map[uint32]int{0: 2, 1: 6, 2: 4})
	match := func() (all []string) {
		var found index.Matches
		w.index.Match(&index.Query{Model: "m", Limit: 2, Pools: true, Prompts: []index.Prompt{{TokenIDs: []uint32{1, 2, 3, 4, 5, 6}}}}, &found)
		for i := range found.Prompts[0] {
			m := &found.Prompts[0][i]
			text := fmt.Sprintf("%s %d", m.Worker, m.Blocks)
			for _, p := range found.Pools(m) {
				text += fmt.Sprintf(" %s.%d %d", p.Pool, p.Rank, p.Tokens)
			}
			all = append(all, text)
		}
		return all
	}
	if d := gocmp.Diff([]string{"w00 2 two.1 6 one.0 4", "w01 2 two.1 6 one.0 4"}, match()); d != "" {
		t.Errorf("matches (-want +got):\n%s", d)
	}
	w.apply(&pooledRank{worker: "one", model: "m"}, &kvcastv1.WorkerRemoved{})
	w.apply(&pooledRank{worker: "two", model: "m"}, &kvcastv1.WorkerAdded{Model: "m", Pools: []string{"two"}})
	if d := gocmp.Diff([]string{"w00 2", "w01 2"}, match()); d != "" {
		t.Errorf("matches without pools (-want +got):\n%s", d)
	}
}

// poolExample has workers w0 to w4 of pool p, which has blocks of 8 tokens: two in a tier with chunks of 16 tokens, of a rank with other attention groups.
func poolExample() (*index.Index, []uint32) {
	w := &poolWorld{index: index.New(), names: make(map[string]uint64)}
	prompt := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25}
	for i := range 5 {
		w.apply(&pooledRank{worker: fmt.Sprint("w", i), model: "m"}, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 4, Ranks: []uint32{0, 1}, Pools: []string{"p"}})
	}
	p := &pooledRank{worker: "p", model: "m", size: 8, held: make(map[string]bool)}
	w.apply(p, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 8, Pool: true})
	w.apply(p, &kvcastv1.GroupsOmitted{})
	w.store(p, prompt[:24])
	w.apply(p, &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_CONNECTOR_TIER, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE}, ChunkTokens: 16})
	return w.index, prompt
}

// TestPoolsHaveWholeChunksAndTheirTrust also has prompts with the block size of the workers, and limits.
func TestPoolsHaveWholeChunksAndTheirTrust(t *testing.T) {
	x, prompt := poolExample()
	for _, size := range []uint32{0, 4} {
		for limit, want := range map[int]int{0: 10, 1: 1, 3: 3, 100: 10} {
			var found index.Matches
			x.Match(&index.Query{Model: "m", Limit: limit, Pools: true, Prompts: []index.Prompt{{TokenIDs: prompt, BlockSize: size}}}, &found)
			if n := len(found.Prompts[0]); n != want {
				t.Fatalf("block size %d, limit %d: got %d matches, want %d", size, limit, n, want)
			}
			for i := range found.Prompts[0] {
				m := &found.Prompts[0][i]
				if worker, rank := fmt.Sprint("w", i/2), uint32(i%2); m.Worker != worker || m.Rank != rank || m.RankIndex != rank || m.Blocks != 0 {
					t.Errorf("match %d is %s, rank %d, with %d blocks; want %s, rank %d, with none", i, m.Worker, m.Rank, m.Blocks, worker, rank)
				}
				p := found.Pools(m)
				if len(p) != 1 || p[0].Tokens != 16 || p[0].Blocks != 2 || p[0].Trust() != kvcastv1.Trust_TRUST_DEGRADED {
					t.Errorf("match %d has the pools %+v, want 2 blocks of p", i, p)
				}
			}
		}
	}
	x.ApplyEntry(&kvcastv1.Entry{Seq: x.Seq() + 1, Worker: "p", Model: "m", Events: []*kvcastv1.RouterEvent{
		event(0, &kvcastv1.Cleared{}), event(0, &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 8, TokensHashes: kvblock.AppendTokensHashes(nil, prompt[:8], 8, kvblock.Seed("", ""), false, nil)}),
	}})
	var found index.Matches
	x.Match(&index.Query{Model: "m", Limit: 1, Pools: true, Prompts: []index.Prompt{{TokenIDs: prompt}}}, &found)
	if p := found.Pools(&found.Prompts[0][0]); len(p) != 1 || p[0].Tokens != 8 || p[0].Trust() != kvcastv1.Trust_TRUST_UPPER_BOUND {
		t.Errorf("a pool with other attention groups has %+v, want an upper bound of 8 tokens", p)
	}
	x.Match(&index.Query{Model: "m", Limit: 1, Prompts: []index.Prompt{{TokenIDs: prompt}}}, &found)
	if len(found.Prompts[0]) != 0 {
		t.Errorf("without pools, there are matches: %+v", found.Prompts[0])
	}
}

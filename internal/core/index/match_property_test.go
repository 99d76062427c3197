package index_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// modelRank has for each content from the start of a prompt, which is a list of tokens hashes, the block hash. A rank
// has one block hash for each content.
type modelRank struct {
	worker, model string
	rank          uint32
	size          uint32
	blocks        map[string]*modelBlock // by content
}

type modelBlock struct {
	hash   uint64
	tiers  uint8
	hashed bool // the content is known
}

// walk returns the prefix of a prompt that can be read tier after tier.
func (r *modelRank) walk(tokensHashes []uint64) (ends [kvblock.NumTiers]int) {
	n := 0
	for tier := range ends {
		for n < len(tokensHashes) {
			if b := r.blocks[pathOf(tokensHashes, n+1)]; b == nil || !b.hashed || b.tiers&(1<<tier) == 0 {
				break
			}
			n++
		}
		ends[tier] = n
	}
	return ends
}

// pathOf returns the content of the first n blocks of a prompt.
func pathOf(tokensHashes []uint64, n int) string { return fmt.Sprint(tokensHashes[:n]) }

// prefix returns the longest prefix of a prompt of which each block is in one of some tiers, and has one of the block
// hashes if those are given.
func (r *modelRank) prefix(tokensHashes, blockHashes []uint64, tiers uint8) int {
	n := 0
	for n < max(len(tokensHashes), len(blockHashes)) {
		var b *modelBlock
		if blockHashes == nil {
			b = r.blocks[pathOf(tokensHashes, n+1)]
		} else {
			for _, candidate := range r.blocks {
				if candidate.hash == blockHashes[n] {
					b = candidate
				}
			}
		}
		if b == nil || b.tiers&tiers == 0 || blockHashes == nil && !b.hashed {
			break
		}
		n++
	}
	return n
}

// world is an index beside the model of its ranks. Workers of the same engine have the same block hashes.
type world struct {
	t     *rapid.T
	index *index.Index
	ranks []*modelRank
	seq   uint64
}

func (w *world) apply(r *modelRank, kind any, tier kvcastv1.Tier) {
	w.seq++
	e := event(r.rank, kind)
	if tier != 0 {
		e.Tier = tier
	}
	w.index.ApplyEntry(&kvcastv1.Entry{Seq: w.seq, Worker: r.worker, Model: r.model, Events: []*kvcastv1.RouterEvent{e}})
}

func newWorld(t *rapid.T) *world {
	w := &world{t: t, index: index.New()}
	for i, name := range []string{"a", "b", "c", "d"} {
		model, size := []string{"m", "n"}[i/3], rapid.Uint32Range(1, 3).Draw(t, "block size")
		ranks := rapid.SampledFrom([][]uint32{{0}, {0, 7}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}}).Draw(t, "ranks")
		w.seq++
		w.index.ApplyEntry(&kvcastv1.Entry{Seq: w.seq, Worker: name, Model: model, Events: []*kvcastv1.RouterEvent{
			event(0, &kvcastv1.WorkerAdded{Model: model, BlockSize: size, Endpoint: name + ":8000", Ranks: ranks}),
		}})
		for _, n := range ranks {
			r := &modelRank{worker: name, model: model, rank: n, size: size, blocks: make(map[string]*modelBlock)}
			w.ranks = append(w.ranks, r)
		}
	}
	return w
}

// prompt is a prompt with its tokens hashes for each block size.
type prompt struct{ index.Prompt }

// conversations have common first tokens.
var conversations = [][]uint32{
	{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2}, {2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1},
}

func drawPrompt(t *rapid.T) prompt {
	p := prompt{index.Prompt{TokenIDs: rapid.SampledFrom(conversations).Draw(t, "conversation")}}
	p.TokenIDs = p.TokenIDs[:rapid.IntRange(0, len(p.TokenIDs)).Draw(t, "tokens")]
	switch rapid.IntRange(0, 15).Draw(t, "kind of content") {
	case 13:
		p.LoRA = "adapter"
	case 14:
		p.Salt = "salt"
	case 15:
		p.Eagle = true
	}
	return p
}

func (p prompt) tokensHashes(size uint32) []uint64 {
	window := int(size)
	if p.Eagle {
		window++
	}
	var all []uint64
	for from := 0; from+window <= len(p.TokenIDs); from += int(size) { // block by block
		block, seed := p.TokenIDs[from:from+window], kvblock.Seed(p.LoRA, p.Salt)
		all = append(all, kvblock.AppendTokensHashes(nil, block, int(size), seed, p.Eagle, nil)...)
	}
	return all
}

// blockHash returns an engine's hash of a content. Engine 0 has the same hashes on all ranks.
func blockHash(path string, engine uint64) uint64 {
	h := engine
	for _, c := range []byte(path) {
		h = kvblock.Digest(h ^ uint64(c))
	}
	return h
}

func (r *modelRank) engine() uint64 { return uint64(r.worker[0]-'a') % 2 }

// change stores, removes or clears blocks of one rank.
func (w *world) change() {
	t := w.t
	r := rapid.SampledFrom(w.ranks).Draw(t, "rank")
	p := drawPrompt(t)
	hashes := p.tokensHashes(r.size)
	tier := kvcastv1.Tier(rapid.SampledFrom([]int32{1, 1, 2, 4}).Draw(t, "tier"))
	bit := uint8(1) << (tier - 1)
	switch rapid.IntRange(0, 19).Draw(t, "change") {
	case 0:
		w.apply(r, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED), 0)
		clear(r.blocks)
	case 1:
		w.apply(r, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED, tier), 0)
		for path, b := range r.blocks {
			if b.tiers &^= bit; b.tiers == 0 {
				delete(r.blocks, path)
			}
		}
	case 2:
		w.apply(r, gap(kvcastv1.Gap_REASON_JOINED_LATE, 1), 0)
	case 3:
		w.apply(r, &kvcastv1.GroupsOmitted{}, 0)
	case 4, 5, 6:
		gone := removed()
		for n := range hashes {
			if path := pathOf(hashes, n+1); rapid.Bool().Draw(t, "removed") {
				gone.BlockHashes = append(gone.BlockHashes, blockHash(path, r.engine()))
				if b := r.blocks[path]; b != nil {
					if b.tiers &^= bit; b.tiers == 0 {
						delete(r.blocks, path)
					}
				}
			}
		}
		w.apply(r, gone, tier)
	case 7, 8, 9, 10, 11:
		w.store(hashes, tier, slices.DeleteFunc(slices.Clone(w.ranks), func(o *modelRank) bool { return o.worker != r.worker })...)
	default:
		w.store(hashes, tier, r)
	}
}

// store stores a part of a prompt, whose parent the ranks, which are of one worker, may not hold.
func (w *world) store(hashes []uint64, tier kvcastv1.Tier, ranks ...*modelRank) {
	if len(hashes) == 0 {
		return
	}
	from, to := 0, len(hashes)
	if rapid.Bool().Draw(w.t, "a part") {
		from = rapid.IntRange(0, len(hashes)-1).Draw(w.t, "first")
		to = rapid.IntRange(from, len(hashes)).Draw(w.t, "end")
	}
	hashed := rapid.IntRange(0, 5).Draw(w.t, "hash only") > 0
	for _, r := range ranks {
		s := &kvcastv1.Stored{BlockSize: r.size}
		if from > 0 {
			s.ParentHash = proto.Uint64(blockHash(pathOf(hashes, from), r.engine()))
		}
		for n := from; n < to; n++ {
			path := pathOf(hashes, n+1)
			s.BlockHashes = append(s.BlockHashes, blockHash(path, r.engine()))
			if hashed {
				s.TokensHashes = append(s.TokensHashes, hashes[n])
			}
			b := r.blocks[path]
			if b == nil {
				b = &modelBlock{hash: blockHash(path, r.engine())}
				r.blocks[path] = b
			}
			if tier == device || b.tiers&1 == 0 { // else a copy of what is known
				b.hashed = b.hashed || hashed
			}
			b.tiers |= 1 << (tier - 1)
		}
		w.apply(r, s, tier)
	}
}

// want returns the matches of a prompt by comparing it with the blocks of each rank.
func (w *world) want(q *index.Query, p prompt) []index.Match {
	var all []index.Match
	for _, r := range w.ranks {
		switch {
		case q.Model != "" && r.model != q.Model, q.Worker != nil && !q.Worker(r.worker), p.BlockSize != 0 && p.BlockSize != r.size:
			continue
		}
		tokens := p.TokensHashes
		if len(p.TokenIDs) > 0 {
			tokens = p.tokensHashes(r.size)
		}
		state, _ := w.index.Worker(r.worker)
		i := slices.IndexFunc(state.Ranks, func(s index.Rank) bool { return s.Rank == r.rank })
		m := index.Match{
			Worker: r.worker, Model: r.model, Endpoint: r.worker + ":8000", Rank: r.rank, BlockSize: r.size,
			Blocks:  r.prefix(tokens, p.BlockHashes, 0xff),
			Reasons: state.Ranks[i].Reasons, TierReasons: state.Ranks[i].TierReasons, GroupsOmitted: state.Ranks[i].GroupsOmitted,
		}
		for tier := range kvblock.NumTiers {
			m.TierBlocks[tier] = r.prefix(tokens, p.BlockHashes, 1<<tier)
		}
		if q.Walk && len(p.BlockHashes) == 0 {
			m.Walk = r.walk(tokens)
		}
		if m.Blocks > 0 {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b index.Match) int {
		return cmp.Or(
			cmp.Compare(b.Blocks, a.Blocks), cmp.Compare(b.TierBlocks[0], a.TierBlocks[0]),
			strings.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank),
		)
	})
	if q.Limit > 0 {
		all = all[:min(len(all), q.Limit)]
	}
	return all
}

// drawQuery draws a query of prompts of all kinds.
func (w *world) drawQuery() (*index.Query, []prompt) {
	t := w.t
	q := &index.Query{
		Model: rapid.SampledFrom([]string{"m", "m", "n", "", "unknown"}).Draw(t, "model"),
		Limit: rapid.SampledFrom([]int{0, 0, 1, 2, 9, 65}).Draw(t, "limit"),
		Walk:  rapid.Bool().Draw(t, "walk"),
	}
	if rapid.IntRange(0, 2).Draw(t, "filter") == 0 {
		wanted := rapid.SampledFrom([]string{"ab", "c", "", "abcd"}).Draw(t, "wanted workers")
		q.Worker = func(name string) bool { return strings.Contains(wanted, name) }
	}
	var prompts []prompt
	for range rapid.IntRange(0, 4).Draw(t, "prompts") {
		p := drawPrompt(t)
		size := rapid.Uint32Range(1, 3).Draw(t, "size of the hashes")
		hashes := p.tokensHashes(size)
		switch rapid.IntRange(0, 4).Draw(t, "kind of prompt") {
		case 0:
			p = prompt{index.Prompt{TokensHashes: hashes}}
		case 1:
			engine := rapid.Uint64Range(0, 1).Draw(t, "engine")
			p = prompt{}
			for n := range hashes {
				p.BlockHashes = append(p.BlockHashes, blockHash(pathOf(hashes, n+1), engine))
			}
		}
		p.BlockSize = rapid.SampledFrom([]uint32{0, 0, 1, 2, 4}).Draw(t, "block size of the prompt")
		q.Prompts, prompts = append(q.Prompts, p.Prompt), append(prompts, p)
	}
	return q, prompts
}

// TestMatchesEqualTheBlocksOfEachRank compares matches with those of the model after random changes. Results reuse the
// memory of earlier ones.
func TestMatchesEqualTheBlocksOfEachRank(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		var m index.Matches
		for range rapid.IntRange(1, 8).Draw(t, "rounds") {
			for range rapid.IntRange(1, 20).Draw(t, "changes") {
				w.change()
			}
			q, prompts := w.drawQuery()
			if seq := w.index.Match(q, &m); seq != w.seq {
				t.Fatalf("seq: got %d, want %d", seq, w.seq)
			}
			if len(m.Prompts) != len(prompts) {
				t.Fatalf("got matches of %d prompts, want %d", len(m.Prompts), len(prompts))
			}
			for i, p := range prompts {
				if diff := gocmp.Diff(w.want(q, p), m.Prompts[i], cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(index.Match{})); diff != "" {
					t.Fatalf("matches of %+v of model %q (-want +got):\n%s", p, q.Model, diff)
				}
			}
			w.compareCopies(q)
		}
	})
}

// compareCopies checks that the same matches follow from snapshots.
func (w *world) compareCopies(q *index.Query) {
	copied := index.New()
	for name := range map[string]bool{"a": true, "b": true, "c": true, "d": true} {
		copyWorker(w.t, w.index, copied, name, allTiers)
	}
	var want, got index.Matches
	w.index.Match(q, &want)
	copied.Match(q, &got)
	if diff := gocmp.Diff(want.Prompts, got.Prompts, cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(index.Match{})); diff != "" {
		w.t.Fatalf("matches after snapshots (-want +got):\n%s", diff)
	}
}

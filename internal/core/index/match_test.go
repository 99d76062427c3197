package index_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// matchOne returns the matches of a prompt of one worker as "worker/rank blocks [tiers] trust".
func matchOne(x *index.Index, p index.Prompt) (all []string) {
	var m index.Matches
	x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{p}}, &m)
	for _, match := range m.Prompts[0] {
		all = append(all, fmt.Sprintf("%s/%d %d %v %v", match.Worker, match.Rank, match.Blocks, match.TierBlocks, match.Trust()))
	}
	return all
}

// TestPrefixesEndAtTheFirstMissingBlock has a chain of blocks in two tiers.
func TestPrefixesEndAtTheFirstMissingBlock(t *testing.T) {
	t.Parallel()
	x := index.New()
	x.ApplyEntry(entryOf(1, event(0, stored(1, 2, 3, 4, 5)), inTier(disk, event(0, stored(1, 2, 3)))))
	hashes := index.Prompt{TokensHashes: []uint64{1001, 1002, 1003, 1004, 1005, 1006}}
	for i, step := range []struct {
		event *kvcastv1.RouterEvent
		want  []string
	}{
		{event(0, removed()), []string{"w/0 5 [5 0 3 0] TRUST_EXACT"}},
		{event(0, removed(2)), []string{"w/0 5 [1 0 3 0] TRUST_EXACT"}},
		{inTier(disk, event(0, removed(2))), []string{"w/0 1 [1 0 1 0] TRUST_EXACT"}},
		{event(0, gap(kvcastv1.Gap_REASON_JOINED_LATE, 0)), []string{"w/0 1 [1 0 1 0] TRUST_DEGRADED"}},
		{event(0, &kvcastv1.Stored{ParentHash: proto.Uint64(1), BlockHashes: []uint64{2}}), []string{"w/0 1 [1 0 1 0] TRUST_DEGRADED"}},
		{event(0, stored(1, 2)), []string{"w/0 5 [5 0 1 0] TRUST_DEGRADED"}},
		{event(0, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED, device)), []string{"w/0 1 [0 0 1 0] TRUST_DEGRADED"}},
		{event(0, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED)), nil},
		{event(0, &kvcastv1.GroupsOmitted{}), nil},
		{event(0, stored(1)), []string{"w/0 1 [1 0 0 0] TRUST_UPPER_BOUND"}},
		{event(0, &kvcastv1.WorkerRemoved{}), nil},
	} {
		x.ApplyEntry(entryOf(uint64(i+2), step.event))
		if diff := cmp.Diff(step.want, matchOne(x, hashes)); diff != "" {
			t.Errorf("matches after %v (-want +got):\n%s", step.event, diff)
		}
	}
}

// storedTokens returns a chain with contents, and without block hashes.
func storedTokens(tokens []uint32, blockSize uint32) *kvcastv1.Stored {
	hashes := kvblock.AppendTokensHashes(nil, tokens, int(blockSize), kvblock.Seed("", ""), false, nil)
	return &kvcastv1.Stored{BlockSize: blockSize, TokensHashes: hashes}
}

// TestPromptsShorterThanABlockMatchNothing covers prompts without a whole block.
func TestPromptsShorterThanABlockMatchNothing(t *testing.T) {
	t.Parallel()
	x := index.New()
	tokens := []uint32{1, 2, 3, 4}
	s := storedTokens(tokens, 2)
	s.BlockHashes = []uint64{1, 2}
	x.ApplyEntry(entryOf(1, event(0, s)))
	one, two := []string{"w/0 1 [1 0 0 0] TRUST_EXACT"}, []string{"w/0 2 [2 0 0 0] TRUST_EXACT"}
	for n, want := range [][]string{nil, nil, one, one, two} {
		for _, size := range []uint32{0, 2} {
			if diff := cmp.Diff(want, matchOne(x, index.Prompt{TokenIDs: tokens[:n], BlockSize: size})); diff != "" {
				t.Errorf("matches of %d tokens, block size %d (-want +got):\n%s", n, size, diff)
			}
		}
	}
	if got := matchOne(x, index.Prompt{}); got != nil {
		t.Errorf("an empty prompt matches %v", got)
	}
}

// TestWorkersAreMatchedWithTheirNewestBlockSize changes the block size of a worker, which replaces that of the model.
func TestWorkersAreMatchedWithTheirNewestBlockSize(t *testing.T) {
	t.Parallel()
	x := index.New()
	tokens := []uint32{1, 2, 3, 4, 5, 6}
	for i, size := range []uint32{2, 3, 1} {
		s := storedTokens(tokens, size)
		for n := range s.TokensHashes {
			s.BlockHashes = append(s.BlockHashes, uint64(100*i+n))
		}
		x.ApplyEntry(entryOf(uint64(i+1), event(0, cleared(kvcastv1.Cleared_REASON_ENGINE_RESTARTED)), event(0, s)))
		n := len(s.BlockHashes)
		want := []string{fmt.Sprintf("w/0 %d [%d 0 0 0] TRUST_EXACT", n, n)}
		if diff := cmp.Diff(want, matchOne(x, index.Prompt{TokenIDs: tokens})); diff != "" {
			t.Errorf("matches of block size %d (-want +got):\n%s", size, diff)
		}
		if got := matchOne(x, index.Prompt{TokenIDs: tokens, BlockSize: 6}); got != nil {
			t.Errorf("a worker of another block size matches: %v", got)
		}
	}
}

// TestModelsAreForgottenWithTheirWorkers adds and removes workers of several models and block sizes.
func TestModelsAreForgottenWithTheirWorkers(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		x, workers := index.New(), make(map[string]*kvcastv1.WorkerAdded)
		for seq := range uint64(rapid.IntRange(0, 30).Draw(t, "entries")) {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "worker")
			e := event(0, &kvcastv1.WorkerRemoved{})
			switch w := workers[name]; {
			case rapid.Bool().Draw(t, "add"):
				workers[name] = &kvcastv1.WorkerAdded{
					Model:     rapid.SampledFrom([]string{"", "m", "n"}).Draw(t, "model"),
					BlockSize: rapid.Uint32Range(0, 2).Draw(t, "block size"),
				}
				e = event(0, proto.CloneOf(workers[name]))
			case w != nil && rapid.Bool().Draw(t, "store"):
				w.BlockSize = rapid.Uint32Range(1, 2).Draw(t, "new block size")
				e = event(0, &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: w.BlockSize})
			default:
				delete(workers, name)
			}
			x.ApplyEntry(&kvcastv1.Entry{Seq: seq + 1, Worker: name, Events: []*kvcastv1.RouterEvent{e}})
			sizes := make(map[string]map[uint32]bool)
			for _, w := range workers {
				if sizes[w.GetModel()] == nil {
					sizes[w.GetModel()] = make(map[uint32]bool)
				}
				if w.GetBlockSize() != 0 {
					sizes[w.GetModel()][w.GetBlockSize()] = true
				}
			}
			if n, _ := x.Len(); n != len(workers) || x.Models() != len(sizes) {
				t.Fatalf("got %d workers of %d models, want %v", n, x.Models(), workers)
			}
			for _, model := range []string{"m", "n"} {
				want := slices.Sorted(maps.Keys(sizes[model]))
				if got := x.BlockSizes(model); !slices.Equal(got, want) {
					t.Fatalf("block sizes of model %s: got %v, want %v", model, got, want)
				}
			}
		}
	})
}

// TestMatchesReuseMemory covers repeated queries of the same size.
func TestMatchesReuseMemory(t *testing.T) {
	testclass.WithoutRace(t)
	x := filled(4096)
	q := &index.Query{Prompts: []index.Prompt{
		{TokensHashes: []uint64{1}}, {TokenIDs: make([]uint32, 64)}, {BlockHashes: []uint64{0}},
	}}
	var m index.Matches
	if allocs := testing.AllocsPerRun(100, func() { x.Match(q, &m) }); allocs != 0 {
		t.Errorf("got %v allocations, want none", allocs)
	}
	if len(m.Prompts[0]) != 1 || len(m.Prompts[1]) != 0 || len(m.Prompts[2]) != 1 {
		t.Errorf("got matches %v", m.Prompts)
	}
}

// TestBestOfAllModelsAreFound has groups of ranks of two models, of which those of one hold more.
func TestBestOfAllModelsAreFound(t *testing.T) {
	x, seq := index.New(), uint64(0)
	store := func(model string, rank uint32, hashes ...uint64) {
		seq++
		x.ApplyEntry(&kvcastv1.Entry{Seq: seq, Worker: "w" + model, Model: model, Events: []*kvcastv1.RouterEvent{
			event(rank, &kvcastv1.Stored{BlockSize: 1, BlockHashes: hashes, TokensHashes: hashes}),
		}})
	}
	store("n", 99, 1, 2, 100) // so that the blocks 3 and 4 are in another run
	for rank := range uint32(16) {
		store("n", rank, []uint64{1, 2, 3, 4}[:2+rank/8*2]...)
		store("m", rank, 1, 2, 3, 4, 5, 6)
	}
	var m index.Matches
	for range 50 { // models have no order
		x.Match(&index.Query{Limit: 1, Prompts: []index.Prompt{{TokensHashes: []uint64{1, 2, 3, 4, 5, 6}}}}, &m)
		if best := m.Prompts[0][0]; best.Model != "m" || best.Blocks != 6 {
			t.Fatalf("got %d blocks of model %s, want 6 of m", best.Blocks, best.Model)
		}
	}
}

// TestEqualMatchesAreInOrder adds, clears and removes workers in random order, whose blocks are the same. Clears of so many blocks give the
// ranks other numbers.
func TestEqualMatchesAreInOrder(t *testing.T) {
	testclass.WithoutRace(t)
	blocks := make([]uint64, 100)
	for i := range blocks {
		blocks[i] = uint64(i + 1)
	}
	prompt := index.Prompt{TokensHashes: stored(blocks...).TokensHashes}
	rapid.Check(t, func(t *rapid.T) {
		x, want := index.New(), make(map[string]bool)
		for seq := range rapid.Uint64Range(1, 60).Draw(t, "steps") {
			name := fmt.Sprint(rapid.IntRange(0, 20).Draw(t, "worker"))
			rank := rapid.Uint32Range(0, 1).Draw(t, "rank")
			match := fmt.Sprintf("%s/%d", name, rank)
			var ev *kvcastv1.RouterEvent
			switch rapid.IntRange(0, 5).Draw(t, "event") {
			case 0:
				ev = event(rank, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED))
				delete(want, match)
			case 1:
				ev = event(rank, &kvcastv1.WorkerRemoved{})
				delete(want, name+"/0")
				delete(want, name+"/1")
			default:
				ev = event(rank, stored(blocks...))
				want[match] = true
			}
			x.ApplyEntry(&kvcastv1.Entry{Seq: seq + 1, Worker: name, Model: "m", Events: []*kvcastv1.RouterEvent{ev}})
			limit := rapid.IntRange(0, 30).Draw(t, "limit")
			var m index.Matches
			x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{prompt}, Limit: limit}, &m)
			var got []string
			for _, match := range m.Prompts[0] {
				got = append(got, fmt.Sprintf("%s/%d", match.Worker, match.Rank))
			}
			all := slices.Sorted(maps.Keys(want)) // a slash is before digits
			if limit > 0 {
				all = all[:min(limit, len(all))]
			}
			if diff := cmp.Diff(all, got, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("limit %d (-want +got):\n%s", limit, diff)
			}
		}
	})
}

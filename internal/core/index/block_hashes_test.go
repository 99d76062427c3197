package index_test

import (
	"context"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestBlockHashesOfMatches compares the block hashes of matches with those that each engine gives to the same prompts.
func TestBlockHashesOfMatches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := index.New()
		x.KeepBlockHashes()
		seq := uint64(0)
		apply := func(worker string, events ...*kvcastv1.RouterEvent) {
			seq++
			x.ApplyEntry(&kvcastv1.Entry{Seq: seq, Worker: worker, Model: "m", Events: events})
		}
		names := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"} // enough for ranks that are matched together
		add := func(worker string) {
			apply(worker, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Ranks: []uint32{0}}}})
		}
		for _, worker := range names {
			add(worker)
		}
		hash := func(worker string, prefix []uint64) uint64 { return hashOf(prefix)*31 + uint64(worker[0]) }
		hashes := func(worker string, prompt []uint64) (all []uint64) {
			for i := range prompt {
				all = append(all, hash(worker, prompt[:i+1]))
			}
			return all
		}
		workers, prompts := rapid.SampledFrom(names), rapid.SliceOfN(rapid.Uint64Range(1, 2), 1, 6)
		store := func(worker string, prompt []uint64) {
			apply(worker, event(0, &kvcastv1.Stored{BlockSize: 2, TokensHashes: prompt, BlockHashes: hashes(worker, prompt)}))
		}
		var m index.Matches
		t.Repeat(map[string]func(*rapid.T){
			"store": func(t *rapid.T) { store(workers.Draw(t, "worker"), prompts.Draw(t, "prompt")) },
			"store everywhere": func(t *rapid.T) {
				prompt := prompts.Draw(t, "prompt")
				for _, worker := range names {
					store(worker, prompt)
				}
			},
			"remove": func(t *rapid.T) {
				worker := workers.Draw(t, "worker")
				apply(worker, event(0, removed(0, hash(worker, prompts.Draw(t, "prompt")))))
			},
			"restore": func(t *rapid.T) {
				restored := index.New()
				restored.KeepBlockHashes()
				for _, worker := range names {
					state, _, ok := x.Checkpoint(context.Background(), worker)
					if !ok {
						t.Fatalf("no checkpoint of %s", worker)
					}
					if err := restored.Restore(state); err != nil {
						t.Fatal(err)
					}
				}
				x = restored
			},
			"add again": func(t *rapid.T) { add(workers.Draw(t, "worker")) },
			"": func(t *rapid.T) {
				prompt := prompts.Draw(t, "matched")
				other := prompts.Draw(t, "another")
				most := rapid.IntRange(0, 7).Draw(t, "most")
				q := &index.Query{
					Model: "m", Limit: rapid.IntRange(0, 3).Draw(t, "limit"), BlockHashes: most,
					Prompts: []index.Prompt{{TokensHashes: prompt}, {BlockHashes: hashes("a", prompt)}, {TokensHashes: other}},
				}
				x.Match(q, &m)
				for i, prompt := range [][]uint64{prompt, prompt, other} {
					for _, found := range m.Prompts[i] {
						want := hashes(found.Worker, prompt)[:min(most, found.Blocks)]
						if !slices.Equal(m.BlockHashes(&found), want) {
							t.Fatalf("prompt %d: block hashes of %d blocks of %s are %v, want %v", i, found.Blocks, found.Worker, m.BlockHashes(&found), want)
						}
					}
				}
			},
		})
	})
}

// TestBlockHashesOfAllMatchesAreBounded has a query whose matches have more blocks in all than MaxBlockHashes.
func TestBlockHashesOfAllMatchesAreBounded(t *testing.T) {
	x := index.New()
	x.KeepBlockHashes()
	x.Reset() // keeps the setting
	const blocks = 3000
	var s kvcastv1.Stored
	for n := range uint64(blocks) {
		s.BlockHashes, s.TokensHashes = append(s.BlockHashes, n+1), append(s.TokensHashes, n+1)
	}
	x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{event(0, &s)}})
	var m index.Matches
	x.Match(&index.Query{Prompts: slices.Repeat([]index.Prompt{{TokensHashes: s.TokensHashes}}, 40), BlockHashes: 1 << 20}, &m)
	for i, found := range m.Prompts {
		want := min(blocks, max(0, index.MaxBlockHashes-i*blocks))
		if len(found) != 1 || !slices.Equal(m.BlockHashes(&found[0]), s.BlockHashes[:want]) {
			t.Errorf("prompt %d: %d matches, of which the first has %d block hashes, want %d", i, len(found), len(m.BlockHashes(&found[0])), want)
		}
	}
}

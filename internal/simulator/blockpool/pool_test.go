package blockpool_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/blockpool/pooltest"
	"github.com/kvcast/kvcast/internal/wire"
)

// stored returns the last event, which must be a store.
func stored(t rapid.TB, events []wire.Event) wire.Event {
	t.Helper()
	if len(events) == 0 || events[len(events)-1].Kind != wire.KindStored {
		t.Fatalf("got %+v, want a store at the end", events)
	}
	return events[len(events)-1]
}

func newPool(t rapid.TB, cfg blockpool.Config) *blockpool.Pool {
	t.Helper()
	p, err := blockpool.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPoolReusesPrefixes(t *testing.T) {
	p := newPool(t, blockpool.Config{Capacity: 8, BlockSize: 2})
	events, _ := p.Request([]uint32{1, 2, 3, 4, 5})
	first := stored(t, events)
	if len(events) != 1 || first.HasParent || len(first.BlockHashes) != 2 {
		t.Fatalf("first prompt: got %+v, want a root store of two blocks", events)
	}
	if diff := cmp.Diff([]uint32{1, 2, 3, 4}, first.Tokens); diff != "" {
		t.Errorf("tokens (-want +got):\n%s", diff)
	}
	events, _ = p.Request([]uint32{1, 2, 3, 4, 5, 6, 7})
	if next := stored(t, events); len(next.BlockHashes) != 1 || next.Parent != first.BlockHashes[1] || !next.HasParent {
		t.Errorf("longer prompt: got %+v, want one block after %x", next, first.BlockHashes[1])
	}
	if events, ok := p.Request([]uint32{1, 2, 3, 4, 5}); len(events) != 0 || !ok {
		t.Errorf("the first prompt again: got %+v, %t, want no events", events, ok)
	}
}

func TestPoolComputesTheLastBlockOfAWholePromptAgain(t *testing.T) {
	p := newPool(t, blockpool.Config{Capacity: 8, BlockSize: 2})
	prompt := []uint32{1, 2, 3, 4}
	events, _ := p.Request(prompt)
	first := stored(t, events)
	events, _ = p.Request(prompt)
	again := stored(t, events)
	if diff := cmp.Diff(first.BlockHashes[1:], again.BlockHashes); diff != "" {
		t.Errorf("stored again (-want +got):\n%s", diff)
	}
	if p.Len() != 2 || p.Copies() != 3 {
		t.Errorf("%d hashes in %d blocks, want 2 in 3", p.Len(), p.Copies())
	}
}

func TestPoolEvictsTheLeastRecentlyUsedFromItsEnd(t *testing.T) {
	p := newPool(t, blockpool.Config{Capacity: 4, BlockSize: 1})
	events, _ := p.Request([]uint32{1, 2})
	old := stored(t, events).BlockHashes
	if _, ok := p.Request([]uint32{3, 4}); !ok {
		t.Fatal("no room in an empty pool")
	}
	events, _ = p.Request([]uint32{5})
	if len(events) != 2 || events[0].BlockHashes[0] != old[1] {
		t.Errorf("got %+v, want %x removed first", events, old[1])
	}
}

func TestPoolKeepsBlocksOfRunningRequests(t *testing.T) {
	p := newPool(t, blockpool.Config{Capacity: 4, BlockSize: 1})
	r, _, _ := p.Start([]uint32{1, 2, 3})
	if events, ok := p.Request([]uint32{7, 8}); ok || events != nil {
		t.Errorf("two blocks beside three of four: got %v, %t", events, ok)
	}
	if _, ok := p.Request([]uint32{1, 2, 7}); !ok {
		t.Error("a prompt that shares all blocks except one was rejected")
	}
	if _, ok := r.Extend(4, 5); ok {
		t.Error("Extend beyond the capacity: got true")
	}
	if events, ok := r.Extend(4); !ok || events[0].Kind != wire.KindRemoved {
		t.Errorf("extended by the last block: got %+v, %t, want a remove first", events, ok)
	}
	if _, ok := p.Reset(); ok {
		t.Error("Reset while a request runs: got true")
	}
	r.Finish()
	if events, ok := p.Reset(); !ok || events[0].Kind != wire.KindCleared || p.Len() != 0 || p.Digest() != 0 {
		t.Errorf("reset: got %+v, %t, and %d hashes", events, ok, p.Len())
	}
}

func TestPoolsWithOtherSeedsUseOtherHashes(t *testing.T) {
	a := newPool(t, blockpool.Config{HashSeed: 1})
	b := newPool(t, blockpool.Config{HashSeed: 2})
	prompt := make([]uint32, 40)
	a.Request(prompt)
	b.Request(prompt)
	for h := range a.Blocks() {
		if _, ok := b.Blocks()[h]; ok {
			t.Errorf("two pools have the block hash %x", h)
		}
	}
}

func TestHashesAreThoseOfThePool(t *testing.T) {
	cfg := blockpool.Config{HashSeed: 3, BlockSize: 4}
	p := newPool(t, cfg)
	prompt := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}
	r, _, _ := p.Start(prompt)
	if diff := cmp.Diff(r.Hashes(), cfg.Hashes(prompt)); diff != "" || len(r.Hashes()) != 2 {
		t.Errorf("(-pool +config):\n%s", diff)
	}
	if got := cfg.Hashes(prompt[:3]); len(got) != 0 {
		t.Errorf("a part of a block: got %x", got)
	}
}

func TestReplicaEqualsThePool(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 24).Draw(t, "capacity")
		cfg := blockpool.Config{
			Capacity: capacity, BlockSize: rapid.IntRange(1, 3).Draw(t, "block_size"), VLLMHashes: rapid.Bool().Draw(t, "vLLM's hashes"),
		}
		for range rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "further groups") {
			cfg.Groups = append(cfg.Groups, blockpool.Group{Window: rapid.SampledFrom([]int{0, 2, 3, 4, 6}).Draw(t, "window")})
		}
		p := newPool(t, cfg)
		f := pooltest.NewReplica()
		// Few token ids, so that prompts share prefixes.
		tokens := rapid.SliceOfN(rapid.Uint32Range(0, 1), 0, 20)
		var running []*blockpool.Request
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				prompt := tokens.Draw(t, "prompt")
				want, before := reusable(cfg, f, prompt), p.Stats().HitTokens
				events, ok := p.Request(prompt)
				if got := p.Stats().HitTokens - before; ok && got != uint64(want*cfg.BlockSize) {
					t.Fatalf("%v: reused %d tokens, want %d blocks of %d", prompt, got, want, cfg.BlockSize)
				}
				f.Apply(t, events)
			},
			"start": func(t *rapid.T) {
				r, events, ok := p.Start(tokens.Draw(t, "prompt"))
				if ok {
					running = append(running, r)
				}
				f.Apply(t, events)
			},
			"extend": func(t *rapid.T) {
				if len(running) == 0 {
					t.Skip("nothing runs")
				}
				events, _ := rapid.SampledFrom(running).Draw(t, "request").Extend(tokens.Draw(t, "tokens")...)
				f.Apply(t, events)
			},
			"finish": func(t *rapid.T) {
				if len(running) == 0 {
					t.Skip("nothing runs")
				}
				i := rapid.IntRange(0, len(running)-1).Draw(t, "request")
				running[i].Finish()
				running = slices.Delete(running, i, i+1)
			},
			"reset": func(t *rapid.T) {
				events, ok := p.Reset()
				if ok == (len(running) > 0 && anyHolds(running)) {
					t.Fatalf("reset = %t with %d requests running", ok, len(running))
				}
				f.Apply(t, events)
			},
			"": func(t *rapid.T) {
				f.Check(t, p)
				if p.Copies() > capacity {
					t.Fatalf("%d blocks in a pool of %d", p.Copies(), capacity)
				}
				for _, r := range running {
					for _, h := range r.Hashes() {
						if f.Copies(0, h) == 0 {
							t.Fatalf("%x was evicted during its request", h)
						}
					}
				}
			},
		})
	})
}

// reusable returns the number of blocks that an engine reuses of a prompt: the most of which the main group has all, each window all that the
// token after them attends to, and each group of states the one at their end. The last token is computed.
func reusable(cfg blockpool.Config, f *pooltest.Replica, prompt []uint32) (most int) {
	hashes := cfg.Hashes(prompt)
	for n := 1; n <= len(hashes) && n*cfg.BlockSize < len(prompt); n++ {
		served := true
		for i, h := range hashes[:n] {
			served = served && f.Copies(0, h) > 0
			end := (i + 1) * cfg.BlockSize // of the block, in tokens
			for g, group := range cfg.Groups {
				isNeeded := i == n-1
				if group.Window > 0 {
					isNeeded = end > n*cfg.BlockSize-(group.Window-1)
				}
				served = served && (!isNeeded || f.Copies(1+g, h) > 0)
			}
		}
		if served {
			most = n
		}
	}
	return most
}

func anyHolds(running []*blockpool.Request) bool {
	return slices.ContainsFunc(running, func(r *blockpool.Request) bool { return len(r.Hashes()) > 0 })
}

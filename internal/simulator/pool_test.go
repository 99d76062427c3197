package simulator_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/checker"
)

// follower is whoever reads a pool's events: it counts copies of each hash.
type follower struct {
	counts map[uint64]int
	parent map[uint64]uint64 // of each hash ever stored; none for a first block
}

func newFollower() *follower {
	return &follower{counts: make(map[uint64]int), parent: make(map[uint64]uint64)}
}

// apply applies the events of a step, and fails where the pool's order is broken.
func (f *follower) apply(t rapid.TB, events []wire.Event) {
	t.Helper()
	for _, ev := range events {
		switch ev.Kind {
		case wire.KindCleared:
			clear(f.counts)
		case wire.KindRemoved:
			if len(ev.BlockHashes) != 1 {
				t.Fatalf("a remove of %d hashes, want 1", len(ev.BlockHashes))
			}
			h := ev.BlockHashes[0]
			if f.counts[h] == 0 {
				t.Fatalf("remove of %x, which is not held", h)
			}
			if f.counts[h]--; f.counts[h] == 0 {
				delete(f.counts, h)
			}
			for child := range f.counts {
				if f.counts[h] == 0 && f.parent[child] == h {
					t.Fatalf("%x leaves before its child %x", h, child)
				}
			}
		case wire.KindStored:
			f.store(t, ev)
		}
	}
}

func (f *follower) store(t rapid.TB, ev wire.Event) {
	t.Helper()
	if len(ev.Tokens) != len(ev.BlockHashes)*int(ev.BlockSize) {
		t.Fatalf("%d tokens in %d blocks of %d", len(ev.Tokens), len(ev.BlockHashes), ev.BlockSize)
	}
	if ev.HasParent && f.counts[ev.Parent] == 0 {
		t.Fatalf("store after parent %x, which is not held", ev.Parent)
	}
	parent := ev.Parent
	for _, h := range ev.BlockHashes {
		f.counts[h]++
		if parent != 0 {
			f.parent[h] = parent
		}
		parent = h
	}
}

// equal fails unless the follower knows what the pool holds.
func (f *follower) equal(t rapid.TB, p *simulator.Pool) {
	t.Helper()
	set, copies := make(map[uint64]struct{}), 0
	for h, n := range f.counts {
		set[h] = struct{}{}
		copies += n
	}
	if diff := cmp.Diff(p.Blocks(), set); diff != "" {
		t.Fatalf("the events do not give what the pool holds (-pool +events):\n%s", diff)
	}
	if p.Copies() != copies || p.Len() != len(set) {
		t.Fatalf("the pool counts %d blocks and %d hashes, the events %d and %d", p.Copies(), p.Len(), copies, len(set))
	}
	if got, want := p.Digest(), checker.Digest(set); got != want {
		t.Fatalf("Digest() = %x, want %x", got, want)
	}
}

// stored returns the store among events, which has to come last.
func stored(t rapid.TB, events []wire.Event) wire.Event {
	t.Helper()
	if len(events) == 0 || events[len(events)-1].Kind != wire.KindStored {
		t.Fatalf("got %+v, want a store at the end", events)
	}
	return events[len(events)-1]
}

func newPool(t rapid.TB, cfg simulator.PoolConfig) *simulator.Pool {
	t.Helper()
	p, err := simulator.NewPool(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPoolReusesPrefixes(t *testing.T) {
	p := newPool(t, simulator.PoolConfig{Capacity: 8, BlockSize: 2})
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
	p := newPool(t, simulator.PoolConfig{Capacity: 8, BlockSize: 2})
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
	p := newPool(t, simulator.PoolConfig{Capacity: 4, BlockSize: 1})
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

func TestPoolKeepsWhatRunningRequestsUse(t *testing.T) {
	p := newPool(t, simulator.PoolConfig{Capacity: 4, BlockSize: 1})
	r, _, _ := p.Start([]uint32{1, 2, 3})
	if events, ok := p.Request([]uint32{7, 8}); ok || events != nil {
		t.Errorf("two blocks beside three of four: got %v, %t", events, ok)
	}
	if _, ok := p.Request([]uint32{1, 2, 7}); !ok {
		t.Error("a prompt that shares all but one block was refused")
	}
	if _, ok := r.Extend(4, 5); ok {
		t.Error("extended beyond the capacity")
	}
	if events, ok := r.Extend(4); !ok || events[0].Kind != wire.KindRemoved {
		t.Errorf("extended by the last block: got %+v, %t, want a remove first", events, ok)
	}
	if _, ok := p.Reset(); ok {
		t.Error("reset while a request runs")
	}
	r.Finish()
	if events, ok := p.Reset(); !ok || events[0].Kind != wire.KindCleared || p.Len() != 0 || p.Digest() != 0 {
		t.Errorf("reset: got %+v, %t, and %d hashes", events, ok, p.Len())
	}
}

func TestPoolsWithOtherSeedsUseOtherNames(t *testing.T) {
	a := newPool(t, simulator.PoolConfig{HashSeed: 1})
	b := newPool(t, simulator.PoolConfig{HashSeed: 2})
	prompt := make([]uint32, 40)
	a.Request(prompt)
	b.Request(prompt)
	for h := range a.Blocks() {
		if _, ok := b.Blocks()[h]; ok {
			t.Errorf("both name a block %x", h)
		}
	}
}

func TestWhoCountsFollowsThePoolExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 24).Draw(t, "capacity")
		p := newPool(t, simulator.PoolConfig{
			Capacity: capacity, BlockSize: rapid.IntRange(1, 3).Draw(t, "block_size"),
		})
		f := newFollower()
		// Few token ids, so that prompts share prefixes.
		tokens := rapid.SliceOfN(rapid.Uint32Range(0, 1), 0, 20)
		var running []*simulator.Request
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				events, _ := p.Request(tokens.Draw(t, "prompt"))
				f.apply(t, events)
			},
			"start": func(t *rapid.T) {
				r, events, ok := p.Start(tokens.Draw(t, "prompt"))
				if ok {
					running = append(running, r)
				}
				f.apply(t, events)
			},
			"extend": func(t *rapid.T) {
				if len(running) == 0 {
					t.Skip("nothing runs")
				}
				events, _ := rapid.SampledFrom(running).Draw(t, "request").Extend(tokens.Draw(t, "tokens")...)
				f.apply(t, events)
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
				f.apply(t, events)
			},
			"": func(t *rapid.T) {
				f.equal(t, p)
				if p.Copies() > capacity {
					t.Fatalf("%d blocks in a pool of %d", p.Copies(), capacity)
				}
				for _, r := range running {
					for _, h := range r.Hashes() {
						if f.counts[h] == 0 {
							t.Fatalf("%x was evicted from under a request", h)
						}
					}
				}
			},
		})
	})
}

func anyHolds(running []*simulator.Request) bool {
	return slices.ContainsFunc(running, func(r *simulator.Request) bool { return len(r.Hashes()) > 0 })
}

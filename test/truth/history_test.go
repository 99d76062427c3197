package truth

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/wire"
)

// at returns the time of the batch of a number.
func at(batch int) time.Time { return time.UnixMicro(1_000_000_000_000_000 + int64(batch)) }

// newLoad returns a pool and its workload, which resets it at times.
func newLoad(t *testing.T, cfg blockpool.Config) (*blockpool.Pool, *workload.Conversations) {
	t.Helper()
	pool, err := blockpool.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	load, err := workload.NewConversations(workload.Config{ResetEvery: 90}, pool, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return pool, load
}

// TestHistoryEqualsThePool runs a workload with resets and restarts, and compares all states that are remembered with what the
// pool held then.
func TestHistoryEqualsThePool(t *testing.T) {
	cfg := blockpool.Config{Capacity: 64, BlockSize: 2, HashSeed: 7}
	pool, load := newLoad(t, cfg)
	const keep = 100
	h, held := newHistory(cfg, keep), []map[uint64]struct{}{{}}
	rng, partial := rand.New(rand.NewPCG(1, 1)), 0
	for step := 1; step <= 400; step++ {
		if step%150 == 0 {
			load.Restart()
			h.apply(simulator.Change{})
		} else {
			h.apply(simulator.Change{Time: at(step), Events: load.Step()})
		}
		held = append(held, pool.Blocks())
		for range 3 {
			hashes := cfg.Hashes(h.draw(rng))
			s := h.oldest() + state(rng.IntN(int(h.newest-h.oldest())+1))
			want := slices.IndexFunc(hashes, func(hash uint64) bool { _, ok := held[s][hash]; return !ok })
			if want < 0 {
				want = len(hashes)
			} else {
				partial++
			}
			if got := h.prefix(hashes, s); got != want {
				t.Fatalf("after step %d: %d blocks of a prompt of %d in state %d, want %d", step, got, len(hashes), s, want)
			}
		}
		if step%150 == 0 || step < keep {
			continue
		}
		for _, s := range []state{h.newest, h.newest - keep/2} {
			got, ok := h.after(at(int(s)).UnixNano() + 240)
			if ok == (s%150 == 0) || ok && got != s {
				t.Fatalf("after step %d: the batch of state %d began state %d, %v", step, s, got, ok)
			}
		}
	}
	if _, ok := h.after(at(1).UnixNano()); ok || partial < 100 || len(h.blocks) > 64*keep {
		t.Errorf("%d blocks are remembered, %d prompts were evicted in part; the first batch is remembered: %v", len(h.blocks), partial, ok)
	}
}

// TestHistoryOfGroupsEqualsThePool compares what the pool of a hybrid model can reuse of prompts with the newest state.
func TestHistoryOfGroupsEqualsThePool(t *testing.T) {
	for name, groups := range map[string][]blockpool.Group{
		"a window": {{Window: 6}}, "states": {{}}, "a window and states": {{Window: 4}, {}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := blockpool.Config{Capacity: 384, BlockSize: 2, HashSeed: 7, Groups: groups}
			pool, load := newLoad(t, cfg)
			h := newHistory(cfg, 100)
			rng, held, less := rand.New(rand.NewPCG(1, 1)), 0, 0
			for step := 1; step <= 400; step++ {
				h.apply(simulator.Change{Time: at(step), Events: load.Step()})
				for range 3 {
					prompt := h.draw(rng)
					hashes := cfg.Hashes(prompt)
					got, want := h.prefix(hashes, h.newest), pool.Held(prompt)
					if got != want {
						t.Fatalf("after step %d: %d blocks of a prompt of %d, want %d", step, got, len(hashes), want)
					}
					if want > 0 {
						held++
					}
					if want < len(hashes) && h.of(0, hashes[want]).holds(h.newest) { // the main group has more
						less++
					}
				}
			}
			if held < 100 || less < 100 {
				t.Errorf("of 1200 prompts, %d were held in part, and %d in the main group alone", held, less)
			}
		})
	}
}

// stored returns the event of a store of a chain of blocks.
func stored(parent uint64, hashes ...uint64) wire.Event {
	return wire.Event{
		Kind: wire.KindStored, Parent: parent, HasParent: parent != 0, BlockHashes: hashes, BlockSize: 1, Tokens: make([]uint32, len(hashes)),
	}
}

func removed(hashes ...uint64) wire.Event {
	return wire.Event{Kind: wire.KindRemoved, BlockHashes: hashes}
}

// TestPrefixesAreThoseOfTheWindow compares the lengths that a prompt of blocks 1, 2 and 3 had in a window of states.
func TestPrefixesAreThoseOfTheWindow(t *testing.T) {
	h := newHistory(blockpool.Config{}, 100)
	for i, events := range [][]wire.Event{
		1: {stored(0, 1, 2)},
		2: {stored(2, 3)},
		3: {stored(1, 2)}, // a second copy
		4: {removed(3), removed(2)},
		5: {removed(2)},
		6: {stored(1, 2), removed(2)}, // never visible
		7: {{Kind: wire.KindCleared}},
		8: {stored(0, 1)},
	} {
		if i > 0 {
			h.apply(simulator.Change{Time: at(i), Events: events})
		}
	}
	h.apply(simulator.Change{}) // 9
	for _, tt := range []struct {
		window
		want []int
	}{
		{window{0, 0}, []int{0}},
		{window{1, 1}, []int{2}},
		{window{2, 3}, []int{3}},
		{window{4, 4}, []int{2}},
		{window{5, 6}, []int{1}},
		{window{7, 7}, []int{0}},
		{window{8, 8}, []int{1}},
		{window{9, 9}, []int{0}},
		{window{1, 5}, []int{1, 2, 3}},
		{window{3, 5}, []int{1, 2, 3}},
		{window{6, 9}, []int{0, 1}},
	} {
		if diff := cmp.Diff(tt.want, h.prefixes([]uint64{1, 2, 3}, tt.window)); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.window, diff)
		}
	}
	if got := h.prefixes(nil, window{0, 9}); !slices.Equal(got, []int{0}) {
		t.Errorf("no block: got %v", got)
	}
}

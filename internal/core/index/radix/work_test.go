package radix

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestScanHasEachBlockOnce changes a rank between the calls of a scan.
func TestScanHasEachBlockOnce(t *testing.T) {
	testclass.WithoutRace(t)
	const kept = 20_000
	x := New()
	r := x.AddRank("m", nil)
	prompt := newPrompt(0, kept)
	storePrompt(x, r, prompt, kept)
	seen := make(map[uint64]bool)
	var blocks []Block
	for from, calls := uint64(0), 0; calls == 0 || from != 0; calls++ {
		blocks, from = x.Scan(r, from, blocks[:0])
		for _, b := range blocks {
			if seen[b.Hash] {
				t.Fatalf("block %x is scanned twice", b.Hash)
			}
			seen[b.Hash] = true
		}
		// Grow and shrink the rank's table.
		other := newPrompt(1<<40|uint64(calls/16)<<20, 8000)
		if calls/8%2 == 0 {
			storePrompt(x, r, other, 8000)
		} else {
			for i := range other {
				other[i] ^= 1
			}
			x.Remove(r, 0, other)
		}
	}
	for i := range prompt {
		if !seen[prompt[i]^1] {
			t.Fatalf("block %d of %d was not scanned", i, kept)
		}
	}
}

// TestReadsRunAtTheSameTime reads an index in several goroutines, for the race detector.
func TestReadsRunAtTheSameTime(t *testing.T) {
	const length = 400
	x := New()
	ranks := []*Rank{x.AddRank("m", nil), x.AddRank("m", nil)}
	prompt, hashes := newPrompt(0, length), make([]uint64, length)
	for i := range prompt {
		hashes[i] = prompt[i] ^ 1
	}
	for _, r := range ranks {
		storePrompt(x, r, prompt, length)
		x.Store(r, 1, Stored{Parent: unknownHash, HasParent: true, Blocks: []uint64{1}, Tokens: []uint64{2}})
	}
	x.ClearTier(ranks[0], 0)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			var m Matcher
			for range 10 {
				if x.Match("m", prompt, &m); len(m.Found) != 1 || m.Found[0].Blocks != length {
					t.Errorf("found %+v", m.Found)
				}
				if x.MatchHashes("", hashes, nil, &m); len(m.Found) != 1 || m.Found[0].Blocks != length {
					t.Errorf("found %+v by block hashes", m.Found)
				}
				n := 0
				for from, done := uint64(0), false; !done; done = from == 0 {
					var blocks []Block
					blocks, from = x.Scan(ranks[1], from, nil)
					n += len(blocks)
				}
				if _, ok := x.Find(ranks[1], hashes[7]); n != length+1 || !ok {
					t.Errorf("scanned %d blocks, found one: %t", n, ok)
				}
			}
		})
	}
	group.Wait()
}

// TestTooManyAttributesAreDropped stores blocks of more LoRA adapters than a tag can number.
func TestTooManyAttributesAreDropped(t *testing.T) {
	x := New()
	x.tree.limits.attributes = 2
	r := x.AddRank("m", nil)
	x.Store(r, 0, Stored{Blocks: []uint64{1}, LoRA: "a", BlockSize: 16})
	x.Store(r, 0, Stored{Blocks: []uint64{2}, LoRA: "b", BlockSize: 16})
	for hash, want := range map[uint64]Block{
		1: {Hash: 1, Tiers: 1, LoRA: "a", BlockSize: 16},
		2: {Hash: 2, Tiers: 1},
	} {
		if got, _ := x.Find(r, hash); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	x.Remove(r, 0, []uint64{1, 2})
	if err := checkInvariants(x); err != nil {
		t.Error(err)
	}
}

// TestClearsOfTiersDuringSweeps stores, removes and clears the tiers of a rank whose table has many segments, while
// sweeps are in progress.
func TestClearsOfTiersDuringSweeps(t *testing.T) {
	testclass.WithoutRace(t)
	const prompts, length = 300, 40
	x := New()
	x.tree.limits.minSweep = 1
	r, other := x.AddRank("m", nil), x.AddRank("m", nil)
	tiers := make(map[uint64]uint8) // by block hash
	rnd := rand.New(rand.NewPCG(1, 2))
	var m Matcher
	partial, full := 0, 0
	for step := range 400 {
		for range 20 {
			i, n := rnd.Uint64N(prompts), 1+rnd.IntN(length)
			prompt, tier := newPrompt(i<<20, length), rnd.IntN(NumTiers)
			hashes := make([]uint64, length)
			for k := range prompt {
				hashes[k] = prompt[k] ^ 1
			}
			if rnd.IntN(4) > 0 {
				x.Store(r, tier, Stored{Blocks: hashes[:n], Tokens: prompt[:n]})
				for _, h := range hashes[:n] {
					tiers[h] |= 1 << tier
				}
			} else {
				x.Remove(r, tier, hashes[n:])
				for _, h := range hashes[n:] {
					tiers[h] &^= 1 << tier
				}
			}
			if i%2 == 0 {
				storePrompt(x, other, prompt, n)
			}
		}
		if rnd.IntN(4) == 0 {
			tier := rnd.IntN(NumTiers)
			x.ClearTier(r, tier)
			for h := range tiers {
				tiers[h] &^= 1 << tier
			}
		}
		x.stored = 0
		if x.Sweep(); len(x.sweeps) > 0 && x.sweeps[0].rest < x.sweeps[0].table.Len() {
			partial++
		}
		if r.live|r.stale == allTiers {
			full++
		}
		if step%20 == 0 {
			if err := checkInvariants(x); err != nil {
				t.Fatal(err)
			}
		}
		var blocks, digests [NumTiers]uint64
		for h, bits := range tiers {
			for tier := range NumTiers {
				if bits&(1<<tier) != 0 {
					blocks[tier]++
					digests[tier] ^= kvblock.Digest(h)
				}
			}
		}
		if blocks != r.blocks || digests != r.digests {
			t.Fatalf("step %d: got %d blocks, digests %x, want %d, %x", step, r.blocks, r.digests, blocks, digests)
		}
		prompt := newPrompt(rnd.Uint64N(prompts)<<20, length)
		x.Match("m", prompt, &m)
		got, want := Match{}, Match{}
		for _, f := range m.Found {
			if f.Rank == r {
				got = f
				got.Rank = nil
			}
		}
		for i, tokens := range prompt {
			bits := tiers[tokens^1]
			if bits != 0 && want.Blocks == i {
				want.Blocks++
			}
			for tier := range NumTiers {
				if bits&(1<<tier) != 0 && want.TierBlocks[tier] == i {
					want.TierBlocks[tier]++
				}
			}
			if b, ok := x.Find(r, tokens^1); b.Tiers != bits || ok != (bits != 0) {
				t.Fatalf("step %d: found %+v, want tiers %b", step, b, bits)
			}
		}
		if got != want {
			t.Fatalf("step %d: got %+v, want %+v", step, got, want)
		}
	}
	if partial == 0 || full == 0 {
		t.Errorf("%d partial sweeps, %d times all tier bits in use, want some", partial, full)
	}
	x.RemoveRank(r)
	x.RemoveRank(other)
	for len(x.sweeps) > 0 {
		x.Sweep()
	}
	if usedRuns(x) > 0 {
		t.Errorf("%d runs are left without ranks", usedRuns(x))
	}
}

// TestBlocksOfClearedTierCanGo removes and stores again blocks that are left in a cleared tier, before a sweep.
func TestBlocksOfClearedTierCanGo(t *testing.T) {
	const length = 10
	prompt := newPrompt(0, length)
	hashes := make([]uint64, length)
	for i := range prompt {
		hashes[i] = prompt[i] ^ 1
	}
	for name, change := range map[string]func(*Index, *Rank){
		"Remove":     func(x *Index, r *Rank) { x.Remove(r, 1, hashes) },
		"RemoveSome": func(x *Index, r *Rank) { x.Remove(r, 1, hashes[3:6]) },
		"StoreElsewhere": func(x *Index, r *Rank) {
			x.Store(r, 0, Stored{Blocks: hashes[:5], Tokens: newPrompt(1<<20, 5)})
		},
		"StoreUnknownContent": func(x *Index, r *Rank) {
			x.Remove(r, 1, hashes)
			x.Store(r, 0, Stored{Blocks: hashes})
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			x.tree.limits.singleClears = 0
			r := x.AddRank("m", nil)
			storePromptIn(x, r, 0, prompt, length)
			storePromptIn(x, r, 1, prompt, length)
			x.ClearTier(r, 0)
			if len(x.sweeps) != 1 {
				t.Fatalf("%d sweeps, want 1", len(x.sweeps))
			}
			change(x, r)
			if err := checkInvariants(x); err != nil {
				t.Error(err)
			}
			x.Sweep()
			if err := checkInvariants(x); err != nil || len(x.sweeps) > 0 {
				t.Errorf("after %d more sweeps: %v", len(x.sweeps), err)
			}
		})
	}
}

// TestSweepsReleaseLargeRank clears a rank whose table has several segments. It has long runs, half of which it shares
// with another rank, and runs of one block.
func TestSweepsReleaseLargeRank(t *testing.T) {
	const length, chains = 100, 200
	x := New()
	r, other := x.AddRank("m", nil), x.AddRank("m", nil)
	for i := range uint64(chains) {
		storePrompt(x, r, newPrompt(i<<20, length), length)
		if i%2 == 0 {
			storePrompt(x, other, newPrompt(i<<20, length), length)
		}
	}
	for i := range uint64(4000) {
		storePrompt(x, r, newPrompt(1<<40|i, 1), 1)
	}
	x.Clear(r)
	shared := newPrompt(0, length)
	want := fmt.Sprint([]Match{{Rank: other, Blocks: length, TierBlocks: [NumTiers]int{length}}})
	var m Matcher
	sweeps := 0
	for ; len(x.sweeps) > 0; sweeps++ {
		if x.Match("m", shared, &m); fmt.Sprint(m.Found) != want {
			t.Fatalf("after %d sweeps, found %+v, want the other rank alone", sweeps, m.Found)
		}
		x.Sweep()
		if err := checkInvariants(x); err != nil {
			t.Fatal(err)
		}
	}
	// The first sweep visits twice as many slots as blocks were stored.
	if sweeps != 1 {
		t.Errorf("%d sweeps after many stores, want 1", sweeps)
	}
	if runs := usedRuns(x); runs != 1+chains/2 {
		t.Errorf("%d runs, want a root and %d", runs, chains/2)
	}
	x.Clear(other)
	for sweeps = 0; len(x.sweeps) > 0; sweeps++ {
		x.Sweep()
	}
	// Sweep visits a segment more than the minimum.
	if least := chains / 2 * length / (2 * x.tree.limits.minSweep); sweeps < least {
		t.Errorf("%d sweeps, want at least %d", sweeps, least)
	}
	if runs := usedRuns(x); runs != 1 {
		t.Errorf("%d runs, want a root", runs)
	}
}

// TestClearedTierDoesNotHoldUpOtherSweeps clears a tier of a large rank again in each of its sweeps. The blocks of another
// rank that was cleared are released nevertheless.
func TestClearedTierDoesNotHoldUpOtherSweeps(t *testing.T) {
	const large, length, rounds = 20_000, 200, 200
	x := New()
	r, other := x.AddRank("m", nil), x.AddRank("m", nil)
	storePrompt(x, r, newPrompt(0, large), large)
	storePrompt(x, other, newPrompt(1<<40, length), length)
	x.Sweep()
	clearTier := func() {
		x.Store(r, 1, Stored{Blocks: []uint64{1}, Tokens: []uint64{1}})
		x.ClearTier(r, 1)
	}
	clearTier()
	x.Clear(other)
	for range rounds {
		if bits.OnesCount8(r.stale) < 2 {
			clearTier()
		}
		x.Sweep()
		if len(x.sweeps) < 2 {
			return
		}
	}
	t.Errorf("after %d calls of Sweep, the cleared rank still has blocks", rounds)
}

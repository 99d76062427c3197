package radix

import (
	"fmt"
	"testing"
)

// chain returns a Stored that starts a prompt. The block hashes are first, first+1 and so on.
func chain(first uint64, tokens ...uint64) Stored {
	s := Stored{Tokens: tokens}
	for i := range tokens {
		s.Blocks = append(s.Blocks, first+uint64(i))
	}
	return s
}

// untrimmed returns an index in which a run of five blocks has too many children to trim it, and a rank that holds
// the first three blocks, 10 to 12. Nobody holds the last two.
func untrimmed(t *testing.T) (*Index, *Rank) {
	t.Helper()
	x := New()
	x.tree.limits = small
	longest, r, others := x.AddRank("m", nil), x.AddRank("m", nil), x.AddRank("m", nil)
	x.Store(longest, 0, chain(10, 1, 1, 1, 1, 1))
	x.Store(r, 0, chain(10, 1, 1, 1))
	for i := range uint64(3) {
		x.Store(others, 0, chain(10*i, 1, 2+i))
	}
	x.RemoveRank(longest)
	for len(x.retired) > 0 {
		x.Sweep()
	}
	if n := maxLen(x); n != 5 {
		t.Fatalf("the longest run has %d blocks, want 5", n)
	}
	return x, r
}

func maxLen(x *Index) (n int) {
	for _, r := range x.tree.runs {
		if r != nil {
			n = max(n, len(r.tokens))
		}
	}
	return n
}

// TestSplitTrimsRest splits a run that had too many children to trim it.
func TestSplitTrimsRest(t *testing.T) {
	for name, change := range map[string]func(*Index, *Rank){
		"Remove": func(x *Index, r *Rank) { x.Remove(r, 0, []uint64{10}) },
		"Store": func(x *Index, r *Rank) {
			x.Store(r, 1, Stored{Parent: 11, HasParent: true, Blocks: []uint64{12}, Tokens: []uint64{1}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			x, r := untrimmed(t)
			change(x, r)
			if err := checkInvariants(x); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestScanHasEachBlockOnce changes a rank between the calls of a scan.
func TestScanHasEachBlockOnce(t *testing.T) {
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
	for ; len(x.retired) > 0; sweeps++ {
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
	if runs := len(x.tree.runs) - 1 - len(x.tree.free); runs != 1+chains/2 {
		t.Errorf("%d runs, want a root and %d", runs, chains/2)
	}
	x.Clear(other)
	for sweeps = 0; len(x.retired) > 0; sweeps++ {
		x.Sweep()
	}
	if least := chains / 2 * length / x.tree.limits.minSweep; sweeps < least {
		t.Errorf("%d sweeps, want at least %d", sweeps, least)
	}
	if runs := len(x.tree.runs) - 1 - len(x.tree.free); runs != 1 {
		t.Errorf("%d runs, want a root", runs)
	}
}

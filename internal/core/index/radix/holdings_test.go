package radix

import (
	"cmp"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestHoldingsAreASlice compares holdings in chunks of a few with a slice.
func TestHoldingsAreASlice(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(2, 9).Draw(t, "most")
		var h holdings
		var want []holding
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			rank, from := rapid.Uint32Range(0, 5).Draw(t, "rank"), rapid.Uint16Range(0, 20).Draw(t, "from")
			at, ok := h.find(rank, uint32(from))
			i, wantOK := slices.BinarySearchFunc(want, holding{rank: rank, from: from}, func(a, b holding) int {
				return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.from, b.from))
			})
			if ok != wantOK { // each has one block
				t.Fatalf("found %t, want %t", ok, wantOK)
			}
			n := rapid.IntRange(0, len(want)-i).Draw(t, "n")
			var with []holding
			if rapid.Bool().Draw(t, "insert") && (!ok || n > 0) {
				with = append(with, holding{rank: rank, from: from, to: from + 1, tiers: 1})
			}
			h.replace(most, at, n, with...)
			want = slices.Replace(want, i, i+n, with...)
			if got := listed(&h); !slices.Equal(got, want) {
				t.Fatalf("got %v, want %v", got, want)
			}
			if h.len() != len(want) || h.empty() != (len(want) == 0) {
				t.Fatalf("length %d, empty %t, want %d", h.len(), h.empty(), len(want))
			}
			to := uint32(0)
			for _, e := range want {
				to = max(to, uint32(e.to))
			}
			if got := h.upTo(1000); got != to {
				t.Fatalf("up to %d, want %d", got, to)
			}
			if err := checkChunks(&h, most); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestPartsOfManyRanksAreInChunks has ranks that hold every other block of a run. Each change moves the holdings of a chunk at most.
func TestPartsOfManyRanksAreInChunks(t *testing.T) {
	testclass.WithoutRace(t)
	const ranks = 64
	x := New()
	prompt := newPrompt(0, maxRun)
	var odd []uint64
	for i := 1; i < maxRun; i += 2 {
		odd = append(odd, prompt[i]^1)
	}
	honest := x.AddRank("m", nil)
	storePrompt(x, honest, prompt, maxRun)
	for range ranks {
		r := x.AddRank("m", nil)
		storePrompt(x, r, prompt, maxRun)
		x.Remove(r, 0, odd)
	}
	if err := checkInvariants(x); err != nil {
		t.Fatal(err)
	}
	var m Matcher
	x.Match("m", prompt, &m)
	for _, f := range m.Found {
		want := 1
		if f.Rank == honest {
			want = maxRun
		}
		if f.Blocks != want {
			t.Errorf("got %d blocks, want %d", f.Blocks, want)
		}
	}
	if len(m.Found) != 1+ranks {
		t.Errorf("found %d ranks", len(m.Found))
	}
}

// BenchmarkPartsOfManyRanks changes and matches a run of which ranks hold every other block.
func BenchmarkPartsOfManyRanks(b *testing.B) {
	x := New()
	prompt := newPrompt(0, maxRun)
	var odd []uint64
	for i := 1; i < maxRun; i += 2 {
		odd = append(odd, prompt[i]^1)
	}
	var first *Rank
	for i := range 1024 {
		r := x.AddRank("m", nil)
		storePrompt(x, r, prompt, maxRun)
		if i == 0 {
			first = r
		}
		x.Remove(r, 0, odd)
	}
	storePrompt(x, x.AddRank("m", nil), prompt, maxRun)
	b.Run("Change", func(b *testing.B) {
		measure(b, func(int) {
			x.Store(first, 0, Stored{HasParent: true, Parent: prompt[0] ^ 1, Blocks: odd[:1], Tokens: prompt[1:2]})
			x.Remove(first, 0, odd[:1])
		})
	})
	b.Run("Match", func(b *testing.B) {
		var m Matcher
		measure(b, func(int) { x.Match("m", prompt, &m) })
	})
}

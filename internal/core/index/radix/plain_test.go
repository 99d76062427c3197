package radix

import (
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// plainOf returns the numbers of the plain ranks of the first run, and how many blocks they hold.
func plainOf(x *Index) (ranks []uint32, to uint32) {
	p := x.tree.run(2).plain
	if p == nil {
		return nil, 0
	}
	for _, s := range p.sets {
		for ; s.ranks != 0; s.ranks &= s.ranks - 1 {
			ranks = append(ranks, s.first())
		}
	}
	return ranks, p.to
}

func hashesOf(prompt []uint64) (hashes []uint64) {
	for _, tokens := range prompt {
		hashes = append(hashes, tokens^1)
	}
	return hashes
}

// TestSweepEmptiesATable clears a rank whose table has holes.
func TestSweepEmptiesATable(t *testing.T) {
	testclass.WithoutRace(t)
	x := New()
	r := x.AddRank("m", nil)
	prompt := newPrompt(0, 1100)
	storePrompt(x, r, prompt, len(prompt))
	x.Remove(r, 0, hashesOf(prompt[:64]))
	x.ClearTier(r, 0)
	for x.Sweep() {
	}
	if err := checkInvariants(x); err != nil || r.table.Len() > 0 {
		t.Errorf("%d blocks are left; %v", r.table.Len(), err)
	}
}

// TestRanksOfACommonPrefixArePlain has ranks store a prompt, extend it, evict its end, hold it in another tier too, and leave.
func TestRanksOfACommonPrefixArePlain(t *testing.T) {
	testclass.WithoutRace(t)
	const length = 40
	x := New()
	var ranks []*Rank
	for range 100 {
		ranks = append(ranks, x.AddRank("m", nil))
	}
	prompt := newPrompt(0, length)
	check := func(what string, want []uint32, to uint32) {
		t.Helper()
		if err := checkInvariants(x); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got, n := plainOf(x); !slices.Equal(got, want) || n != to {
			t.Fatalf("%s: the ranks %v are plain with %d blocks, want %v with %d", what, got, n, want, to)
		}
	}
	numbers := func(from, to uint32) (all []uint32) {
		for n := from; n < to; n++ {
			all = append(all, n)
		}
		return all
	}
	for i, r := range ranks {
		storePrompt(x, r, prompt, length/2)
		if i+1 == defaults.plain-1 {
			check("few", nil, 0)
		}
	}
	check("all hold half of the prompt", numbers(0, 100), length/2)
	for _, r := range ranks[:40] {
		storePrompt(x, r, prompt, length)
	}
	check("40 hold all of it", numbers(40, 100), length/2)
	for _, r := range ranks[40:60] {
		storePrompt(x, r, prompt, length)
	}
	check("60 hold all of it", numbers(60, 100), length/2)
	for range 100 {
		x.Remove(ranks[60], 0, []uint64{prompt[length/2-1] ^ 1})
		check("59 or 60 hold all of it, 39 half of it", numbers(61, 100), length/2)
		storePrompt(x, ranks[60], prompt, length)
		check("61 hold all of it", numbers(61, 100), length/2)
		x.Remove(ranks[60], 0, hashesOf(prompt[length/2:]))
	}
	for _, r := range ranks[60:80] {
		storePrompt(x, r, prompt, length)
	}
	if most, to := plainOf(x); len(most) < 60 || to != length {
		t.Fatalf("80 of 100 hold all of it: %v are plain with %d", most, to)
	}
	for _, r := range ranks[80:] {
		storePrompt(x, r, prompt, length)
	}
	check("all hold all of it", numbers(0, 100), length)
	storePromptIn(x, ranks[70], 1, prompt, length)
	check("one holds it in two tiers", slices.Concat(numbers(0, 70), numbers(71, 100)), length)
	x.Remove(ranks[70], 1, []uint64{prompt[0] ^ 1})
	check("one holds most of it in two tiers", slices.Concat(numbers(0, 70), numbers(71, 100)), length)
	x.ClearTier(ranks[70], 1)
	for x.Sweep() {
	}
	check("one holds it in one tier again", numbers(0, 100), length)
	x.Remove(ranks[99], 0, []uint64{prompt[length-1] ^ 1})
	check("one has evicted the last block", numbers(0, 99), length)
	for _, r := range ranks[:64] {
		x.RemoveRank(r)
	}
	for x.Sweep() {
	}
	check("64 have left", numbers(64, 99), length)
	for _, r := range ranks[64:] {
		x.RemoveRank(r)
	}
	for x.Sweep() {
	}
	if usedRuns(x) != 0 {
		t.Errorf("%d runs are left", usedRuns(x))
	}
}

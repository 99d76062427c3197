package radix

import (
	"math/rand/v2"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// shape is what a tree has for its blocks.
type shape struct{ blocks, runs, held, holdings int }

func shapeOf(x *Index) (s shape) {
	for id := uint32(1); id < x.tree.runs; id++ {
		r := x.tree.run(id)
		if len(r.tokens) > 0 {
			s.runs++
		}
		s.blocks += len(r.tokens)
		all := r.listed()
		s.holdings += len(all)
		for _, e := range all {
			s.held += int(e.to - e.from)
		}
	}
	return s
}

// TestChurnKeepsRunsLong stores prompts that have prefixes in common, and removes their ends, beginnings and middles,
// until each rank has replaced its blocks many times. Runs must not become shorter, since a match visits each.
func TestChurnKeepsRunsLong(t *testing.T) {
	testclass.WithoutRace(t)
	const ranks, prompts, branches, length, capacity, steps = 8, 12, 40, 96, 2500, 30_000
	x := New()
	var all []*Rank
	for range ranks {
		all = append(all, x.AddRank("m", nil))
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	// newPath returns the tokens of one of the prompts, from a random block on of one of its branches.
	newPath := func() []uint64 {
		prompt, branch := rnd.Uint64N(prompts), rnd.Uint64N(branches)
		at := 8 * (1 + int(mixed(branch)%8))
		return append(newPrompt(prompt<<20, at), newPrompt((1+prompt*branches+branch)<<40, length-at)...)
	}
	var first, second shape // those with the shortest runs in each half
	stored := 0
	for step := range steps {
		r, path := all[rnd.IntN(ranks)], newPath()
		n, tier := 1+rnd.IntN(length), rnd.IntN(8)/7
		if held, _ := r.Digest(tier); held < capacity/uint64(1+7*tier) {
			storePromptIn(x, r, tier, path, n)
			stored += n
		} else {
			from, to := n-1, length
			if rnd.IntN(10) == 0 {
				from, to = rnd.IntN(n), n
			}
			hashes := make([]uint64, 0, length)
			for _, tokens := range path[from:to] {
				hashes = append(hashes, tokens^1)
			}
			x.Remove(r, tier, hashes)
		}
		if step > steps/10 && step%100 == 0 {
			worst := &first
			if step > steps/2 {
				worst = &second
			}
			if s := shapeOf(x); s.runs*worst.blocks >= worst.runs*s.blocks {
				*worst = s
			}
		}
	}
	t.Logf("%d blocks stored; first half: %+v, second half: %+v", stored, first, second)
	if perRun, before := second.blocks/second.runs, first.blocks/first.runs; perRun < before*8/10 || perRun < 8 {
		t.Errorf("%d blocks a run in the second half, %d in the first", perRun, before)
	}
	if each, before := second.held/second.holdings, first.held/first.holdings; each < before*8/10 || each < 8 {
		t.Errorf("%d blocks a holding in the second half, %d in the first", each, before)
	}
	if err := checkInvariants(x); err != nil {
		t.Error(err)
	}
}

package radix

import (
	"math/bits"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// small are limits that small inputs exceed.
var small = limits{run: 5, chunk: 3, singleClears: 2, sweeps: 2, minSweep: 3, attributes: maxAttributes, unheld: 1000, plain: 1}

// forgetful are limits with which runs are forgotten.
var forgetful = limits{run: 2, chunk: 2, singleClears: 2, sweeps: 2, minSweep: 3, attributes: maxAttributes, unheld: -1000, plain: 1}

// occurrences counts the states that a property test must reach.
type occurrences map[string]int

func (o occurrences) count(x *Index, pairs []pair) {
	for id := uint32(1); id < x.tree.runs; id++ {
		r := x.tree.run(id)
		o.add("forgotten runs", r.detached)
		o.add("unheld runs", r.unheld)
		if len(r.tokens) == 0 {
			continue
		}
		if x.tree.headMask != ^uint64(0) {
			found := 0
			x.tree.byHead.Find(x.tree.headHash(r.after, r.tokens[0]), func(uint32) bool { found++; return false })
			o.add("runs with the hash of another", found > 1)
		}
		o.add("twins", len(r.twins()) > 0)
		o.add("runs of maximum length", len(r.tokens) == int(x.tree.limits.run))
		o.add("branches within a run", len(r.branches) > 0 && int(r.branches[0].offset) < len(r.tokens)-1)
		o.add("runs with several branches", len(r.branches) > 1)
		o.add("runs with chunks of holdings", r.holdings.many != nil)
		o.add("plain ranks", r.plain != nil)
		o.add("plain ranks beside others", r.plain != nil && !r.holdings.empty())
		o.add("several plain ranks", r.plain.len() > 1)
		all := r.listed()
		for i := 1; i < len(all); i++ {
			e, f := all[i-1], all[i]
			o.add("runs of which a rank has parts", e.rank == f.rank && e.to < f.from)
			o.add("adjacent parts in different tiers", e.rank == f.rank && e.to == f.from)
			o.add("runs in which two ranks hold different parts", e.rank != f.rank && e.to != f.to)
		}
	}
	for _, p := range pairs {
		o.add("orphans", len(p.rank.orphans.first) > 0)
		o.add("several stale tiers", bits.OnesCount8(p.rank.stale) > 1)
	}
	o.add("free runs", len(x.tree.free) > 0)
	for _, s := range x.sweeps {
		o.add("retired ranks", s.rank == nil)
		o.add("retired tiers", s.rank != nil)
	}
}

func (o occurrences) add(what string, occurs bool) {
	n := o[what] // states that never occur are counted, too
	if occurs {
		n++
	}
	o[what] = n
}

func drawStored(t *rapid.T) Stored {
	hash := rapid.Uint64Range(0, 11)
	s := Stored{Blocks: rapid.SliceOfN(hash, 1, 5).Draw(t, "blocks")}
	if s.HasParent = rapid.IntRange(0, 2).Draw(t, "continues") > 0; s.HasParent {
		s.Parent = hash.Draw(t, "parent")
	}
	n := len(s.Blocks)
	if rapid.IntRange(0, 5).Draw(t, "unknown contents") == 0 {
		n = rapid.IntRange(0, n).Draw(t, "contents")
	}
	s.LoRA = rapid.SampledFrom([]string{"", "", "", "x", "y"}).Draw(t, "LoRA")
	s.BlockSize = rapid.SampledFrom([]uint32{0, 16, 16}).Draw(t, "block size")
	s.Tokens = rapid.SliceOfN(rapid.Uint64Range(1, 3), n, n).Draw(t, "tokens")
	return s
}

// checkModel applies random changes to an index and to models of its ranks, and compares them after each change.
func checkModel(t *rapid.T, limits limits, headMask uint64, seen occurrences) {
	names := []string{"a", "b"}
	x := New()
	x.tree.limits, x.tree.headMask = limits, headMask
	if rapid.Bool().Draw(t, "keep names") {
		x.KeepNames()
	}
	shorter := limits.unheld < 0 // matches may be shorter than the models'
	var (
		pairs []pair
		m     Matcher
	)
	var others []*Rank // so that the numbers of ranks differ in more than the last 6 bits
	for range rapid.SampledFrom([]int{0, 62}).Draw(t, "other ranks") {
		others = append(others, x.AddRank("others", nil))
	}
	for range rapid.IntRange(1, 60).Draw(t, "changes") {
		if len(pairs) == 0 || len(pairs) < 4 && rapid.IntRange(0, 5).Draw(t, "add") == 0 {
			name := names[rapid.IntRange(0, 5).Draw(t, "model")/5]
			pairs = append(pairs, pair{x.AddRank(name, nil), newModelRank(name)})
		}
		n := rapid.IntRange(0, len(pairs)-1).Draw(t, "rank")
		p, tier := pairs[n], rapid.IntRange(0, 2).Draw(t, "tier")
		tier += tier / 2 // 0, 1 and 3
		switch rapid.IntRange(0, 24).Draw(t, "kind") {
		default:
			s := drawStored(t)
			before := len(p.rank.orphans.first) > 0
			x.Store(p.rank, tier, s)
			p.model.store(tier, s)
			seen.add("adopted orphans", before && len(p.rank.orphans.first) == 0)
		case 0, 1, 2, 3, 4, 5, 6, 7:
			hashes := rapid.SliceOfN(rapid.Uint64Range(0, 11), 1, 4).Draw(t, "removed")
			x.Remove(p.rank, tier, hashes)
			p.model.remove(tier, hashes)
		case 8, 11:
			x.ClearTier(p.rank, tier)
			p.model.clearTier(tier)
		case 12:
			for _, tier := range []int{0, 1, 3} {
				x.ClearTier(p.rank, tier)
				p.model.clearTier(tier)
			}
		case 13, 14:
			s := drawStored(t)
			for _, p := range pairs {
				x.Store(p.rank, 0, s)
				p.model.store(0, s)
			}
		case 9:
			x.Clear(p.rank)
			clear(p.model.blocks)
			p.model.hadTwins = false
		case 10:
			x.RemoveRank(p.rank)
			pairs = append(pairs[:n:n], pairs[n+1:]...)
		}
		if rapid.IntRange(0, 7).Draw(t, "sweep") == 0 {
			x.Sweep()
		}
		if err := checkInvariants(x); err != nil {
			t.Fatal(err)
		}
		for _, p := range pairs {
			if err := p.compare(x); err != nil {
				t.Fatal(err)
			}
		}
		prompt := rapid.SliceOfN(rapid.Uint64Range(1, 3), 0, 8).Draw(t, "prompt")
		hashes := rapid.SliceOfN(rapid.Uint64Range(0, 11), 0, 4).Draw(t, "hashes")
		for _, name := range append(names, "") {
			if err := compareMatch(x, pairs, &m, name, prompt, shorter); err != nil {
				t.Fatal(err)
			}
			if err := compareSharing(x, pairs, name); err != nil && !shorter {
				t.Fatal(err)
			}
			for _, p := range pairs {
				if err := p.compareMatchHashes(x, pairs, &m, name, hashes, false); err != nil {
					t.Fatal(err)
				}
			}
		}
		// Compare the longest path of a block, too, since random prompts rarely match far.
		for _, p := range pairs {
			var longest string
			for _, b := range p.model.blocks {
				if len(b.path) > len(longest) || len(b.path) == len(longest) && b.path > longest {
					longest = b.path
				}
			}
			var tokens []uint64
			for _, c := range longest {
				tokens = append(tokens, uint64(c))
			}
			if err := compareMatch(x, pairs, &m, p.model.model, tokens, shorter); err != nil {
				t.Fatal(err)
			}
			chain, unique := p.model.hashes(longest)
			seen.add("chains of several block hashes", unique && len(chain) > 2)
			if x.KeepsNames() {
				if err := p.compareNames(x, longest, tokens, chain, shorter, seen); err != nil {
					t.Fatal(err)
				}
			}
			if err := p.compareMatchHashes(x, pairs, &m, p.model.model, append(chain, unknownHash), unique); err != nil {
				t.Fatal(err)
			}
			if err := p.compareMatchHashes(x, pairs, &m, p.model.model, append(chain, hashes...), false); err != nil {
				t.Fatal(err)
			}
		}
		seen.count(x, pairs)
	}
	for _, p := range pairs {
		x.RemoveRank(p.rank)
	}
	for _, r := range others {
		x.RemoveRank(r)
	}
	for len(x.sweeps) > 0 {
		x.Sweep()
	}
	if len(x.models) > 0 || usedRuns(x) > 0 || x.tree.byHead.Len() > 0 {
		t.Fatalf("%d models, %d runs and %d heads are left without ranks",
			len(x.models), usedRuns(x), x.tree.byHead.Len())
	}
}

func usedRuns(x *Index) int { return int(x.tree.runs) - 1 - len(x.tree.free) }

func TestIndexEqualsModel(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) { checkModel(t, small, ^uint64(0), make(occurrences)) })
}

// TestCollisionsChangeNothing compares matches while the hashes of runs often collide.
func TestCollisionsChangeNothing(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) { checkModel(t, small, 7, make(occurrences)) })
}

// TestForgottenRunsShortenPrefixes compares matches while unheld runs are forgotten.
func TestForgottenRunsShortenPrefixes(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) { checkModel(t, forgetful, ^uint64(0), make(occurrences)) })
}

// TestModelReachesRareStates draws changes from fixed seeds, and checks that each state occurs.
func TestModelReachesRareStates(t *testing.T) {
	testclass.WithoutRace(t)
	seeds := testclass.Size(100, 400)
	seen := make(occurrences)
	for _, mask := range []uint64{^uint64(0), 7} {
		g := rapid.Custom(func(t *rapid.T) bool {
			checkModel(t, small, mask, seen)
			return true
		})
		for seed := range seeds {
			g.Example(seed)
		}
	}
	g := rapid.Custom(func(t *rapid.T) bool {
		checkModel(t, forgetful, ^uint64(0), seen)
		return true
	})
	for seed := range seeds {
		g.Example(seed)
	}
	for what, n := range seen {
		t.Logf("%6d %s", n, what)
		if n == 0 {
			t.Errorf("no change led to %s", what)
		}
	}
}

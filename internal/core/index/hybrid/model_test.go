package hybrid_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
)

// world is a random set of groups, and what they hold of a prompt.
type world struct {
	groups []hybrid.Group
	unit   int
	// held has for each group the positions that it holds, in units: element 0 is the prefix of no tokens.
	held          [][]bool
	hashed, limit int
}

// align is the number of tokens of which the length of each prefix is a multiple: the unit, if a Mamba group's block is larger and
// every other group but full attention has blocks of one unit; else a number that is a multiple of all blocks.
func (w *world) align() int {
	partial := slices.ContainsFunc(w.groups, func(g hybrid.Group) bool { return g.Kind == hybrid.Mamba && g.BlockSize > w.unit })
	for _, g := range w.groups {
		partial = partial && (g.Kind.IsFull() || g.Kind == hybrid.Mamba || g.BlockSize == w.unit)
	}
	if partial && len(w.groups) > 1 {
		return w.unit
	}
	for n := 1; ; n++ {
		if !slices.ContainsFunc(w.groups, func(g hybrid.Group) bool { return n%g.BlockSize != 0 }) {
			return n
		}
	}
}

// sameSpec reports whether groups are equal but for index and drop. They are asked as one.
func sameSpec(a, b hybrid.Group) bool {
	a.Index, a.Drops = b.Index, b.Drops
	return a == b
}

// specsOf returns the indexes of the groups of each spec, full attention first.
func (w *world) specsOf() (specs [][]int) {
	for _, first := range []bool{true, false} {
		for i, g := range w.groups {
			if g.Kind.IsFull() != first {
				continue
			}
			known := slices.IndexFunc(specs, func(s []int) bool { return sameSpec(w.groups[s[0]], g) })
			if known < 0 {
				specs = append(specs, []int{i})
			} else {
				specs[known] = append(specs[known], i)
			}
		}
	}
	return specs
}

// all reports whether a condition holds for all groups of a spec.
func all(spec []int, condition func(g int) bool) bool {
	return !slices.ContainsFunc(spec, func(g int) bool { return !condition(g) })
}

// holds reports whether all groups of a spec hold a position.
func (w *world) holds(spec []int, tokens int) bool {
	return tokens%w.unit == 0 && all(spec, func(g int) bool { return w.held[g][tokens/w.unit] })
}

// blocks reports whether a spec holds all blocks that end after the position from and no later than to.
func (w *world) blocks(spec []int, from, to int) bool {
	size := w.groups[spec[0]].BlockSize
	for end := size; end <= to; end += size {
		if end > from && !w.holds(spec, end) {
			return false
		}
	}
	return true
}

// serves reports whether a spec serves a prefix, as the package comment says. With partial hits, full attention may hold a longer part
// of the prefix's last block, within the limit.
func (w *world) serves(spec []int, length, limit int) bool {
	g := w.groups[spec[0]]
	switch {
	case g.Kind.IsFull():
		if !w.blocks(spec, 0, length) {
			return false
		}
		blockEnd := (length + g.BlockSize - 1) / g.BlockSize * g.BlockSize
		return slices.ContainsFunc(w.between(length, min(limit, blockEnd)), func(n int) bool { return w.holds(spec, n) })
	case g.Kind.IsWindow():
		need := 0
		for need < g.Window-1 {
			need += g.BlockSize
		}
		return w.blocks(spec, length-need, length)
	case g.Kind == hybrid.Mamba:
		return w.holds(spec, length)
	default:
		return w.blocks(spec, length-length%g.Chunk, length)
	}
}

// between returns the positions from first to last.
func (w *world) between(first, last int) (all []int) {
	for n := first; n <= last; n += w.unit {
		all = append(all, n)
	}
	return all
}

// longest is the rule without EAGLE: the longest aligned prefix that every group serves. Partial hits of full attention count within
// what the full attention before it serves.
func (w *world) longest() int {
	limit, specs := max(0, min(w.limit, w.hashed)), w.specsOf()
	length := limit - limit%w.align()
	for _, s := range specs {
		within := limit
		for length > 0 && !w.serves(s, length, within) {
			length -= w.align()
		}
		if w.groups[s[0]].Kind.IsFull() {
			limit = length
		}
	}
	for length > 0 && slices.ContainsFunc(specs, func(s []int) bool { return !w.groups[s[0]].Kind.IsFull() && !w.serves(s, length, limit) }) {
		length -= w.align()
	}
	return length
}

// drawWorld draws groups, and what they hold. If drops is set, some groups drop.
func drawWorld(t *rapid.T, drops bool) *world {
	w := &world{unit: rapid.IntRange(1, 4).Draw(t, "unit")}
	for range rapid.IntRange(1, 4).Draw(t, "groups") {
		w.groups = append(w.groups, w.drawGroup(t, drops))
	}
	if rapid.Bool().Draw(t, "chunked") {
		g := hybrid.Group{Index: len(w.groups), Kind: hybrid.ChunkedLocalAttention, BlockSize: w.align()}
		g.Chunk = g.BlockSize * rapid.IntRange(1, 5).Draw(t, "chunk")
		w.groups = append(w.groups, g)
	}
	if len(w.groups) == 1 {
		w.unit = w.groups[0].BlockSize // as in vLLM
	}
	// Either a short prompt, which shrinks well, or a long one.
	units := rapid.IntRange(0, 40).Draw(t, "units")
	if rapid.Bool().Draw(t, "long") {
		units *= 10
	}
	w.hashed = units * w.unit
	w.limit = w.hashed + rapid.IntRange(-1, w.unit-1).Draw(t, "limit")
	for range w.groups {
		w.held = append(w.held, drawHeld(t, units))
	}
	return w
}

func (w *world) drawGroup(t *rapid.T, drops bool) hybrid.Group {
	if len(w.groups) > 0 && rapid.Bool().Draw(t, "same") {
		g := w.groups[len(w.groups)-1]
		g.Index++
		g.Drops = drops && rapid.Bool().Draw(t, "drops")
		return g
	}
	g := hybrid.Group{
		Index:     len(w.groups),
		Kind:      hybrid.Kind(rapid.IntRange(int(hybrid.FullAttention), int(hybrid.Mamba)).Draw(t, "kind")),
		BlockSize: w.unit * rapid.SampledFrom([]int{1, 1, 2, 3, 4, 6}).Draw(t, "block"),
		Drops:     drops && rapid.Bool().Draw(t, "drops"),
	}
	if g.Kind.IsWindow() {
		g.Window = rapid.IntRange(2, 4*g.BlockSize+2).Draw(t, "window")
		if rapid.IntRange(0, 4).Draw(t, "wide") == 0 {
			g.Window *= 20
		}
	}
	return g
}

// drawHeld draws what a group holds: a prefix, and some of the further positions.
func drawHeld(t *rapid.T, units int) []bool {
	held := make([]bool, units+1)
	prefix := rapid.IntRange(0, units).Draw(t, "prefix")
	density := rapid.SampledFrom([]float64{0, 0.1, 0.5, 0.9, 0.98, 1}).Draw(t, "density")
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	for i := 1; i <= units; i++ {
		held[i] = i <= prefix || random.Float64() < density
	}
	return held
}

// compile compiles the rule of a world, with the groups in any order.
func (w *world) compile(t *rapid.T) *hybrid.Rule {
	r, err := hybrid.New(rapid.Permutation(w.groups).Draw(t, "order"), w.unit)
	if err != nil {
		t.Fatal(err)
	}
	if r.Align() != w.align() {
		t.Fatalf("got alignment %d, want %d", r.Align(), w.align())
	}
	return &r
}

// asked is a Holder that checks that it is asked for existing positions, with the steps that Holder documents.
type asked struct {
	*world
	t     *rapid.T
	align int
}

func (a asked) Held(group, from, step, n int) uint64 {
	g := &a.groups[group]
	fine := step == a.unit && a.align == a.unit && (g.Kind.IsFull() || g.Kind == hybrid.Mamba)
	if step != g.BlockSize && !fine || from%step != 0 || from < 0 || n < 1 || n > 64 || from+n*step > a.hashed {
		a.t.Fatalf("asked for %d positions of group %d from %d on in steps of %d", n, group, from, step)
	}
	further := ^uint64(0) // bits that do not count
	further <<= n - 1
	further <<= 1
	return further | hybrid.HolderFunc(func(group, tokens int) bool { return a.held[group][tokens/a.unit] }).Held(group, from, step, n)
}

// TestLongestIsTheLongestServedPrefix compares the rule without EAGLE with its words.
func TestLongestIsTheLongestServedPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, false)
		r := w.compile(t)
		got, endedBy := r.Longest(asked{w, t, w.align()}, w.limit, w.hashed)
		if want := w.longest(); got != want {
			t.Fatalf("got %d tokens, want %d: groups %+v, unit %d, limit %d, hashed %d, held %v", got, want, w.groups, w.unit, w.limit, w.hashed, w.held)
		}
		next, limit := got+w.align(), min(w.limit, w.hashed)
		if endedBy == hybrid.NoGroup {
			if next <= limit {
				t.Fatalf("no group ends %d tokens of %d", got, limit)
			}
			return
		}
		specs := w.specsOf()
		s := specs[slices.IndexFunc(specs, func(s []int) bool { return slices.Contains(s, endedBy) })]
		if next > limit || s[0] != endedBy || w.serves(s, next, next) {
			t.Fatalf("group %d ends %d tokens of %d, and serves %d", endedBy, got, limit, next)
		}
	})
}

// TestLongestWithHostIsTheRuleOfTheSuffix compares the rule for a host tier with the rule for a prompt without its first tokens.
func TestLongestWithHostIsTheRuleOfTheSuffix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, rapid.Bool().Draw(t, "drops"))
		r := w.compile(t)
		device := rapid.IntRange(0, max(0, min(w.limit, w.hashed))).Draw(t, "device") / w.unit * w.unit
		start := device
		for slices.ContainsFunc(w.groups, func(g hybrid.Group) bool { return start%g.BlockSize != 0 }) {
			start--
		}
		suffix := &world{groups: w.groups, unit: w.unit, hashed: w.hashed - start, limit: w.limit - start}
		for _, held := range w.held {
			suffix.held = append(suffix.held, held[start/w.unit:])
		}
		tokens, _ := r.Longest(asked{suffix, t, w.align()}, suffix.limit, suffix.hashed)
		want := max(device, start+tokens)
		if got := r.LongestWithHost(asked{w, t, w.align()}, device, w.limit, w.hashed); got != want {
			t.Fatalf("got %d tokens, want %d", got, want)
		}
	})
}

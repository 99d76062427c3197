package hybrid_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
)

// longestWithEAGLE is the rule with EAGLE in these words: A spec of which a group drops looks at the candidate and one block more, full
// attention with partial hits one unit more, within the hashed tokens. It drops once for each candidate: full attention that block or
// unit, a window the block after the prefix, Mamba nothing. When a spec lowers the candidate without a drop, all drop again. Full
// attention is asked once. A group that is alone looks at the limit only, and its alignment is its block.
func (w *world) longestWithEAGLE() int {
	hit := max(0, min(w.limit, w.hashed))
	dropped, first := make(map[int]bool), true
	for {
		cur := hit
		for i, spec := range w.specsOf() {
			g := w.groups[spec[0]]
			if g.Kind.IsFull() && !first {
				continue
			}
			drop := !dropped[i] && slices.ContainsFunc(spec, func(g int) bool { return w.groups[g].Drops })
			found := w.find(spec, cur, drop)
			if drop {
				dropped[i] = true
			} else if found < cur {
				clear(dropped)
			}
			cur = found
		}
		if len(w.groups) == 1 || cur == hit {
			return cur
		}
		hit, first = cur, false
	}
}

// find returns what a spec makes of a candidate.
func (w *world) find(spec []int, candidate int, drop bool) int {
	g := w.groups[spec[0]]
	align, margin := w.align(), g.BlockSize
	if g.Kind.IsFull() {
		margin = min(margin, align)
	}
	end := candidate
	if drop && g.Kind != hybrid.Mamba && len(w.groups) > 1 {
		end = min(candidate+margin, w.hashed)
	}
	if g.Kind.IsWindow() {
		return w.findWindow(spec, end, drop)
	}
	// The longest prefix that the spec serves: in blocks, or in units if there are partial hits.
	step := min(g.BlockSize, align)
	n := end - end%step
	for n > 0 && (!w.serves(spec, n, n) || g.Kind == hybrid.Mamba && n%align != 0) {
		n -= step
	}
	if drop && g.Kind.IsFull() && n > 0 {
		n -= margin
	}
	return n - n%align
}

// findWindow: from the right, the first run of as many held blocks as the window needs, one more if a block is dropped, with an
// aligned end without the dropped block; else the run that reaches the first block, aligned before and after the drop.
func (w *world) findWindow(spec []int, end int, drop bool) int {
	size, window, align := w.groups[spec[0]].BlockSize, w.groups[spec[0]].Window, w.align()
	dropped := 0
	if drop {
		dropped = size
	}
	need := dropped
	for need-dropped < window-1 {
		need += size
	}
	for n := end - end%size; n > dropped; n -= size {
		if (n-dropped)%align != 0 || !w.blocks(spec, n-need, n) {
			continue
		}
		if n >= need {
			return n - dropped
		}
		n -= n % align
		n = max(0, n-dropped)
		return n - n%align
	}
	return 0
}

// TestLongestWithEAGLE compares the rule with EAGLE with its words. Each group serves the result, though full attention may do so with
// a partial hit beyond the limit.
func TestLongestWithEAGLE(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t, true)
		r := w.compile(t)
		got, _ := r.Longest(asked{w, t, w.align()}, w.limit, w.hashed)
		if want := w.longestWithEAGLE(); got != want {
			t.Fatalf("got %d tokens, want %d: groups %+v, unit %d, limit %d, hashed %d, held %v", got, want, w.groups, w.unit, w.limit, w.hashed, w.held)
		}
		if got%w.align() != 0 || got > 0 && slices.ContainsFunc(w.specsOf(), func(s []int) bool { return !w.serves(s, got, w.hashed) }) {
			t.Fatalf("got %d tokens, which are no multiple of %d, or which a group does not serve", got, w.align())
		}
	})
}

package radix

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// sharing counts what the ranks of a model share, in steps of little work.
func sharing(x *Index, model string, work, nodes int) *Sharing {
	s := new(Sharing)
	for next, first := uint32(0), true; first || next != 0; first = false {
		next = x.AddRuns(s, model, next, work, nodes)
	}
	for x.Resolve(s, work, 2*nodes) {
	}
	return s
}

// compareSharing compares a Sharing with the models of the ranks.
func compareSharing(x *Index, pairs []pair, modelName string) error {
	holders := make(map[string]int) // by model and content from the start of the prompt
	for _, p := range pairs {
		if modelName != "" && p.model.model != modelName {
			continue
		}
		held := make(map[string]bool) // a rank may have several names for a block
		for _, b := range p.model.blocks {
			if b.path != "" {
				held[p.model.model+"/"+b.path] = true
			}
		}
		for path := range held {
			holders[path]++
		}
	}
	var want Sharing
	for _, n := range holders {
		want.Blocks++
		want.Copies += uint64(n)
		want.ByRanks[n-1]++
	}
	got := sharing(x, modelName, 1, 4)
	if got.Blocks != want.Blocks || got.Copies != want.Copies || got.ByRanks != want.ByRanks {
		return fmt.Errorf("model %q: got %d blocks, %d copies, %v; want %d, %d, %v", modelName, got.Blocks, got.Copies, got.ByRanks, want.Blocks, want.Copies, want.ByRanks)
	}
	for _, nodes := range []int{1, 2, 4} { // there is no room for all paths
		got := sharing(x, modelName, 1, nodes)
		if diff := cmp.Diff(resolvedAtOnce(x, modelName, nodes), got.Nodes, cmpopts.IgnoreUnexported(Node{}), cmpopts.EquateEmpty()); diff != "" {
			return fmt.Errorf("model %q, %d nodes: (-want +got):\n%s", modelName, nodes, diff)
		}
	}
	ids := make(map[uint64]Node)
	for _, n := range got.Nodes {
		if before, ok := ids[n.Parent]; n.Parent != 0 && (!ok || before.First+len(before.Tokens) != n.First) || n.Parent == 0 && n.First != 0 {
			return fmt.Errorf("node %+v is not after its parent %+v", n, before)
		}
		ids[n.ID] = n
	}
	return nil
}

// texts returns nodes as lines, with the tokens hashes of each from the start of the prompt.
func texts(s *Sharing) (all []string) {
	paths := make(map[uint64]string)
	for _, n := range s.Nodes {
		paths[n.ID] = strings.TrimSpace(paths[n.Parent] + " " + strings.Trim(fmt.Sprint(n.Tokens), "[]"))
		all = append(all, fmt.Sprintf("%s %s: %d blocks after %d, %d copies, at most %d ranks", n.Model, paths[n.ID], n.Blocks, n.First, n.Copies, n.MaxRanks))
	}
	return all
}

// sharedPrompts returns an index of three ranks that share a prompt of four blocks, two of which share two more, and of one with
// another prompt.
func sharedPrompts() *Index {
	x := New()
	for i, tokens := range [][]uint64{{1, 2, 3, 4, 5, 6, 7}, {1, 2, 3, 4, 5, 6, 8, 9}, {1, 2, 3, 4, 10}, {20, 21}} {
		var blocks []uint64
		for n := range tokens {
			blocks = append(blocks, uint64(100*i+n))
		}
		x.Store(x.AddRank("m", nil), 0, Stored{Blocks: blocks, Tokens: tokens})
	}
	x.Store(x.AddRank("other", nil), 1, Stored{Blocks: []uint64{1}, Tokens: []uint64{1}})
	return x
}

func TestChainLeadsToTheStartOfThePrompt(t *testing.T) {
	x := sharedPrompts()
	r := x.ranks[1].rank
	for hash, want := range map[uint64][]uint64{100: {1}, 103: {1, 2, 3, 4}, 107: {1, 2, 3, 4, 5, 6, 8, 9}} {
		if got, ok := x.Chain(r, hash, 100); !ok || !cmp.Equal(got, want) {
			t.Errorf("block %d: got %v, %t; want %v", hash, got, ok, want)
		}
		if got, ok := x.Chain(r, hash, 3); !ok || !cmp.Equal(got, want[max(0, len(want)-3):]) {
			t.Errorf("the last three blocks to %d: got %v, %t", hash, got, ok)
		}
	}
	x.Store(r, 0, Stored{Blocks: []uint64{900}, Tokens: []uint64{9}, HasParent: true, Parent: 899})
	x.Store(r, 0, Stored{Blocks: []uint64{901}})
	for _, hash := range []uint64{900, 901, 902} { // an orphan, one of unknown content, one that is not held
		if got, ok := x.Chain(r, hash, 100); ok {
			t.Errorf("block %d: got %v, want none", hash, got)
		}
	}
}

func TestSharedNodesAreFound(t *testing.T) {
	x := sharedPrompts()
	s := sharing(x, "m", math.MaxInt, 10)
	want := []string{
		"m 1 2 3 4: 4 blocks after 0, 12 copies, at most 3 ranks",
		"m 1 2 3 4 5 6: 2 blocks after 4, 4 copies, at most 2 ranks",
	}
	if diff := cmp.Diff(want, texts(s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if s.Blocks != 12 || s.Copies != 22 || s.ByRanks[0] != 6 || s.ByRanks[1] != 2 || s.ByRanks[2] != 4 {
		t.Errorf("got %d blocks, %d copies, %v", s.Blocks, s.Copies, s.ByRanks)
	}
	if all := sharing(x, "", math.MaxInt, 10); all.Blocks != 13 || all.Copies != 23 {
		t.Errorf("of all models: got %d blocks, %d copies", all.Blocks, all.Copies)
	}
	if none := sharing(x, "unknown", math.MaxInt, 10); none.Blocks != 0 || len(none.Nodes) != 0 {
		t.Errorf("of an unknown model: got %+v", none)
	}
}

// TestSharedNodesAreBounded stores prompts of three blocks, of which 1 + n % 7 ranks hold prompt n.
func TestSharedNodesAreBounded(t *testing.T) {
	x := New()
	for i := range 7 {
		r := x.AddRank("m", nil)
		for n := range uint64(1000) {
			if int(n%7) >= i {
				x.Store(r, 0, Stored{Blocks: []uint64{4 * n, 4*n + 1, 4*n + 2}, Tokens: []uint64{4 * n, 4*n + 1, 4*n + 2}})
			}
		}
	}
	for _, most := range []int{0, 1, 5, 40} {
		s := sharing(x, "m", 100, most)
		if len(s.Nodes) != most {
			t.Errorf("got %d nodes, want %d", len(s.Nodes), most)
		}
		for _, n := range s.Nodes {
			if n.MaxRanks != 7 || n.Copies != 21 {
				t.Errorf("got %+v, want only nodes that all ranks hold", n)
			}
		}
		if s.Blocks != 3000 {
			t.Errorf("got %d blocks, want 3000", s.Blocks)
		}
	}
}

package radix

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// resolvedAtOnce is a plain implementation of Resolve: it follows each found node to the start of its prompt.
func resolvedAtOnce(x *Index, modelName string, nodes int) (resolved []Node) {
	s := new(Sharing)
	x.AddRuns(s, modelName, 0, math.MaxInt, nodes)
	slices.SortFunc(s.Nodes, bySaved)
	known := make(map[uint64]bool)
	for _, found := range s.Nodes {
		var path []Node
		at, ok := position{found.at.run, found.at.from}, true
		for ; ok; at, ok = x.before(path[len(path)-1].at.stretch) {
			ref := x.nodeAt(at)
			r := x.tree.run(ref.run)
			node := Node{ID: ref.id(), Model: found.Model, First: blocksBefore(x, ref), Tokens: r.tokens[ref.from:min(ref.to, ref.from+maxNodeTokens)], at: ref}
			s.count(x, r)
			s.countNode(&node)
			if len(path) > 0 {
				path[len(path)-1].Parent = node.ID
			}
			if known[node.ID] {
				break
			}
			path = append(path, node)
		}
		if x.tree.run(at.run).detached || len(resolved)+len(path) > 2*nodes {
			continue
		}
		for _, node := range path {
			known[node.ID] = true
			resolved = append(resolved, node)
		}
	}
	slices.SortFunc(resolved, func(a, b Node) int {
		return cmp.Or(cmp.Compare(a.First, b.First), b.Copies-a.Copies, cmp.Compare(a.ID, b.ID))
	})
	return resolved
}

// blocksBefore returns the number of blocks from the start of the prompt to a node.
func blocksBefore(x *Index, n nodeRef) (blocks int) {
	for at, ok := x.before(n.stretch); ok; at, ok = x.before(stretch{run: at.run}) {
		blocks += int(at.offset) + 1
	}
	return blocks
}

// deepPrompts returns an index of two ranks that hold the same chain of 4,303 runs, each of which branches off the first block of
// the run before: 14,002 blocks. The last 250 runs are the longest, and among these the deeper ones if deeperIsLonger.
func deepPrompts(deeperIsLonger bool) *Index {
	const runs, long = 4303, 250
	x := New()
	blocks := 0
	for range 2 {
		r := x.AddRank("m", nil)
		parent, blocksOfRank := uint64(0), uint64(0)
		for i := range runs {
			length := 3
			switch last := i - (runs - long); {
			case last >= long-93 && deeperIsLonger, last >= 0 && last < 93 && !deeperIsLonger:
				length = 8
			case last >= 0:
				length = 7
			}
			s := Stored{Parent: parent, HasParent: i > 0}
			for range length {
				blocksOfRank++
				s.Blocks = append(s.Blocks, blocksOfRank)
			}
			s.Tokens = s.Blocks
			x.Store(r, 0, s)
			parent = s.Blocks[0]
		}
		blocks = int(blocksOfRank)
	}
	if blocks != 14_002 {
		panic("the chain has another length")
	}
	return x
}

// TestPathsThatAreTooLongEndAtRejectedNodes counts the work for nodes that all are too deep, the deepest first or last.
func TestPathsThatAreTooLongEndAtRejectedNodes(t *testing.T) {
	const found, most = 250, 500
	for _, deeperIsLonger := range []bool{false, true} {
		x := deepPrompts(deeperIsLonger)
		s := new(Sharing)
		x.AddRuns(s, "m", 0, math.MaxInt, found)
		if len(s.Nodes) != found {
			t.Fatalf("found %d nodes, want %d", len(s.Nodes), found)
		}
		for _, n := range s.Nodes {
			if depth := blocksBefore(x, n.at); depth <= 2*most {
				t.Fatalf("found a node after %d blocks, want deeper ones", depth)
			}
		}
		// The first path is followed through twice as many nodes as there is room for. Each of the others ends after few nodes, at
		// a rejected one.
		r := &resolver{linked: make(map[uint64]int), rejected: make(map[uint64]bool)}
		total := 0
		for i := range s.Nodes {
			work := r.link(x, &Sharing{}, &s.Nodes[i], most)
			if work > stepWork*(2*most+2) {
				t.Errorf("node %d: work %d, want at most that of %d nodes", i, work, 2*most+2)
			}
			total += work
		}
		if limit := stepWork * (2*most + 2 + 4*found); total > limit {
			t.Errorf("deeper is longer %t: work %d, want at most %d", deeperIsLonger, total, limit)
		}
		if got := sharing(x, "m", 1, found); len(got.Nodes) != 0 || got.Blocks != 14_002 {
			t.Errorf("got %d nodes, %d blocks, want no nodes", len(got.Nodes), got.Blocks)
		}
	}
}

// TestResolveTakesTurns resolves with little work a call: each call links one path or counts one run.
func TestResolveTakesTurns(t *testing.T) {
	x := sharedPrompts()
	s := new(Sharing)
	x.AddRuns(s, "m", 0, math.MaxInt, 10)
	found, calls := len(s.Nodes), 1
	for ; x.Resolve(s, 1, 20); calls++ {
		if calls > 100 {
			t.Fatal("Resolve does not end")
		}
	}
	if calls <= found || calls > found+len(s.Nodes) {
		t.Errorf("%d calls, want one for each of %d found nodes, and one for each run of %d nodes", calls, found, len(s.Nodes))
	}
	if diff := gocmp.Diff(resolvedAtOnce(x, "m", 10), s.Nodes, cmpopts.IgnoreUnexported(Node{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestResolveDropsNodesOfFreedRuns frees the run of a found node before the next call, and uses its number for other blocks.
func TestResolveDropsNodesOfFreedRuns(t *testing.T) {
	x := New()
	ranks := []*Rank{x.AddRank("m", nil), x.AddRank("m", nil)}
	other := []*Rank{x.AddRank("other", nil), x.AddRank("other", nil)}
	for _, r := range ranks {
		x.Store(r, 0, Stored{Blocks: []uint64{1, 2}, Tokens: []uint64{1, 2}})
	}
	s := new(Sharing)
	x.AddRuns(s, "m", 0, math.MaxInt, 10)
	freed := s.Nodes[0].at
	for _, r := range ranks {
		x.Remove(r, 0, []uint64{1, 2})
	}
	for _, r := range other {
		x.Store(r, 0, Stored{Blocks: []uint64{3, 4}, Tokens: []uint64{3, 4}})
	}
	if got := sharing(x, "other", math.MaxInt, 10).Nodes; len(got) != 1 || got[0].ID != freed.id() {
		t.Fatalf("got the nodes %+v, want one in the run %d", got, freed.run)
	}
	for x.Resolve(s, 1, 20) {
	}
	if len(s.Nodes) != 0 {
		t.Errorf("got %+v, want no nodes", s.Nodes)
	}
}

// TestResolveAllowsChangesBetweenCalls stores and removes random chains between the calls. Each node continues its parent, and
// no ID is there twice.
func TestResolveAllowsChangesBetweenCalls(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := New()
		x.tree.limits.run = rapid.Uint32Range(1, 8).Draw(t, "run")
		ranks := []*Rank{x.AddRank("m", nil), x.AddRank("m", nil)}
		change := func() {
			// The block hash is the path, of which each digit from 1 to 3 is a content.
			path := uint64(0)
			var s Stored
			for range rapid.IntRange(1, 6).Draw(t, "depth") {
				digit := rapid.Uint64Range(1, 3).Draw(t, "content")
				path = path*4 + digit
				s.Blocks, s.Tokens = append(s.Blocks, path), append(s.Tokens, digit)
			}
			switch r := ranks[rapid.IntRange(0, 1).Draw(t, "rank")]; rapid.IntRange(0, 5).Draw(t, "change") {
			case 0:
				x.Clear(r)
			case 1:
				x.Remove(r, 0, s.Blocks[len(s.Blocks)-1:])
			default:
				x.Store(r, 0, s)
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			change()
		}
		s := new(Sharing)
		x.AddRuns(s, "m", 0, math.MaxInt, 10)
		for x.Resolve(s, 1, 20) {
			for range rapid.IntRange(0, 3).Draw(t, "changes between calls") {
				change()
			}
		}
		byID := make(map[uint64]*Node)
		for i := range s.Nodes {
			n := &s.Nodes[i]
			before := byID[n.Parent]
			if byID[n.ID] != nil || before == nil && (n.Parent != 0 || n.First != 0) || before != nil && before.First+len(before.Tokens) != n.First {
				t.Fatalf("node %+v does not continue its parent %+v", n, before)
			}
			byID[n.ID] = n
		}
	})
}

// TestHeaviestNodesHaveThoseOfALowerBound stores chains that share a start, of different lengths. Two ranks hold all. Nodes are kept
// with those before them, and a shared one is left out only if there is no room, or there are enough.
func TestHeaviestNodesHaveThoseOfALowerBound(t *testing.T) {
	const chains = 60
	x := New()
	for range 2 {
		r := x.AddRank("m", nil)
		storePrompt(x, r, newPrompt(0, 300), 300)
		for n := range uint64(chains) {
			prompt := append(newPrompt(0, int(1+4*n)), newPrompt((n+1)<<20, int(10+7*n%chains))...)
			storePrompt(x, r, prompt, len(prompt))
		}
	}
	all := sharing(x, "m", math.MaxInt, 250)
	for _, most := range []int{0, 2, 10, 40, 100, 400} {
		got, want := all.Heaviest(most), resolvedAtOnce(x, "m", most/2)
		if len(got) > most {
			t.Errorf("at most %d nodes of %d: got %d", most, len(all.Nodes), len(got))
		}
		kept, parents, chosen := make(map[uint64]bool), make(map[uint64]uint64), 0
		for _, n := range got {
			if n.Parent != 0 && !kept[n.Parent] {
				t.Errorf("at most %d: node %d is kept without the one before it", most, n.ID)
			}
			if kept[n.ID] = true; n.saved() > 0 {
				chosen++
			}
		}
		for _, n := range all.Nodes {
			parents[n.ID] = n.Parent
		}
		for _, n := range all.Nodes {
			missing := 0
			for id := n.ID; id != 0 && !kept[id]; id = parents[id] {
				missing++
			}
			if n.saved() > 0 && missing > 0 && chosen < (most+1)/2 && len(got)+missing <= most {
				t.Errorf("at most %d: node %d is left out, and there is room", most, n.ID)
			}
		}
		ids := make(map[uint64]bool)
		for _, n := range want {
			ids[n.ID] = true
		}
		got = slices.DeleteFunc(got, func(n Node) bool { return !ids[n.ID] })
		if diff := gocmp.Diff(want, got, cmpopts.IgnoreUnexported(Node{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("at most %d nodes of %d (-want +got):\n%s", most, len(all.Nodes), diff)
		}
	}
}

// TestHeaviestNodesSkipThoseWithoutRoom stores two long prompts that share their first block with a third: the long ones save
// more, and do not fit with the block before them.
func TestHeaviestNodesSkipThoseWithoutRoom(t *testing.T) {
	x := New()
	for _, prompt := range [][]uint64{{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 5}} {
		storePrompt(x, x.AddRank("m", nil), prompt, len(prompt))
	}
	all := sharing(x, "m", math.MaxInt, 10)
	for most, want := range [][]string{nil, {"1"}, {"1", "1 2 3 4"}} {
		some := &Sharing{Nodes: all.Heaviest(most)}
		var got []string
		for _, text := range texts(some) {
			path, _, _ := strings.Cut(strings.TrimPrefix(text, "m "), ":")
			got = append(got, path)
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("at most %d (-want +got):\n%s", most, diff)
		}
	}
}

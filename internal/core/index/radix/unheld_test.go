package radix

import "testing"

// TestHeldBlocksBoundTheTree stores chains of blocks, of which a rank never holds more than a few.
func TestHeldBlocksBoundTheTree(t *testing.T) {
	const steps, limit = 5000, 20
	parent := func(i uint64) Stored { return Stored{Parent: i, HasParent: i > 0} }
	chain := func(x *Index, r *Rank, first, n uint64) (hashes []uint64) {
		for i := range n { // each block follows one within a run
			for branch := range uint64(2) {
				s := parent(first + i)
				s.HasParent = i > 0
				s.Blocks, s.Tokens = []uint64{1<<40 | i}, []uint64{1}
				if branch == 1 {
					s.Blocks, s.Tokens = []uint64{first + i + 1}, []uint64{2 + first}
				}
				x.Store(r, 0, s)
			}
			x.Remove(r, 0, []uint64{1<<40 | i})
			hashes = append(hashes, first+i+1)
		}
		return hashes
	}
	for name, change := range map[string]func(x *Index, r *Rank, i uint64){
		"StoredAfterItself": func(x *Index, r *Rank, i uint64) {
			x.Store(r, 0, Stored{Parent: 7, HasParent: i > 0, Blocks: []uint64{7}, Tokens: []uint64{i}})
		},
		"OnlyTheLastIsHeld": func(x *Index, r *Rank, i uint64) {
			s := parent(i)
			s.Blocks, s.Tokens = []uint64{i + 1}, []uint64{i}
			x.Store(r, 0, s)
			x.Remove(r, 0, []uint64{i})
		},
		"RemovedFromTheEnd": func(x *Index, r *Rank, i uint64) {
			if i%50 == 0 {
				hashes := chain(x, r, i+1, 50)
				for k := len(hashes) - 2; k >= 0; k-- {
					x.Remove(r, 0, hashes[k:k+1])
				}
				x.Remove(r, 0, []uint64{i - 49 + 50})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			x.tree.limits.run, x.tree.limits.unheld = 5, limit
			r := x.AddRank("m", nil)
			for i := range uint64(steps) {
				change(x, r, i)
				x.Sweep()
				if i%100 > 0 {
					continue
				}
				if err := checkInvariants(x); err != nil {
					t.Fatal(err)
				}
				if runs, held := usedRuns(x), r.table.Len(); runs > 2*(held+limit)+2 || len(x.tree.unheld) > 4*(held+limit) {
					t.Fatalf("step %d: %d runs, %d in the queue, for %d blocks", i, runs, len(x.tree.unheld), held)
				}
			}
			x.RemoveRank(r)
			for len(x.sweeps) > 0 {
				x.Sweep()
			}
			if err := checkInvariants(x); err != nil || usedRuns(x) > 0 {
				t.Errorf("%d runs are left without ranks: %v", usedRuns(x), err)
			}
		})
	}
}

// TestForgottenBlocksMatchWhenStoredAgain stores a prompt again of which the index has forgotten a part.
func TestForgottenBlocksMatchWhenStoredAgain(t *testing.T) {
	const length = 100
	x := New()
	x.tree.limits.run, x.tree.limits.unheld = 5, -1000
	r := x.AddRank("m", nil)
	prompt := newPrompt(0, length)
	storePrompt(x, r, prompt, length)
	for i := range length - 1 {
		x.Remove(r, 0, []uint64{prompt[i] ^ 1})
	}
	x.Sweep()
	if runs := usedRuns(x); runs > 3 {
		t.Errorf("%d runs, want a root, a forgotten one and one with the last block", runs)
	}
	storePrompt(x, r, prompt, length)
	var m Matcher
	if x.Match("m", prompt, &m); len(m.Found) != 1 || m.Found[0].Blocks != length {
		t.Errorf("found %+v, want the whole prompt", m.Found)
	}
	if err := checkInvariants(x); err != nil {
		t.Error(err)
	}
}

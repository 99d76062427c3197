package pipeline

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// checkChildren compares the counts of children with a recount over all blocks.
func checkChildren(t interface{ Fatalf(string, ...any) }, table *table) {
	want, got := make(map[uint64]uint32), make(map[uint64]uint32)
	few := 0
	table.blocks.all(func(b *slot) {
		if table.children.counts(b) {
			want[b.Value.parent]++
		}
		switch n := b.Value.flags & flagChildren; n {
		case 0:
		case flagChildren:
			got[b.Key()] = table.children.many[b.Key()]
		default:
			got[b.Key()] = uint32(n / oneChild)
			few++
		}
	})
	for hash, n := range table.children.many {
		if present := table.has(hash); present && n <= 2 || !present && n == 0 {
			t.Fatalf("block %d: %d children in many, present %v", hash, n, present)
		}
		got[hash] = n
	}
	if !maps.Equal(want, got) {
		t.Fatalf("children (-want +got):\n%s", cmp.Diff(want, got))
	}
	if n := few + len(table.children.many); n != len(want) {
		t.Fatalf("%d counts for %d blocks", n, len(want))
	}
}

// TestChildrenAreCountedWhileTheTableChanges stores and removes blocks, with and without
// parents in the table, while children are counted a few segments at a time.
func TestChildrenAreCountedWhileTheTableChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := newTable(nil)
		hashes := rapid.SampledFrom([]uint64{10, 300, 30_000}).Draw(t, "hashes")
		hash := rapid.Uint64Range(0, hashes)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			first, n := hash.Draw(t, "hash"), rapid.Uint64Range(1, hashes).Draw(t, "run")
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				table.gap()
			case 1:
				table.expire(int(n), nil)
			case 2, 3, 4:
				for h := first; h < first+n; h++ {
					table.remove(h, copies.RemoveAll)
				}
			case 5, 6:
				table.countChildren()
			default:
				r := &run{key: runKey{kind: wire.KindStored, hashed: rapid.Bool().Draw(t, "hashed")}}
				fanout := rapid.Uint64Range(1, 5).Draw(t, "fanout")
				for h := first; h < first+n; h++ {
					r.hashes, r.tokensHashes = []uint64{h}, []uint64{h}
					r.parent, r.hasParent = h/fanout, h%7 != 0
					storeRun(table, r)
				}
			}
			checkChildren(t, table)
		}
	})
}

// TestChildrenOfALargeTableAreCountedInSteps has more segments than one step counts.
func TestChildrenOfALargeTableAreCountedInSteps(t *testing.T) {
	testclass.WithoutRace(t)
	const blocks = 100_000
	table := newTable(nil)
	r := &run{key: runKey{kind: wire.KindStored}}
	for h := range uint64(blocks) {
		r.hashes = append(r.hashes, h)
	}
	storeRun(table, r)
	steps := 0
	for !table.countChildren() {
		checkChildren(t, table)
		steps++
	}
	if steps < 2 {
		t.Errorf("steps: got %d, want several", steps)
	}
	checkChildren(t, table)
	if b := table.blocks.table.Find(blocks - 2); b.Value.flags&flagChildren != oneChild {
		t.Errorf("children of the last parent: got flags %b, want one", b.Value.flags)
	}
}

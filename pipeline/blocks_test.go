package pipeline

import (
	"maps"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/ingest/wire"
)

// all calls f with every block.
func (t *blocks) all(f func(*block)) {
	for s := range t.segments() {
		for k := range s.slots {
			if s.slots[k].flags&flagHeld != 0 {
				f(&s.slots[k])
			}
		}
	}
}

// checkBlocks compares the table with a map, by both ways to read it, and sees
// that its segments are sound.
func checkBlocks(t interface{ Fatalf(string, ...any) }, got *blocks, want map[uint64]uint64) {
	if got.len() != len(want) {
		t.Fatalf("length: got %d, want %d", got.len(), len(want))
	}
	for hash, parent := range want {
		s, i, ok := got.find(hash)
		if !ok || s.slots[i].hash != hash || s.slots[i].parent != parent {
			t.Fatalf("block %d: got %v, want it, with parent %d", hash, ok, parent)
		}
	}
	all := make(map[uint64]uint64)
	got.all(func(b *block) {
		if _, twice := all[b.hash]; twice {
			t.Fatalf("block %d is there twice", b.hash)
		}
		all[b.hash] = b.parent
	})
	if !maps.Equal(want, all) {
		t.Fatalf("blocks (-want +got):\n%s", cmp.Diff(want, all))
	}
	var digest uint64
	for hash := range want {
		digest ^= wire.BlockDigest(hash)
	}
	if got.digest != digest {
		t.Fatalf("digest: got %016x, want %016x", got.digest, digest)
	}
	if len(got.dir) != 1<<got.depth {
		t.Fatalf("directory: %d entries at depth %d", len(got.dir), got.depth)
	}
	for i, s := range got.dir {
		first := i >> (got.depth - s.depth) << (got.depth - s.depth)
		if got.dir[first] != s {
			t.Fatalf("directory entry %d: not the segment of its first %d bits", i, s.depth)
		}
		if s.n > len(s.slots)-len(s.slots)/4 {
			t.Fatalf("segment %d: %d blocks in %d slots", i, s.n, len(s.slots))
		}
	}
}

func TestBlocksAreAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		got, want := newBlocks(), make(map[uint64]uint64)
		// Few hashes, so that they are deleted and put back, or so many that
		// segments split; next to one another, as some engines' are, or spread.
		hash := rapid.Uint64Range(0, rapid.SampledFrom([]uint64{10, 300, 5000}).Draw(t, "hashes"))
		for step := range rapid.IntRange(0, 30).Draw(t, "steps") {
			first, n := hash.Draw(t, "hash"), rapid.Uint64Range(1, 2000).Draw(t, "run")
			remove := rapid.Bool().Draw(t, "remove")
			for h := first; h < first+n; h++ {
				if remove {
					if s, i, ok := got.find(h); ok {
						got.delete(s, i)
					}
					delete(want, h)
					continue
				}
				b, held := got.put(h)
				if _, ok := want[h]; ok != held {
					t.Fatalf("put %d: got held %v, want %v", h, held, ok)
				}
				b.parent = uint64(step)
				want[h] = uint64(step)
			}
			checkBlocks(t, &got, want)
		}
	})
}

// TestBlocksSplitManyTimes grows a table far beyond one segment, and empties it.
func TestBlocksSplitManyTimes(t *testing.T) {
	const n = 100_000
	got, want := newBlocks(), make(map[uint64]uint64)
	for h := range uint64(n) {
		b, _ := got.put(h << 40)
		b.parent = h
		want[h<<40] = h
	}
	checkBlocks(t, &got, want)
	if got.depth < 5 {
		t.Errorf("depth: got %d, want some splits", got.depth)
	}
	slots := 0
	for i, s := range got.dir {
		if i == 0 || got.dir[i-1] != s {
			slots += len(s.slots)
		}
	}
	if load := float64(n) / float64(slots); load < 0.6 {
		t.Errorf("load: got %.2f, want at least 0.6", load)
	}
	for h := range uint64(n) {
		if h%3 != 0 {
			s, i, _ := got.find(h << 40)
			got.delete(s, i)
			delete(want, h<<40)
		}
	}
	checkBlocks(t, &got, want)
}

// TestBlocksOfOneSegmentOnly fills the deepest segment, which can not split.
func TestBlocksOfOneSegmentOnly(t *testing.T) {
	got, want := newBlocks(), make(map[uint64]uint64)
	got.dir[0].depth = maxDepth
	got.depth = 0
	for h := range uint64(3 * maxSegment) {
		got.put(h)
		want[h] = 0
	}
	if len(got.dir) != 1 || got.len() != len(want) {
		t.Fatalf("got %d segments with %d blocks", len(got.dir), got.len())
	}
	for h := range want {
		if _, _, ok := got.find(h); !ok {
			t.Fatalf("block %d is lost", h)
		}
	}
}

func TestBlockFillsItsSlot(t *testing.T) {
	if size := unsafe.Sizeof(block{}); size != 32 || 8192%size != 0 {
		t.Errorf("a slot takes %d bytes, want 32", size)
	}
}

package pipeline

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/hashtable"
)

// TestRefsAreASet compares refs with a map, for keys that share few or many bits.
func TestRefsAreASet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		keys := map[uint32]uint64{}
		keyOf := func(ref uint32) uint64 { return keys[ref] }
		set, next := newRefs(), uint32(0)
		mask := rapid.SampledFrom([]uint64{1<<64 - 1, 0xff, 0xff << 56, 0xffff << 32, 3 << 31}).Draw(t, "mask")
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			for range rapid.SampledFrom([]int{1, 10, 500, 3000}).Draw(t, "more") {
				next++
				if next > 400 && mask != 1<<64-1 {
					break // many equal keys cause long probes
				}
				keys[next] = hashtable.Hash(uint64(next)) & mask
				set.add(keys[next], next, keyOf)
			}
			for ref := range keys {
				if ref%3 == 0 && len(keys) > 5 {
					set.remove(keys[ref], ref, keyOf)
					delete(keys, ref)
				}
			}
		}
		if set.n != len(keys) {
			t.Errorf("got %d, want %d", set.n, len(keys))
		}
		for ref := range next + 1 {
			key, there := keys[ref]
			if !there {
				key = hashtable.Hash(uint64(ref)) & mask
			}
			if got := set.find(key, func(r uint32) bool { return r == ref }); (got == ref) != (there || ref == 0) {
				t.Errorf("ref %d: got %d, there is %v", ref, got, there)
			}
		}
	})
}

// TestRefSegmentSplits deepens the directory, then splits a segment that many directory
// entries share.
func TestRefSegmentSplits(t *testing.T) {
	set, keys := newRefs(), []uint64{0}
	keyOf := func(ref uint32) uint64 { return keys[ref] }
	const half = 1 << 63
	for _, top := range []uint64{0, half} {
		for range 8 * maxRefs {
			ref := uint32(len(keys))
			keys = append(keys, hashtable.Hash(uint64(ref))&^half|top)
			set.add(keys[ref], ref, keyOf)
		}
	}
	for i, key := range keys[1:] {
		ref := uint32(i + 1)
		if got := set.find(key, func(r uint32) bool { return r == ref }); got != ref {
			t.Fatalf("ref %d: got %d", ref, got)
		}
	}
}

package hashtable

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestIndexIsASet compares an index with a map, for hashes that share few or many bits.
func TestIndexIsASet(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		hashes := map[uint32]uint64{}
		index, last := NewIndex(), uint32(0)
		mask := rapid.SampledFrom([]uint64{1<<64 - 1, 0xff, 0xff << 56, 0xffff << 32, 3 << 31}).Draw(t, "mask")
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			for range rapid.SampledFrom([]int{1, 10, 500, 3000}).Draw(t, "added") {
				last++
				if last > 400 && mask != 1<<64-1 {
					break // many equal hashes cause long probes
				}
				hashes[last] = Hash(uint64(last)) & mask
				index.Add(hashes[last], last)
			}
			for record := range hashes {
				if record%3 == 0 && len(hashes) > 5 {
					index.Remove(hashes[record], record)
					delete(hashes, record)
				}
			}
		}
		index.Prefetch(slices.Collect(maps.Values(hashes)))
		checkDirectory(t, &index.dir)
		if index.Len() != len(hashes) {
			t.Errorf("length: got %d, want %d", index.Len(), len(hashes))
		}
		for record := range last + 1 {
			hash, present := hashes[record]
			if !present {
				hash = Hash(uint64(record)) & mask
			}
			if got := index.Find(hash, func(r uint32) bool { return r == record }); (got == record) != (present || record == 0) {
				t.Errorf("record %d: got %d, present %v", record, got, present)
			}
		}
	})
}

// TestIndexSegmentSplits deepens the directory, then splits a segment that many directory
// elements share.
func TestIndexSegmentSplits(t *testing.T) {
	index, hashes := NewIndex(), []uint64{0}
	const high = 1 << 63
	for _, top := range []uint64{0, high} {
		for range 100_000 {
			record := uint32(len(hashes))
			hashes = append(hashes, Hash(uint64(record))&^high|top)
			index.Add(hashes[record], record)
		}
	}
	for i, hash := range hashes[1:] {
		record := uint32(i + 1)
		if got := index.Find(hash, func(r uint32) bool { return r == record }); got != record {
			t.Fatalf("record %d: got %d", record, got)
		}
	}
}

// TestRemovedRecordsFreeMemory adds records with the same hash, and removes them, for many hashes.
func TestRemovedRecordsFreeMemory(t *testing.T) {
	testclass.WithoutRace(t)
	const hashes, records = 100, 200
	x := NewIndex()
	for i := range uint64(hashes) {
		for record := range uint32(records) {
			x.Add(Hash(i), record+1)
		}
		for record := range uint32(records) {
			x.Remove(Hash(i), record+1)
		}
		checkDirectory(t, &x.dir)
		if len(x.dir.segments) != 1 || x.Len() != 0 {
			t.Fatalf("after %d hashes: a directory of %d elements, %d records", i+1, len(x.dir.segments), x.Len())
		}
	}
}

package hashtable

import "slices"

// Index finds records that are stored elsewhere, by a hash of their keys, in some 14 bytes a
// record. Records are identified by numbers from 1. Several records may have the same hash.
// NewIndex makes an index. An index is not safe for concurrent use.
type Index struct{ dir directory }

// NewIndex returns an empty index.
func NewIndex() Index { return Index{newDirectory()} }

// Len returns the number of records.
func (x *Index) Len() int { return x.dir.n }

// Prefetch loads the buckets of some hashes, so that the cache misses of the following calls for these hashes overlap.
func (x *Index) Prefetch(hashes []uint64) {
	var buckets [prefetched]*bucket
	for part := range slices.Chunk(hashes, prefetched) {
		x.dir.prefetch(part, &buckets)
	}
}

// Find returns the record with a hash for which match returns true; 0 if there is none. match is called for a few other records too.
func (x *Index) Find(hash uint64, match func(record uint32) bool) uint32 {
	h := uint32(hash >> 32)
	s, at := x.dir.segment(h), home(h)
	for range segmentBuckets {
		b := s.bucket(at)
		for m := b.match(pattern(h)); m != 0; {
			var k uint
			k, m = m.next()
			if e := b.entry(k); e.hash == h && e.record != 0 && match(e.record) {
				return e.record
			}
		}
		if !b.full() {
			return 0
		}
		at = after(at)
	}
	for _, e := range x.dir.overflow[s] {
		if e.hash == h && match(e.record) {
			return e.record
		}
	}
	return 0
}

// Add adds a record, which the index must not have.
func (x *Index) Add(hash uint64, record uint32) { x.dir.add(newEntry(hash, record)) }

// Remove removes a record, which the index must have with that hash.
func (x *Index) Remove(hash uint64, record uint32) { x.dir.remove(newEntry(hash, record)) }

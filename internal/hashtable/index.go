package hashtable

import (
	"math/bits"
	"slices"
)

// Index finds records that are stored elsewhere, by a hash of their keys, in some 15 bytes a
// record. Records are identified by numbers from 1. Several records may have the same hash.
// NewIndex makes an index. An index is not safe for concurrent use.
type Index struct {
	// table has, in place of each hash, the hash's high 32 bits and the record's number, so
	// that equal hashes of two records differ.
	table Table[struct{}, struct{}]
}

// NewIndex returns an empty index.
func NewIndex() Index { return Index{New[struct{}, struct{}]()} }

func indexEntry(hash uint64, record uint32) uint64 { return hash>>32<<32 | uint64(record) }

// Len returns the number of records.
func (x *Index) Len() int { return x.table.n }

// Prefetch loads the segments of some hashes, so that the cache misses of the following calls for these
// hashes overlap.
func (x *Index) Prefetch(hashes []uint64) {
	for part := range slices.Chunk(hashes, prefetched) {
		x.prefetch(part)
	}
}

// prefetch is like Table.prefetch. A segment's controls can be in its second cache line.
//
//go:noinline
func (x *Index) prefetch(hashes []uint64) (sum uint64) {
	var segments [prefetched]*Segment[struct{}, struct{}]
	var homes [prefetched]uint8
	for i, h := range hashes {
		segments[i], homes[i] = x.table.dir[x.table.index(cursor(h))], uint8(home(h))
	}
	for i, s := range segments[:len(hashes)] {
		sum += uint64(s.used) + s.controls[len(s.controls)-1] + s.Slots[homes[i]].hash
	}
	return sum
}

// Find returns the record with a hash for which match returns true; 0 if there is none. match
// is called for a few other records too.
func (x *Index) Find(hash uint64, match func(record uint32) bool) uint32 {
	pattern := control(hash) * eachByte
	at, last := cursor(hash>>32<<32), cursor(hash|(1<<32-1))
	for {
		_, s := x.table.locate(at)
		for w, controls := range &s.controls {
			for m := matches(controls, pattern); m != 0; m &= m - 1 {
				entry := s.Slots[8*w+bits.TrailingZeros64(m)/8].hash
				if entry>>32 == hash>>32 && match(uint32(entry)) {
					return uint32(entry)
				}
			}
		}
		// Cursors of records with the same hash share 33 bits.
		if s.depth <= 33 {
			return 0
		}
		if _, at = x.table.SegmentAt(at); at == 0 || at > last {
			return 0
		}
	}
}

// Add adds a record, which the index must not have.
func (x *Index) Add(hash uint64, record uint32) { x.table.put(indexEntry(hash, record)) }

// Remove removes a record, which the index must have with that hash.
func (x *Index) Remove(hash uint64, record uint32) {
	entry := indexEntry(hash, record)
	_, s, i, _ := x.table.find(entry)
	x.table.Delete(s, i)
}

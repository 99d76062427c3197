package hashtable

import "math/bits"

// bucketEntries is the number of entries of a bucket.
const bucketEntries = 8

// entry refers to a record by its hash. Records are numbered from 1.
type entry struct{ hash, record uint32 }

// newEntry returns an entry with the high bits of a hash.
func newEntry(hash uint64, record uint32) entry { return entry{uint32(hash >> 32), record} }

// bucket is a cache line of entries, the first of which are in use. The others are zero.
type bucket struct {
	// hashes has two hashes in each element: element i has that of entry i in its low half, and that of entry i+4 in its high half.
	hashes  [bucketEntries / 2]uint64
	records [bucketEntries]uint32
}

// full reports whether all entries are in use.
func (b *bucket) full() bool { return b.records[bucketEntries-1] != 0 }

// room returns the first unused entry; b must not be full. It has no branches, which could not be predicted.
func (b *bucket) room() (k uint) {
	if b.records[3] != 0 {
		k = 4
	}
	if b.records[(k+1)%8] != 0 {
		k += 2
	}
	if b.records[k%8] != 0 {
		k++
	}
	return k
}

// len returns the number of entries in use.
func (b *bucket) len() uint {
	if b.full() {
		return bucketEntries
	}
	return b.room()
}

// matches is a set of entries of a bucket, see next.
type matches uint64

const (
	eachHalf = 1<<32 | 1
	highBits = 1<<63 | 1<<31
)

// pattern returns the pattern of a hash, see bucket.match.
func pattern(hash uint32) uint64 { return uint64(hash) * eachHalf }

// match returns the entries with the hash of a pattern, and possibly others.
func (b *bucket) match(pattern uint64) matches {
	// The high bit of each half that is 0 is set below, and possibly that of the half above it.
	v, w, x, y := b.hashes[0]^pattern, b.hashes[1]^pattern, b.hashes[2]^pattern, b.hashes[3]^pattern
	return matches((v-eachHalf)&^v&highBits>>3 | (w-eachHalf)&^w&highBits>>2 | (x-eachHalf)&^x&highBits>>1 | (y-eachHalf)&^y&highBits)
}

// next returns an entry of a set, which must not be empty, and the other ones.
func (m matches) next() (k uint, rest matches) {
	at := uint(bits.TrailingZeros64(uint64(m))) - 28 // k%4 + k/4*32
	return (at>>3 | at) % 8, m & (m - 1)
}

// shift returns where the hash of entry k is in its element.
func shift(k uint) uint { return k / 4 * 32 & 63 }

// entry returns entry k.
func (b *bucket) entry(k uint) entry { return entry{uint32(b.hashes[k%4] >> shift(k)), b.records[k%8]} }

// set sets entry k, which must be unused.
func (b *bucket) set(k uint, e entry) {
	b.hashes[k%4] |= uint64(e.hash) << shift(k)
	b.records[k%8] = e.record
}

// remove removes entry k.
func (b *bucket) remove(k uint) {
	last := b.len() - 1
	e := b.entry(last)
	b.clear(k)
	b.set(k, e)
	b.clear(last) // possibly k
}

func (b *bucket) clear(k uint) {
	b.hashes[k%4] &^= (1<<32 - 1) << shift(k)
	b.records[k%8] = 0
}

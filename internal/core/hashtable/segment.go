package hashtable

import "unsafe"

const (
	segmentBuckets = 16
	segmentEntries = segmentBuckets * bucketEntries

	// maxDistance is how many buckets after its home an entry may be before its segment splits. A higher value takes
	// less memory, and causes more cache misses.
	maxDistance = 3
	// anyDistance is the number of buckets after its home.
	anyDistance = segmentBuckets - 1

	// mergedEntries is the number of entries up to which two segments are merged.
	mergedEntries = segmentEntries * 3 / 4
)

// segment has the entries whose cursors begin with the same bits. An entry is in its home bucket, or in one after it if
// all buckets from its home up to that one are full. The first bucket follows the last.
type segment [segmentBuckets]bucket

// home returns an entry's home bucket. It depends on bits 7 to 10, which no directory uses that fits into memory.
func home(hash uint32) uint { return uint(hash>>7) % segmentBuckets }

// bucket returns a bucket. The expression &s[at] would load the first bucket too, since it checks that s is not nil, and so
// cost a second cache miss.
func (s *segment) bucket(at uint) *bucket {
	return (*bucket)(unsafe.Add(unsafe.Pointer(s), at%segmentBuckets*uint(unsafe.Sizeof(bucket{}))))
}

// after returns the bucket after a bucket.
func after(at uint) uint { return (at + 1) % segmentBuckets }

// len returns the number of entries.
func (s *segment) len() (n uint) {
	for at := range s {
		n += s[at].len()
	}
	return n
}

// find returns the bucket of an entry, and its index there.
func (s *segment) find(e entry) (at, k uint, ok bool) {
	at = home(e.hash)
	for range segmentBuckets {
		b := s.bucket(at)
		for m := b.match(pattern(e.hash)); m != 0; {
			if k, m = m.next(); b.records[k%8] == e.record {
				return at, k, true
			}
		}
		if !b.full() {
			break
		}
		at = after(at)
	}
	return 0, 0, false
}

// insert adds an entry at most some buckets after its home. It returns false if there is no room.
func (s *segment) insert(e entry, distance int) (ok bool) {
	at := home(e.hash)
	for range distance + 1 {
		if b := s.bucket(at); !b.full() {
			b.set(b.room(), e)
			return true
		}
		at = after(at)
	}
	return false
}

// delete removes entry k of a bucket, and reports whether the segment may have few entries.
func (s *segment) delete(at, k uint) (few bool) {
	b := s.bucket(at)
	wasFull := b.full()
	if b.remove(k); wasFull {
		s.refill(at)
		return false
	}
	return b.records[0] == 0
}

// refill moves an entry to a bucket that is no longer full, from a bucket after it that has entries because it was.
func (s *segment) refill(hole uint) {
	for distance := uint(1); distance < segmentBuckets; distance++ {
		at := (hole + distance) % segmentBuckets
		b := &s[at]
		wasFull := b.full()
		for k := range b.len() {
			// An entry may fill the hole if its home is not after the hole.
			if e := b.entry(k); (at-home(e.hash))%segmentBuckets >= distance {
				s[hole].set(s[hole].room(), e)
				b.remove(k)
				hole, distance = at, 0
				break
			}
		}
		if !wasFull {
			return
		}
	}
}

// split moves the entries whose cursors have a bit, given by its number, to another segment, which is empty.
func (s *segment) split(bit uint, upper *segment) {
	old := *s
	*s = segment{}
	to := [2]*segment{s, upper}
	var lens [2][segmentBuckets]uint8 // of the buckets of to
	for from := range &old {
		b := &old[from]
		for k := range b.len() {
			e := b.entry(k)
			half, at := cursor(e.hash)>>bit&1, home(e.hash)
			for lens[half][at] == bucketEntries {
				at = after(at)
			}
			to[half][at].set(uint(lens[half][at]), e)
			lens[half][at]++
		}
	}
}

package hashtable

import "slices"

// minDirectory is the size up to which a directory may grow whatever the number of entries.
const minDirectory = 64

// directory is an extendible hash table of entries.
type directory struct {
	// segments has the segment of each value of the first depth bits of a cursor. Adjacent elements are the same segment
	// if its cursors share fewer bits. depths has the number of bits that they share.
	segments []*segment
	depths   []uint8
	depth    uint
	// deepest is the number of segments that only one element refers to.
	deepest int
	n       int // entries
	// overflow has further entries of full segments that may not split. So many hashes begin with the same bits only if they were chosen.
	overflow map[*segment][]entry
}

func newDirectory() directory {
	return directory{segments: []*segment{new(segment)}, depths: []uint8{0}, deepest: 1}
}

// cursor returns the cursor of a hash: the directory uses its first bits. The first bit is set for 53 of 128 hashes, so that there are √2
// times as many without the bit. Otherwise, all segments would split at about the same number of keys.
func cursor(hash uint32) uint32 {
	below := hash&0x7f - 53 // the high bit is set if that is negative
	return hash>>1 | below&(1<<31)
}

// index returns the index of a cursor.
func (d *directory) index(at uint32) uint { return uint(at) >> ((32 - d.depth) & 63) }

// segment returns the segment of a hash.
func (d *directory) segment(hash uint32) *segment { return d.segments[d.index(cursor(hash))] }

// add adds an entry, which the directory must not have.
func (d *directory) add(e entry) {
	d.n++
	at := cursor(e.hash)
	for {
		s := d.segments[d.index(at)]
		if s.insert(e, maxDistance) {
			return
		}
		if d.split(at) {
			continue
		}
		if !s.insert(e, anyDistance) {
			if d.overflow == nil {
				d.overflow = make(map[*segment][]entry)
			}
			d.overflow[s] = append(d.overflow[s], e)
		}
		return
	}
}

// remove removes an entry, which the directory must have.
func (d *directory) remove(e entry) {
	s := d.segment(e.hash)
	if at, k, ok := s.find(e); ok {
		d.removeAt(s, at, k, e.hash)
	} else {
		d.n--
		d.removeOverflow(s, d.findOverflow(s, e))
	}
}

// removeAt removes entry k of a segment's bucket.
func (d *directory) removeAt(s *segment, at, k uint, hash uint32) {
	d.n--
	switch few := s.delete(at, k); {
	case few:
		d.merge(cursor(hash))
	case len(d.overflow[s]) > 0: // only full segments have any
		s.insert(d.overflow[s][0], anyDistance)
		d.removeOverflow(s, 0)
	}
}

// replace changes the record of an entry, which the directory must have.
func (d *directory) replace(e entry, record uint32) {
	s := d.segment(e.hash)
	if at, k, ok := s.find(e); ok {
		s[at].records[k%8] = record
	} else {
		d.overflow[s][d.findOverflow(s, e)].record = record
	}
}

func (d *directory) findOverflow(s *segment, e entry) int { return slices.Index(d.overflow[s], e) }

func (d *directory) removeOverflow(s *segment, i int) {
	if all := slices.Delete(d.overflow[s], i, i+1); len(all) > 0 {
		d.overflow[s] = all
	} else {
		delete(d.overflow, s)
	}
}

// point makes the elements of all cursors that share the first bits with a cursor refer to a segment of that depth.
func (d *directory) point(at uint32, s *segment, depth uint8) {
	span := uint(1) << (d.depth - uint(depth))
	first := d.index(at) &^ (span - 1)
	for i := first; i < first+span; i++ {
		d.segments[i], d.depths[i] = s, depth
	}
}

// split divides the segment of a cursor by the next bit of the cursors. It returns false if the directory would be too large.
func (d *directory) split(at uint32) bool {
	depth := d.depths[d.index(at)]
	if uint(depth) == d.depth {
		if depth == 32 || len(d.segments) >= minDirectory && len(d.segments) > d.n/8 {
			return false
		}
		d.double()
	}
	s, upper := d.segments[d.index(at)], new(segment)
	depth++
	bit := uint(32 - depth)
	s.split(bit, upper)
	d.point(at&^(1<<bit), s, depth)
	d.point(at|1<<bit, upper, depth)
	if uint(depth) == d.depth {
		d.deepest += 2
	}
	more := d.overflow[s]
	delete(d.overflow, s)
	d.n -= len(more)
	for _, e := range more {
		d.add(e)
	}
	return true
}

func (d *directory) double() {
	d.resize(2 * len(d.segments))
	d.deepest = 0
	d.depth++
}

// halve undoes double, after which every segment was the same in two elements.
func (d *directory) halve() {
	d.resize(len(d.segments) / 2)
	d.depth--
	d.deepest = 0
	for _, depth := range d.depths {
		if uint(depth) == d.depth {
			d.deepest++
		}
	}
}

// resize replaces the elements by n elements with the same segments.
func (d *directory) resize(n int) {
	segments, depths, old := make([]*segment, n), make([]uint8, n), len(d.segments)
	for i := range n {
		segments[i], depths[i] = d.segments[i*old/n], d.depths[i*old/n]
	}
	d.segments, d.depths = segments, depths
}

// merge merges the segment of a cursor with its buddy, from which it was split, while they have few entries.
func (d *directory) merge(at uint32) {
	for {
		depth := d.depths[d.index(at)]
		if depth == 0 {
			return
		}
		other := at ^ 1<<(32-depth)
		s, buddy := d.segments[d.index(at)], d.segments[d.index(other)]
		if d.depths[d.index(other)] != depth || s.len() > mergedEntries/2 || s.len()+buddy.len() > mergedEntries {
			return
		}
		for i := range s {
			for k := range s[i].len() {
				buddy.insert(s[i].entry(k), anyDistance)
			}
		}
		if uint(depth) == d.depth {
			d.deepest -= 2
		}
		d.point(at, buddy, depth-1)
		// Not while there are many keys, so that the same few keys cannot double and halve the directory again and again.
		for d.deepest == 0 && (len(d.segments) <= minDirectory || len(d.segments) > d.n/16) {
			d.halve()
		}
	}
}

// prefetched is the number of hashes whose buckets are loaded at once.
const prefetched = 32

// prefetch loads the home buckets of up to prefetched hashes, and returns them. The sum makes the compiler keep the loads.
//
//go:noinline
func (d *directory) prefetch(hashes []uint64, buckets *[prefetched]*bucket) (sum uint32) { //nolint:unparam // see above
	for i, hash := range hashes {
		h := uint32(hash >> 32)
		buckets[i] = d.segment(h).bucket(home(h))
	}
	// So few instructions that the processor begins all loads before the first is complete.
	for _, b := range buckets[:len(hashes)] {
		sum += b.records[0]
	}
	return sum
}

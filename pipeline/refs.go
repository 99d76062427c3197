package pipeline

import (
	"unsafe"

	"github.com/kvcast/kvcast/internal/hashtable"
)

// refs is a hash table of numbers of records that are stored elsewhere, in 7 to 9 bytes a
// record: an extendible hash table as in package hashtable, but without the keys, which the
// records have. No insertion moves more than one segment.
type refs struct {
	dir   []*refSegment
	depth uint
	n     int
}

// refSegment holds the numbers of the records whose mixed keys begin with the same
// bits.
type refSegment struct {
	// refs are the numbers, 0 where a slot is empty. The low four bits of a tag are of the mixed
	// key, so that few records are compared in vain. The high four are the distance of the slot
	// from its home, at most maxAway, so that few records are read when another is removed.
	refs  []uint32
	tags  []uint8
	n     int
	depth uint
}

const (
	minRefs = 8
	maxRefs = 2048
	// maxRefDepth bounds the directory for any keys.
	maxRefDepth = 24
	// refStep is the growth of larger segments: 1 KiB of numbers.
	refStep = 1024 / int(unsafe.Sizeof(uint32(0)))
)

func newRefSegment(slots int, depth uint) *refSegment {
	return &refSegment{refs: make([]uint32, slots), tags: make([]uint8, slots), depth: depth}
}

func newRefs() refs { return refs{dir: []*refSegment{newRefSegment(minRefs, 0)}} }

func (t *refs) segment(m uint64) *refSegment { return t.dir[m>>1>>(63-t.depth)] }

const (
	tagMask   = 1<<4 - 1
	awayShift = 4
	maxAway   = 1<<4 - 1
)

// tag is other bits of a mixed key than those that choose its segment and home.
func tag(m uint64) uint8 { return uint8(m>>32) & tagMask }

func tagAway(tag uint8, away int) uint8 { return tag | uint8(min(away, maxAway))<<awayShift }

func (s *refSegment) home(m uint64) int { return hashtable.Home(m, len(s.refs)) }

// find returns the record of a mixed key for which is returns true; 0 if none.
func (t *refs) find(m uint64, is func(ref uint32) bool) uint32 {
	s := t.segment(m)
	for i := s.home(m); ; {
		ref := s.refs[i]
		if ref == 0 || s.tags[i]&tagMask == tag(m) && is(ref) {
			return ref
		}
		if i++; i == len(s.refs) {
			i = 0
		}
	}
}

// add adds a record that is not in the table. key returns the mixed key of any that is.
func (t *refs) add(m uint64, ref uint32, key func(ref uint32) uint64) {
	s := t.segment(m)
	for s.n+1 > len(s.refs)-len(s.refs)/4 {
		if len(s.refs) < maxRefs || s.depth == maxRefDepth {
			s.grow(key)
			continue
		}
		t.split(s, m, key)
		s = t.segment(m)
	}
	s.put(m, ref)
	t.n++
}

func (s *refSegment) put(m uint64, ref uint32) {
	i, away := s.home(m), 0
	for s.refs[i] != 0 {
		away++
		if i++; i == len(s.refs) {
			i = 0
		}
	}
	s.refs[i], s.tags[i] = ref, tagAway(tag(m), away)
	s.n++
}

func (s *refSegment) grow(key func(ref uint32) uint64) {
	n := 2 * len(s.refs)
	if len(s.refs) >= refStep {
		n = len(s.refs) + refStep
	}
	old := s.refs
	*s = *newRefSegment(n, s.depth)
	for _, ref := range old {
		if ref != 0 {
			s.put(key(ref), ref)
		}
	}
}

// split divides a full segment, which m belongs to, by the next bit.
func (t *refs) split(s *refSegment, m uint64, key func(ref uint32) uint64) {
	if s.depth == t.depth {
		dir := make([]*refSegment, 2*len(t.dir))
		for i, s := range t.dir {
			dir[2*i], dir[2*i+1] = s, s
		}
		t.dir = dir
		t.depth++
	}
	size := (s.n/2 + s.n/4 + refStep - 1) / refStep * refStep
	halves := [2]*refSegment{newRefSegment(size, s.depth+1), newRefSegment(size, s.depth+1)}
	for _, ref := range s.refs {
		if ref == 0 {
			continue
		}
		m := key(ref)
		half := halves[m>>(63-s.depth)&1]
		if half.n+1 > len(half.refs)-len(half.refs)/4 {
			half.grow(key)
		}
		half.put(m, ref)
	}
	span := 1 << (t.depth - s.depth)
	first := int(m>>1>>(63-t.depth)) &^ (span - 1)
	for i := range span {
		t.dir[first+i] = halves[i*2/span]
	}
}

// remove removes a record that is in the table.
func (t *refs) remove(m uint64, ref uint32, key func(ref uint32) uint64) {
	s := t.segment(m)
	hole := s.home(m)
	for s.refs[hole] != ref {
		if hole++; hole == len(s.refs) {
			hole = 0
		}
	}
	from := 1 // how far i is from the hole
	for i := hole; ; from++ {
		if i++; i == len(s.refs) {
			i = 0
		}
		if s.refs[i] == 0 {
			break
		}
		away := int(s.tags[i] >> awayShift)
		if away == maxAway {
			if away = i - s.home(key(s.refs[i])); away < 0 {
				away += len(s.refs)
			}
		}
		if away < from {
			continue // its home lies behind the hole
		}
		s.refs[hole], s.tags[hole] = s.refs[i], tagAway(s.tags[i]&tagMask, away-from)
		hole, from = i, 0
	}
	s.refs[hole] = 0
	s.n--
	t.n--
}

// slab holds records by their numbers, from 1, in chunks: a new record moves no
// other.
type slab[R any] struct {
	chunks [][]R
	// last is the highest number given out; free are the numbers given back.
	last uint32
	free []uint32
}

// slabChunk is the number of records allocated together.
const slabChunk = 1024

func (s *slab[R]) at(ref uint32) *R { return &s.chunks[ref/slabChunk][ref%slabChunk] }

// allocate returns the number of a free record, which the caller must overwrite: it may have
// been used before.
func (s *slab[R]) allocate() uint32 {
	if n := len(s.free); n > 0 {
		ref := s.free[n-1]
		s.free = s.free[:n-1]
		return ref
	}
	s.last++
	if int(s.last/slabChunk) >= len(s.chunks) {
		s.chunks = append(s.chunks, make([]R, slabChunk))
	}
	return s.last
}

func (s *slab[R]) release(ref uint32) {
	s.free = append(s.free, ref)
}

// len returns the number of records in use.
func (s *slab[R]) len() int { return int(s.last) - len(s.free) }

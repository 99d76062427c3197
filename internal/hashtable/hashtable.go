// Package hashtable has hash tables for millions of entries in which no insertion takes long:
// Table maps 64-bit keys to values, and Index finds records that are stored elsewhere.
//
// Both are extendible hash tables: a directory of segments with linear probing. A segment grows
// by small steps and then splits, so that an insertion moves the entries of one segment at most.
// Segments with more than some hundred entries are 60 to 75 % full; a Go map takes up to twice
// the memory just after it has grown. The garbage collector does not scan a table whose values
// have no pointers.
//
// Hashes depend on a random seed of the process, since engines choose block hashes, some
// counting from 1, and users choose prompts.
package hashtable

import (
	"iter"
	"math/rand/v2"
	"unsafe"
)

// Table maps keys to values of type V, each with a tag of type T. Tags are stored apart from
// the values, so that small tags need no padding; T is struct{} for a table without tags. New
// makes a table. A table is not safe for concurrent use.
type Table[V, T any] struct {
	// dir has the segment of each value of the first depth bits of a hash. Adjacent elements
	// are the same segment if its own depth is smaller.
	dir   []*Segment[V, T]
	depth uint
	n     int
}

// Segment is the part of a table with all hashes that begin with the same depth bits.
type Segment[V, T any] struct {
	// Slots are the segment's slots, used and empty; Tags are their tags, at the same indexes.
	Slots []Slot[V]
	Tags  []T
	// Note is free for use by the table's owner; it is 0 in a new segment and after a split.
	Note  uint64
	n     int
	depth uint
}

// Len returns the number of keys.
func (s *Segment[V, T]) Len() int { return s.n }

// Slot has one key or is empty.
type Slot[V any] struct {
	Value V      // first, since a zero-size last field would be padded
	hash  uint64 // 0 if the slot is empty
}

// Used reports whether the slot has a key.
func (s *Slot[V]) Used() bool { return s.hash != 0 }

// Key returns the slot's key.
func (s *Slot[V]) Key() uint64 { return unhash(s.hash) }

// Hash returns the hash of the slot's key.
func (s *Slot[V]) Hash() uint64 { return s.hash }

// SegmentBytes is the largest size of a segment's slots, which bounds the bytes that an insertion
// moves.
const SegmentBytes = 64 << 10

const (
	minSlots  = 8
	pageBytes = 8192 // growth step; Go's allocator does not round this size up
	// maxDepth bounds the directory for any hashes: 2^24 full segments exceed any memory.
	maxDepth = 24
)

var seed = rand.Uint64()

// Hash returns the hash of a key, never 0: splitmix64 of the key and the process's seed.
// Distinct keys have distinct hashes, except for one pair of keys that depends on the seed.
func Hash(key uint64) uint64 {
	x := key ^ seed
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	if x ^= x >> 31; x == 0 {
		return 1
	}
	return x
}

func unhash(x uint64) uint64 {
	x = (x ^ x>>31 ^ x>>62) * 0x319642b2d24d8ec3
	x = (x ^ x>>27 ^ x>>54) * 0x96de1b173f119089
	return x ^ x>>30 ^ x>>60 ^ seed
}

// Home returns the index at which probes for a hash begin in a segment of that many slots. It
// depends on bits 32 to 47 of the hash: the directory uses the bits above, an Index replaces
// the bits below.
func Home(hash uint64, slots int) int { return int(uint64(uint16(hash>>32)) * uint64(slots) >> 16) }

// New returns an empty table.
func New[V, T any]() Table[V, T] {
	return Table[V, T]{dir: []*Segment[V, T]{newSegment[V, T](minSlots, 0)}}
}

func newSegment[V, T any](slots int, depth uint) *Segment[V, T] {
	return &Segment[V, T]{Slots: make([]Slot[V], slots), Tags: make([]T, slots), depth: depth}
}

// Len returns the number of keys.
func (t *Table[V, T]) Len() int { return t.n }

// Find returns the segment and slot index of a key, valid until the next Put or Delete. If the
// table does not have the key, ok is false and the index has no meaning.
func (t *Table[V, T]) Find(key uint64) (s *Segment[V, T], i int, ok bool) {
	h := Hash(key)
	s = t.dir[t.index(h)]
	i, ok = s.find(h)
	return s, i, ok
}

// Put adds a key with the zero value and tag, unless the table has the key. It returns the
// key's segment and slot index, valid until the next Put or Delete, and whether the table had
// the key.
func (t *Table[V, T]) Put(key uint64) (s *Segment[V, T], i int, existed bool) {
	return t.put(Hash(key))
}

func (t *Table[V, T]) put(h uint64) (s *Segment[V, T], i int, existed bool) {
	s = t.dir[t.index(h)]
	i, ok := s.find(h)
	if ok {
		return s, i, true
	}
	for s.full() {
		if len(s.Slots) < SegmentBytes/pageBytes*slotsPerPage[V]() || s.depth == maxDepth {
			s.grow()
		} else {
			t.split(s, h)
			s = t.dir[t.index(h)]
		}
		i, _ = s.find(h)
	}
	s.Slots[i].hash = h
	s.n++
	t.n++
	return s, i, false
}

// Delete removes the key of a slot that Find or Put returned.
func (t *Table[V, T]) Delete(s *Segment[V, T], i int) {
	s.delete(i)
	t.n--
	if size := len(s.Slots); size > 8*minSlots && 5*s.n < size {
		s.resize(size / 2)
	}
}

// Get returns the value and tag of a key; ok is false if the table does not have the key.
func (t *Table[V, T]) Get(key uint64) (v V, tag T, ok bool) {
	if s, i, ok := t.Find(key); ok {
		return s.Slots[i].Value, s.Tags[i], true
	}
	return v, tag, false
}

// Set sets a key's value and tag.
func (t *Table[V, T]) Set(key uint64, v V, tag T) {
	s, i, _ := t.Put(key)
	s.Slots[i].Value, s.Tags[i] = v, tag
}

// Remove deletes a key, if the table has it.
func (t *Table[V, T]) Remove(key uint64) {
	if s, i, ok := t.Find(key); ok {
		t.Delete(s, i)
	}
}

// Clear removes all keys and frees the table's memory. It reuses the memory of a table of minimum
// size.
func (t *Table[V, T]) Clear() {
	if s := t.dir[0]; len(t.dir) > 1 || len(s.Slots) > minSlots {
		*t = New[V, T]()
	} else {
		clear(s.Slots)
		clear(s.Tags)
		s.n, s.Note, t.n = 0, 0, 0
	}
}

// SegmentAt returns the segment of a hash, and the smallest hash of the next segment: 0 if there
// is none. The smallest hash of the first segment is 0.
func (t *Table[V, T]) SegmentAt(hash uint64) (s *Segment[V, T], next uint64) {
	s = t.dir[t.index(hash)]
	if s.depth == 0 {
		return s, 0
	}
	return s, hash + 1<<(64-s.depth)
}

// Segments yields every segment once, in the order of hashes. The caller may delete keys between
// two segments; a deletion may replace the Slots of the key's segment.
func (t *Table[V, T]) Segments() iter.Seq[*Segment[V, T]] {
	return func(yield func(*Segment[V, T]) bool) {
		for i, s := range t.dir {
			if (i == 0 || t.dir[i-1] != s) && !yield(s) {
				return
			}
		}
	}
}

// Depth returns how many leading bits all the segment's hashes share.
func (s *Segment[V, T]) Depth() uint { return s.depth }

// index returns the directory index of a hash: its first depth bits.
func (t *Table[V, T]) index(hash uint64) uint64 { return hash >> 1 >> (63 - t.depth) }

// split divides a full segment, to which the hash h belongs, by the next bit of the hashes.
func (t *Table[V, T]) split(s *Segment[V, T], h uint64) {
	if s.depth == t.depth {
		dir := make([]*Segment[V, T], 2*len(t.dir))
		for i, s := range t.dir {
			dir[2*i], dir[2*i+1] = s, s
		}
		t.dir = dir
		t.depth++
	}
	size := pages[V](s.n/2 + s.n/4)
	halves := [2]*Segment[V, T]{newSegment[V, T](size, s.depth+1), newSegment[V, T](size, s.depth+1)}
	for i := range s.Slots {
		if hash := s.Slots[i].hash; hash != 0 {
			half := halves[hash>>(63-s.depth)&1]
			if half.full() {
				half.grow()
			}
			half.add(s, i)
		}
	}
	// The directory elements of s are adjacent; in the second half of them the bit is 1.
	span := uint64(1) << (t.depth - s.depth)
	first := t.index(h) &^ (span - 1)
	for i := range span {
		t.dir[first+i] = halves[2*i/span]
	}
}

func slotsPerPage[V any]() int { return pageBytes / int(unsafe.Sizeof(Slot[V]{})) }

// pages rounds a number of slots up to whole pages.
func pages[V any](slots int) int {
	page := slotsPerPage[V]()
	return (slots + page - 1) / page * page
}

// full reports whether one more key would leave fewer than a quarter of the slots empty, which
// would make probes long.
func (s *Segment[V, T]) full() bool { return s.n+1 > len(s.Slots)-len(s.Slots)/4 }

// find returns the slot index of a hash and true, or the index to insert the hash at and false.
func (s *Segment[V, T]) find(hash uint64) (int, bool) {
	slots := s.Slots
	for i := Home(hash, len(slots)); ; {
		switch slots[i].hash {
		case 0:
			return i, false
		case hash:
			return i, true
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// add copies the entry i of another segment, whose hash s does not have. s must not be full.
func (s *Segment[V, T]) add(from *Segment[V, T], i int) {
	k, _ := s.find(from.Slots[i].hash)
	s.Slots[k], s.Tags[k] = from.Slots[i], from.Tags[i]
	s.n++
}

// grow doubles the slots if they are less than a page, and otherwise adds a page.
func (s *Segment[V, T]) grow() {
	s.resize(min(2*len(s.Slots), pages[V](len(s.Slots)+1)))
}

func (s *Segment[V, T]) resize(slots int) {
	old := *s
	*s = *newSegment[V, T](slots, s.depth)
	s.Note = old.Note
	for i := range old.Slots {
		if old.Slots[i].hash != 0 {
			s.add(&old, i)
		}
	}
}

// delete empties a slot, and moves back each entry whose probes passed the slot.
func (s *Segment[V, T]) delete(hole int) {
	slots := s.Slots
	for i := hole; ; {
		if i++; i == len(slots) {
			i = 0
		}
		if slots[i].hash == 0 {
			break
		}
		// An entry whose home is after the hole stays: its probes do not pass the hole.
		if home := Home(slots[i].hash, len(slots)); between(hole, home, i) {
			continue
		}
		slots[hole], s.Tags[hole] = slots[i], s.Tags[i]
		hole = i
	}
	slots[hole] = Slot[V]{}
	var tag T
	s.Tags[hole] = tag
	s.n--
}

// between reports whether home is in (hole, i], cyclically.
func between(hole, home, i int) bool {
	if hole < i {
		return hole < home && home <= i
	}
	return hole < home || home <= i
}

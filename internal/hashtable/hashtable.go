// Package hashtable has a hash table of 64-bit keys for millions of entries whose
// writer must never stop for long.
//
// It is an extendible hash table: a directory of segments with linear probing. A segment
// grows by small steps and then splits, so that no insertion moves more than one
// segment's entries. Segments are 60 to 75 % full once they have some hundred entries,
// where a Go map takes up to twice the memory just after it has grown. Without pointers
// in its values the garbage collector does not scan the table.
//
// Engines may name blocks 1, 2, 3, and strangers choose prompts: keys are spread by a
// hash with a random seed of the process.
package hashtable

import (
	"iter"
	"math/rand/v2"
	"unsafe"
)

// Table maps keys to values of type V, each with a tag of type T. Tags are kept apart from
// the values, so that they are not padded: struct{} where there are none. A Table is made
// by New. It is not safe for concurrent use.
type Table[V, T any] struct {
	// dir has a segment for each value of the first depth bits of a hash. Several entries
	// have the same segment where that is less deep.
	dir   []*Segment[V, T]
	depth uint
	n     int
}

// Segment is the part of a table with all hashes that begin with the same bits.
type Segment[V, T any] struct {
	// Slots may be empty; see Slot.Used. Tags are parallel to them.
	Slots []Slot[V]
	Tags  []T
	// Note is for the owner of the table: 0 in a new segment and after a split.
	Note  uint64
	n     int
	depth uint // number of the bits
}

// Len returns the number of keys.
func (s *Segment[V, T]) Len() int { return s.n }

// Slot is the place of one key.
type Slot[V any] struct {
	hash  uint64 // 0 where the slot is empty
	Value V
}

// Used reports whether the slot has a key.
func (s *Slot[V]) Used() bool { return s.hash != 0 }

// Key returns the slot's key.
func (s *Slot[V]) Key() uint64 { return unhash(s.hash) }

// Hash returns the hash of the slot's key.
func (s *Slot[V]) Hash() uint64 { return s.hash }

// SegmentBytes is the size of the slots of a full segment: what an insertion moves at most.
const SegmentBytes = 64 << 10

const (
	minSlots  = 8
	pageBytes = 8192 // a size that Go's allocator does not round up
	// maxDepth bounds the directory whatever the hashes are: 2^24 segments are many more
	// than memory has room for.
	maxDepth = 24
)

var seed = rand.Uint64()

// Hash returns the hash of a key: splitmix64 of the key and the process's seed. It is one
// to one, but never 0: two of all keys, which depend on the seed, have the same hash.
func Hash(key uint64) uint64 {
	x := key ^ seed
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	if x ^= x >> 31; x == 0 {
		return 1
	}
	return x
}

// unhash returns the key of a hash.
func unhash(x uint64) uint64 {
	x = (x ^ x>>31 ^ x>>62) * 0x319642b2d24d8ec3
	x = (x ^ x>>27 ^ x>>54) * 0x96de1b173f119089
	return x ^ x>>30 ^ x>>60 ^ seed
}

// Home returns where the probes of a hash begin among some slots: its last 32 bits,
// scaled.
func Home(hash uint64, slots int) int { return int(uint64(uint32(hash)) * uint64(slots) >> 32) }

// New returns an empty table.
func New[V, T any]() Table[V, T] {
	return Table[V, T]{dir: []*Segment[V, T]{newSegment[V, T](minSlots, 0)}}
}

func newSegment[V, T any](slots int, depth uint) *Segment[V, T] {
	return &Segment[V, T]{Slots: make([]Slot[V], slots), Tags: make([]T, slots), depth: depth}
}

// Len returns the number of keys.
func (t *Table[V, T]) Len() int { return t.n }

// Find returns where a key is, valid until the next Put or Delete. ok is false, and the
// place meaningless, where the table does not have it.
func (t *Table[V, T]) Find(key uint64) (s *Segment[V, T], i int, ok bool) {
	h := Hash(key)
	s = t.dir[t.index(h)]
	i, ok = s.find(h)
	return s, i, ok
}

// Put adds a key with the zero value and tag, if the table does not have it. It returns the
// key's place, valid until the next Put or Delete, and whether the key already existed.
func (t *Table[V, T]) Put(key uint64) (s *Segment[V, T], i int, existed bool) {
	h := Hash(key)
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

// Delete removes the key that Find or Put returned the place of.
func (t *Table[V, T]) Delete(s *Segment[V, T], i int) {
	s.delete(i)
	t.n--
	if size := len(s.Slots); size > 8*minSlots && 5*s.n < size {
		s.resize(size / 2)
	}
}

// Get returns a key's value and tag; ok is false where the table does not have it.
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

// Clear removes all keys and frees the table's memory. It allocates nothing where the
// table is small.
func (t *Table[V, T]) Clear() {
	if s := t.dir[0]; len(t.dir) > 1 || len(s.Slots) > minSlots {
		*t = New[V, T]()
	} else {
		clear(s.Slots)
		clear(s.Tags)
		s.n, s.Note, t.n = 0, 0, 0
	}
}

// SegmentAt returns the segment of the hashes from a hash on, at which it begins, and the
// hash that the next segment begins with: 0 after the last. The first begins with 0.
func (t *Table[V, T]) SegmentAt(hash uint64) (s *Segment[V, T], next uint64) {
	s = t.dir[t.index(hash)]
	if s.depth == 0 {
		return s, 0
	}
	return s, hash + 1<<(64-s.depth)
}

// Segments yields every segment once, in the order of hashes. Keys may be deleted
// meanwhile, which may replace the slots of their segment.
func (t *Table[V, T]) Segments() iter.Seq[*Segment[V, T]] {
	return func(yield func(*Segment[V, T]) bool) {
		for i, s := range t.dir {
			if (i == 0 || t.dir[i-1] != s) && !yield(s) {
				return
			}
		}
	}
}

// Depth returns how many first bits the segment's hashes have in common.
func (s *Segment[V, T]) Depth() uint { return s.depth }

// index returns that of a hash in the directory: its first depth bits.
func (t *Table[V, T]) index(hash uint64) uint64 { return hash >> 1 >> (63 - t.depth) }

// split divides a full segment, which has the hash h, by the next bit.
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
	// The directory's entries of s are adjacent. Those of the second half have the bit.
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

// full reports whether one more key would leave too few empty slots for short probes:
// fewer than a quarter.
func (s *Segment[V, T]) full() bool { return s.n+1 > len(s.Slots)-len(s.Slots)/4 }

// find returns where a hash is, or where it would be put.
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

// add copies an entry of another segment that is not here and that there is room for.
func (s *Segment[V, T]) add(from *Segment[V, T], i int) {
	k, _ := s.find(from.Slots[i].hash)
	s.Slots[k], s.Tags[k] = from.Slots[i], from.Tags[i]
	s.n++
}

// grow adds slots: it doubles them while they are few, and then adds a page.
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

// delete empties a slot, and moves the entries back that were probed past it.
func (s *Segment[V, T]) delete(hole int) {
	slots := s.Slots
	for i := hole; ; {
		if i++; i == len(slots) {
			i = 0
		}
		if slots[i].hash == 0 {
			break
		}
		// The entry may fill the hole unless its home lies behind the hole, cyclically.
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

// Package hashtable has hash tables for millions of entries in which no insertion takes long:
// Table maps 64-bit keys to values, and Index finds records that are stored elsewhere.
//
// Both are extendible hash tables: a directory of segments of 30 entries each. A full segment
// splits in two, which moves half of its entries; on average, an entry moves 0.7 times. Segments
// are about 68 % full. The garbage collector does not scan segments whose values have no pointers.
//
// A lookup reads the directory, and then the segment's first cache line and the key's home slot, where
// it usually is. Prefetch makes the cache misses of several lookups overlap.
//
// Hashes depend on a random seed of the process, since engines choose block hashes, some
// counting from 1, and users choose prompts.
package hashtable

import (
	"iter"
	"math/rand/v2"
)

// Table maps keys to values of type V, each with a tag of type T. Tags are stored apart from
// the values, so that small tags need no padding; T is struct{} for a table without tags. New
// makes a table. A table is not safe for concurrent use.
type Table[V, T any] struct {
	// dir has the segment of each value of depth bits of a cursor, which follow the first base
	// bits. Adjacent elements are the same segment if it shares more bits.
	dir         []*Segment[V, T]
	base, depth uint
	// deepest is the number of segments that only one element of dir refers to.
	deepest int
	n       int // keys, without those in nested tables unless base is 0
	// nested are tables with a base, by nestedKey. They bound the directory for
	// any hashes.
	nested map[uint64]*Table[V, T]
}

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

// cursor returns the cursor of a hash, see Table.SegmentAt: the directory uses its first bits. The first bit is set for
// 53 of 128 hashes, so that there are √2 times as many without the bit. Otherwise, all segments would
// split at about the same number of keys, and be 65 % full afterwards.
//
// The first 33 bits do not depend on the low 32 bits of the hash, which an Index replaces.
func cursor(hash uint64) uint64 {
	below := hash>>32&0x7f - 53 // the high bit is set if that is negative
	return hash>>1 | below&(1<<63)
}

// New returns an empty table.
func New[V, T any]() Table[V, T] {
	return Table[V, T]{dir: []*Segment[V, T]{new(Segment[V, T])}, deepest: 1}
}

// Len returns the number of keys.
func (t *Table[V, T]) Len() int { return t.n }

// Find returns the segment and slot index of a key, valid until the next Put or Delete. If the
// table does not have the key, ok is false and the index has no meaning.
func (t *Table[V, T]) Find(key uint64) (s *Segment[V, T], i int, ok bool) {
	_, s, i, ok = t.find(Hash(key))
	return s, i, ok
}

// Put adds a key with the zero value and tag, unless the table has the key. It returns the
// key's segment and slot index, valid until the next Put or Delete, and whether the table had
// the key.
func (t *Table[V, T]) Put(key uint64) (s *Segment[V, T], i int, existed bool) {
	return t.put(Hash(key))
}

func (t *Table[V, T]) put(h uint64) (s *Segment[V, T], i int, existed bool) {
	in, s, i, existed := t.find(h)
	if existed {
		return s, i, true
	}
	for s.used == allUsed {
		in.split(s, cursor(h))
		in, s = t.locate(cursor(h))
	}
	t.n++
	if in != t {
		in.n++
	}
	return s, s.insert(h), false
}

// Delete removes the key of a slot that Find or Put returned.
func (t *Table[V, T]) Delete(s *Segment[V, T], i int) {
	at := s.Slots[i].Cursor()
	s.delete(i)
	t.n--
	few := s.Len() <= mergedKeys
	if t.nested == nil && !few {
		return
	}
	in, _ := t.locate(at)
	if in != t {
		in.n--
	}
	for few {
		if in != t && uint(s.depth) == in.base {
			in = t.unnest(in, at)
		}
		if s = in.merge(s, at); s == nil {
			return
		}
		few = s.Len() <= mergedKeys
	}
}

// Prefetch loads the segments of some keys, so that the cache misses of the following calls for
// these keys overlap.
func (t *Table[V, T]) Prefetch(keys []uint64) {
	for len(keys) > prefetched {
		t.prefetch(keys[:prefetched])
		keys = keys[prefetched:]
	}
	t.prefetch(keys)
}

// prefetched is the number of keys whose segments are loaded at once.
const prefetched = 32

// prefetch loads the segments of up to prefetched keys. The sum makes the compiler keep the loads.
//
//go:noinline
func (t *Table[V, T]) prefetch(keys []uint64) (sum uint64) {
	var segments [prefetched]*Segment[V, T]
	var homes [prefetched]uint8
	for i, key := range keys {
		h := Hash(key)
		segments[i], homes[i] = t.dir[t.index(cursor(h))], uint8(home(h))
	}
	// So few instructions that the processor begins all loads before the first is complete.
	for i, s := range segments[:len(keys)] {
		sum += uint64(s.used) + s.Slots[homes[i]].hash
	}
	return sum
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

// Clear removes all keys and frees the table's memory. It reuses the memory of a table with one
// segment.
func (t *Table[V, T]) Clear() {
	if s := t.dir[0]; len(t.dir) == 1 && t.nested == nil {
		*s = Segment[V, T]{}
		t.n = 0
	} else {
		*t = New[V, T]()
	}
}

// SegmentAt returns the segment of a cursor, and the cursor of the next segment: 0 if there is none.
// The cursor of the first segment is 0.
//
// If the table changes between two calls, the segment may have keys of segments seen before. They
// are the keys whose Slot.Cursor is below the cursor. A caller that ignores them sees every key that
// stays exactly once.
func (t *Table[V, T]) SegmentAt(cursor uint64) (s *Segment[V, T], next uint64) {
	_, s = t.locate(cursor)
	if s.depth == 0 {
		return s, 0
	}
	rest := 64 - s.depth
	return s, (cursor>>rest + 1) << rest
}

// Segments yields every segment once. The caller may delete keys between two segments; the following
// segments may then have keys of segments that were yielded before.
func (t *Table[V, T]) Segments() iter.Seq[*Segment[V, T]] {
	return func(yield func(*Segment[V, T]) bool) {
		for at := uint64(0); ; {
			s, next := t.SegmentAt(at)
			if !yield(s) || next == 0 {
				return
			}
			at = next
		}
	}
}

package hashtable

import (
	"iter"
	"slices"
)

const (
	// chunkSlots is the number of slots that are allocated together; fewer for the first of them.
	chunkSlots = 512
	minSlots   = 8
	// maxHoles bounds the holes of a table. An engine that is full removes about as many blocks as it then stores.
	maxHoles = 64
)

// Table maps keys to values of type V. New makes a table. A table is not safe for concurrent use.
type Table[V any] struct {
	dir directory
	// chunks has the slots by record number. The first slot is unused.
	chunks [][]Slot[V]
	// holes are the numbers of slots without a key that are not after all others; the last is used next.
	holes []uint32
}

// Slot has one key.
type Slot[V any] struct {
	Value V // first, since a zero-size last field would be padded
	hash  uint64
}

// Key returns the slot's key.
func (s *Slot[V]) Key() uint64 { return unhash(s.hash) }

// Cursor returns the cursor of the slot's key, see Table.SegmentAt.
func (s *Slot[V]) Cursor() uint64 { return uint64(cursor(uint32(s.hash>>32))) << 32 }

// New returns an empty table.
func New[V any]() Table[V] {
	return Table[V]{dir: newDirectory(), chunks: [][]Slot[V]{make([]Slot[V], minSlots)}}
}

// Len returns the number of keys.
func (t *Table[V]) Len() int { return t.dir.n }

// Slots returns the number of slots: those of the keys, and a few without one.
func (t *Table[V]) Slots() int { return t.dir.n + len(t.holes) }

// At returns a slot, valid until the next Put or Delete, by its number, from 1 on; nil if it has no key. A deleted slot may get the key of
// the last slot; the other keys keep their slots.
func (t *Table[V]) At(number int) *Slot[V] {
	if number > t.Slots() {
		return nil // they were freed since
	}
	if s := t.slot(uint32(number)); s.hash != 0 {
		return s
	}
	return nil
}

func (t *Table[V]) slot(record uint32) *Slot[V] {
	return &t.chunks[record/chunkSlots][record%chunkSlots]
}

// All yields the slot of each key. The caller may delete the slot that it was given.
func (t *Table[V]) All() iter.Seq[*Slot[V]] {
	return func(yield func(*Slot[V]) bool) {
		for number := t.Slots(); number > 0; number-- {
			if s := t.At(number); s != nil && !yield(s) {
				return
			}
		}
	}
}

// Find returns the slot of a key, valid until the next Put or Delete; nil if the table does not have the key.
func (t *Table[V]) Find(key uint64) *Slot[V] { return t.find(Hash(key)) }

func (t *Table[V]) find(hash uint64) *Slot[V] {
	h := uint32(hash >> 32)
	s, at := t.dir.segment(h), home(h)
	for range segmentBuckets {
		b := s.bucket(at)
		for m := b.match(pattern(h)); m != 0; {
			var k uint
			k, m = m.next()
			if found := t.slot(b.records[k]); found.hash == hash { // not that of the first slot, which is 0
				return found
			}
		}
		if !b.full() {
			return nil
		}
		at = after(at)
	}
	for _, e := range t.dir.overflow[s] {
		if found := t.slot(e.record); found.hash == hash {
			return found
		}
	}
	return nil
}

// Put adds a key with the zero value, unless the table has the key. It returns the key's slot, valid until the next Put
// or Delete, and whether the table had the key.
func (t *Table[V]) Put(key uint64) (s *Slot[V], existed bool) { return t.put(Hash(key)) }

func (t *Table[V]) put(hash uint64) (s *Slot[V], existed bool) {
	e, holes := newEntry(hash, uint32(t.dir.n+1)), len(t.holes)
	if holes > 0 {
		e.record = t.holes[holes-1]
	}
	b := t.dir.segment(e.hash).bucket(home(e.hash))
	// Most new keys have room in their home bucket, and no hash of it.
	if b.full() || b.match(pattern(e.hash)) != 0 {
		if found := t.find(hash); found != nil {
			return found, true
		}
		t.dir.add(e)
	} else {
		b.set(b.room(), e)
		t.dir.n++
	}
	if holes > 0 {
		t.holes = t.holes[:holes-1]
	} else if last := len(t.chunks) - 1; int(e.record) == last*chunkSlots+len(t.chunks[last]) {
		t.grow(last)
	}
	s = t.slot(e.record)
	s.hash = hash
	return s, false
}

// PutNew adds keys, each with the value that a function returns for its index, as long as the table does not have them. It returns how many it has
// added. The cache misses of several keys overlap.
func (t *Table[V]) PutNew(keys []uint64, value func(i int) V) (n int) {
	var (
		hashes  [prefetched]uint64
		buckets [prefetched]*bucket
	)
	for n < len(keys) {
		some := keys[n:min(len(keys), n+prefetched)]
		for i, key := range some {
			hashes[i%prefetched] = Hash(key)
		}
		t.dir.prefetch(hashes[:len(some)], &buckets)
		for i := range some {
			s, existed := t.put(hashes[i%prefetched])
			if existed {
				return n
			}
			s.Value = value(n)
			n++
		}
	}
	return n
}

// grow adds slots. Only the first chunk, which is the last one too, can have less than chunkSlots.
func (t *Table[V]) grow(last int) {
	if n := len(t.chunks[last]); n == chunkSlots {
		t.chunks = append(t.chunks, make([]Slot[V], chunkSlots))
	} else {
		t.resizeFirst(2 * n)
	}
}

func (t *Table[V]) resizeFirst(slots int) {
	first := make([]Slot[V], slots)
	copy(first, t.chunks[0])
	t.chunks[0] = first
}

// Delete removes the key of a slot. The slot then has no key, or that of the last slot.
func (t *Table[V]) Delete(s *Slot[V]) {
	record := t.removeEntry(s)
	*s = Slot[V]{}
	if t.holes = append(t.holes, record); len(t.holes) > min(maxHoles, t.dir.n/16) {
		t.fillHole()
	}
	if t.dir.n == 0 && len(t.holes) > 0 {
		t.chunks, t.holes = [][]Slot[V]{make([]Slot[V], minSlots)}, nil
	}
}

// fillHole makes one hole less, and one slot: the last slot was a hole, or moves to the last hole.
func (t *Table[V]) fillHole() {
	end, i := uint32(t.Slots()), len(t.holes)-1
	if last := t.slot(end); last.hash == 0 {
		i = slices.Index(t.holes, end)
	} else {
		t.dir.replace(newEntry(last.hash, end), t.holes[i])
		*t.slot(t.holes[i]), *last = *last, Slot[V]{}
	}
	t.holes = slices.Delete(t.holes, i, i+1)
	t.shrink(int(end))
}

// removeEntry removes the entry of a slot, and returns the slot's number.
func (t *Table[V]) removeEntry(slot *Slot[V]) (record uint32) {
	h := uint32(slot.hash >> 32)
	s, at := t.dir.segment(h), home(h)
	for range segmentBuckets {
		b := s.bucket(at)
		for m := b.match(pattern(h)); m != 0; {
			var k uint
			if k, m = m.next(); t.slot(b.records[k]) == slot {
				record = b.records[k]
				t.dir.removeAt(s, at, k, h)
				return record
			}
		}
		at = after(at)
	}
	i := slices.IndexFunc(t.dir.overflow[s], func(e entry) bool { return t.slot(e.record) == slot })
	record = t.dir.overflow[s][i].record
	t.dir.remove(entry{h, record})
	return record
}

// shrink frees slots that are not needed, and not soon needed again, for a number of keys.
func (t *Table[V]) shrink(n int) {
	if last := len(t.chunks) - 1; last > 0 {
		if n < last*chunkSlots-chunkSlots/2 {
			t.chunks[last] = nil
			t.chunks = t.chunks[:last]
		}
	} else if slots := len(t.chunks[0]); slots > minSlots && n < slots/4 {
		t.resizeFirst(slots / 2)
	}
}

// Prefetch loads the buckets and slots of some keys, so that the cache misses of the following calls for these keys overlap.
func (t *Table[V]) Prefetch(keys []uint64) {
	var (
		hashes  [prefetched]uint64
		buckets [prefetched]*bucket
	)
	for len(keys) > 0 {
		n := min(len(keys), prefetched)
		for i, key := range keys[:n] {
			hashes[i] = Hash(key)
		}
		t.dir.prefetch(hashes[:n], &buckets)
		t.prefetch(hashes[:n], &buckets)
		keys = keys[n:]
	}
}

// prefetch loads the slots of hashes whose home buckets are given. The sum makes the compiler keep the loads.
//
//go:noinline
func (t *Table[V]) prefetch(hashes []uint64, buckets *[prefetched]*bucket) (sum uint64) {
	for i, hash := range hashes {
		if m := buckets[i].match(pattern(uint32(hash >> 32))); m != 0 {
			k, _ := m.next()
			sum += t.slot(buckets[i].records[k]).hash
		}
	}
	return sum
}

// Get returns the value of a key; ok is false if the table does not have the key.
func (t *Table[V]) Get(key uint64) (v V, ok bool) {
	if s := t.Find(key); s != nil {
		return s.Value, true
	}
	return v, false
}

// Segment is the slots whose cursors begin with the same bits. It is valid until the next Put or Delete.
type Segment[V any] struct {
	table    *Table[V]
	segment  *segment
	overflow []entry
}

// MaxSegment is the number of slots of a segment at most, unless hashes are chosen.
const MaxSegment = segmentEntries

// SegmentAt returns the segment of a cursor, and the cursor of the next segment: 0 if there is none. The cursor of the first segment is 0.
//
// If the table changes between two calls, the segment may have keys of segments seen before. They are the keys whose Slot.Cursor is below
// the cursor. A caller that ignores them sees every key that stays exactly once.
func (t *Table[V]) SegmentAt(at uint64) (s Segment[V], next uint64) {
	i := t.dir.index(uint32(at >> 32))
	segment := t.dir.segments[i]
	if depth := t.dir.depths[i]; depth > 0 {
		rest := 64 - depth
		next = (at>>rest + 1) << rest
	}
	return Segment[V]{t, segment, t.dir.overflow[segment]}, next
}

// Len returns the number of indexes, of which some have no slot.
func (s Segment[V]) Len() int { return segmentEntries + len(s.overflow) }

// At returns the slot at an index; nil if there is none.
func (s Segment[V]) At(i int) *Slot[V] {
	if i >= segmentEntries {
		return s.table.slot(s.overflow[i-segmentEntries].record)
	}
	if record := s.segment[i/bucketEntries].records[i%bucketEntries]; record != 0 {
		return s.table.slot(record)
	}
	return nil
}

// Prefetch loads all slots, so that their cache misses overlap. The sum makes the compiler keep the loads.
//
//go:noinline
func (s Segment[V]) Prefetch() (sum uint64) {
	for at := range s.segment {
		for _, record := range &s.segment[at].records {
			sum += s.table.slot(record).hash
		}
	}
	return sum
}

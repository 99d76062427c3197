package hashtable

import "math/bits"

// SegmentSlots is the number of slots of a segment. A segment of 24-byte slots has 760 bytes, which Go's
// allocator rounds up to 768.
const SegmentSlots = 30

// Delete merges a segment of up to mergedKeys keys with its buddy, if together they have up to
// mergedSum keys. With smaller values, a table whose keys are replaced all the time would have more
// memory: 50 bytes a key of a 24-byte slot with half of them, in place of 40.
const (
	mergedKeys = 14
	mergedSum  = 28
)

// Segment has up to SegmentSlots keys: those whose cursors begin with the same bits. Its keys are in
// any slots; the other slots are zero.
type Segment[V, T any] struct {
	used   uint32 // a bit of each slot that has a key
	depth  uint8  // number of bits that the cursors share
	nested bool   // the keys are in a nested table
	// controls has a byte of each slot: 0 if it is empty, and otherwise seven bits of its hash
	// below a set bit.
	controls [4]uint64
	// Tags are the tags of Slots, at the same indexes.
	Tags  [SegmentSlots]T
	Slots [SegmentSlots]Slot[V]
}

const allUsed = 1<<SegmentSlots - 1

// Len returns the number of keys.
func (s *Segment[V, T]) Len() int { return bits.OnesCount32(s.used) }

// Slot has one key or is empty.
type Slot[V any] struct {
	Value V      // first, since a zero-size last field would be padded
	hash  uint64 // 0 if the slot is empty
}

// Used reports whether the slot has a key.
func (s *Slot[V]) Used() bool { return s.hash != 0 }

// Key returns the slot's key.
func (s *Slot[V]) Key() uint64 { return unhash(s.hash) }

// Cursor returns the cursor of the slot's key, see Table.SegmentAt.
func (s *Slot[V]) Cursor() uint64 { return cursor(s.hash) }

const (
	eachByte = 0x0101010101010101
	highBits = 0x8080808080808080
)

// control returns the control byte of a hash. It depends on bits 40 to 46: the directory uses the bits
// above and those from 32 to 38, and an Index replaces the bits below.
func control(hash uint64) uint64 { return hash>>40&0x7f | 0x80 }

// matches returns the high bits of the bytes of controls that equal the control byte of a pattern of
// eight. It may return bits of other used slots too.
func matches(controls, pattern uint64) uint64 {
	x := controls ^ pattern
	return (x - eachByte) &^ x & highBits
}

// home returns the slot in which a hash is if the slot was empty, and otherwise after which it is,
// cyclically. It depends on bits 39 to 46.
func home(hash uint64) int { return int(hash >> 39 & 0xff * SegmentSlots >> 8) }

// find returns the slot index of a hash; ok is false if the segment does not have the hash.
func (s *Segment[V, T]) find(hash uint64) (i int, ok bool) {
	// Most keys are in their home slot, which the processor loads while it loads controls.
	if i = home(hash); s.Slots[i].hash == hash {
		return i, true
	}
	pattern := control(hash) * eachByte
	found := [4]uint64{
		matches(s.controls[0], pattern), matches(s.controls[1], pattern),
		matches(s.controls[2], pattern), matches(s.controls[3], pattern),
	}
	if found[0]|found[1]|found[2]|found[3] == 0 { // one branch for most keys that the segment does not have
		return 0, false
	}
	for w, m := range found {
		for ; m != 0; m &= m - 1 {
			if i := 8*w + bits.TrailingZeros64(m)/8; s.Slots[i].hash == hash {
				return i, true
			}
		}
	}
	return 0, false
}

// insert adds a hash, and returns its slot index. s must not be full.
func (s *Segment[V, T]) insert(hash uint64) (i int) {
	i = home(hash)
	if after := ^s.used & allUsed >> i << i; after != 0 {
		i = bits.TrailingZeros32(after)
	} else {
		i = bits.TrailingZeros32(^s.used)
	}
	s.used |= 1 << i
	s.controls[i/8] |= control(hash) << (8 * (i % 8))
	s.Slots[i].hash = hash
	return i
}

// delete empties a slot.
func (s *Segment[V, T]) delete(i int) {
	var none T
	s.used &^= 1 << i
	s.controls[i/8] &^= 0xff << (8 * (i % 8))
	s.Slots[i], s.Tags[i] = Slot[V]{}, none
}

// move adds an entry to another segment, and removes it from this one.
func (s *Segment[V, T]) move(i int, to *Segment[V, T]) {
	k := to.insert(s.Slots[i].hash)
	to.Slots[k], to.Tags[k] = s.Slots[i], s.Tags[i]
	s.delete(i)
}

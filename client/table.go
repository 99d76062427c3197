package client

import "math/bits"

// table is a hash table of 64-bit keys with a value each, and a tag byte where it
// is asked for: open addressing with linear probing, at a load of 0.53 to 0.8 once
// it grows, so that an entry takes 20 to 30 bytes, and 2 more with a tag. Go's own
// map takes up to twice that, and grows a value to its alignment.
//
// It consists of segments that grow by themselves, so that no single operation has
// to move more than a small part of a large table: readers wait for those.
type table struct {
	seed     uint64
	shift    uint8 // 64 minus the bits that choose the segment
	tagged   bool
	segments []segment
	n        int

	// The key 0, which marks a free slot.
	zero    slot
	zeroTag uint8
	hasZero bool
}

type segment struct {
	slots []slot
	tags  []uint8 // nil where the table has none
	n     int
}

type slot struct{ key, val uint64 }

// minSlots is what a segment begins with.
const minSlots = 8

// newTable returns a table of 1<<bits segments.
func newTable(bits uint8, seed uint64, tagged bool) *table {
	return &table{seed: seed, shift: 64 - bits, tagged: tagged, segments: make([]segment, 1<<bits)}
}

// hash spreads keys: engines may name blocks 1, 2, 3, and prompts are chosen by
// strangers, who do not know the seed.
func (t *table) hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^t.seed, 0x9e3779b97f4a7c15)
	hi, lo = bits.Mul64(hi^lo^t.seed>>32, 0xbf58476d1ce4e5b9)
	return hi ^ lo
}

// home is where a key of a segment is looked for first.
func (t *table) home(hash uint64, slots int) int {
	hi, _ := bits.Mul64(hash<<(64-t.shift), uint64(slots))
	return int(hi)
}

// at returns the segment that a key belongs to, and its slot there, or -1.
func (t *table) at(key uint64) (*segment, int) {
	h := t.hash(key)
	s := &t.segments[h>>t.shift]
	if s.n == 0 {
		return s, -1
	}
	for i := t.home(h, len(s.slots)); ; {
		switch s.slots[i].key {
		case key:
			return s, i
		case 0:
			return s, -1
		}
		if i++; i == len(s.slots) {
			i = 0
		}
	}
}

// get returns a key's value.
func (t *table) get(key uint64) (val uint64, ok bool) {
	if key == 0 {
		return t.zero.val, t.hasZero
	}
	s, i := t.at(key)
	if i < 0 {
		return 0, false
	}
	return s.slots[i].val, true
}

// tag returns a key's value and tag, of a table that has tags.
func (t *table) tag(key uint64) (val uint64, tag uint8, ok bool) {
	if key == 0 {
		return t.zero.val, t.zeroTag, t.hasZero
	}
	s, i := t.at(key)
	if i < 0 {
		return 0, 0, false
	}
	return s.slots[i].val, s.tags[i], true
}

// put sets a key's value and tag.
func (t *table) put(key, val uint64, tag uint8) {
	if key == 0 {
		if !t.hasZero {
			t.n++
		}
		t.zero.val, t.zeroTag, t.hasZero = val, tag, true
		return
	}
	s, i := t.at(key)
	if i < 0 {
		if 5*(s.n+1) > 4*len(s.slots) {
			t.resize(s, max(minSlots, len(s.slots)+len(s.slots)/2))
		}
		i = t.insert(s, key)
		s.n++
		t.n++
	}
	s.slots[i].val = val
	if t.tagged {
		s.tags[i] = tag
	}
}

// insert gives a slot to a key that has none.
func (t *table) insert(s *segment, key uint64) int {
	i := t.home(t.hash(key), len(s.slots))
	for s.slots[i].key != 0 {
		if i++; i == len(s.slots) {
			i = 0
		}
	}
	s.slots[i].key = key
	return i
}

// remove forgets a key.
func (t *table) remove(key uint64) {
	if key == 0 {
		if t.hasZero {
			t.n--
		}
		t.zero, t.zeroTag, t.hasZero = slot{}, 0, false
		return
	}
	s, i := t.at(key)
	if i < 0 {
		return
	}
	s.n--
	t.n--
	// Those behind it close up, where that brings none before its home.
	size := len(s.slots)
	for j := i; ; {
		if j++; j == size {
			j = 0
		}
		k := s.slots[j].key
		if k == 0 {
			break
		}
		home := t.home(t.hash(k), size)
		if away := (j - home + size) % size; away < (j-i+size)%size {
			continue
		}
		s.slots[i] = s.slots[j]
		if t.tagged {
			s.tags[i] = s.tags[j]
		}
		i = j
	}
	s.slots[i] = slot{}
	if size > 64 && 5*s.n < size {
		t.resize(s, size/2)
	}
}

func (t *table) resize(s *segment, size int) {
	old := *s
	s.slots = make([]slot, size)
	if t.tagged {
		s.tags = make([]uint8, size)
	}
	for i, o := range old.slots {
		if o.key == 0 {
			continue
		}
		j := t.insert(s, o.key)
		s.slots[j].val = o.val
		if t.tagged {
			s.tags[j] = old.tags[i]
		}
	}
}

// each calls f with every key of a segment; the key 0 belongs to the first. The
// table must not be changed meanwhile.
func (t *table) each(seg int, f func(key, val uint64, tag uint8)) {
	if seg == 0 && t.hasZero {
		f(0, t.zero.val, t.zeroTag)
	}
	s := &t.segments[seg]
	for i, o := range s.slots {
		if o.key == 0 {
			continue
		}
		tag := uint8(0)
		if t.tagged {
			tag = s.tags[i]
		}
		f(o.key, o.val, tag)
	}
}

package pipeline

import (
	"iter"
	"math/rand/v2"
	"unsafe"

	"github.com/kvcast/kvcast/ingest/wire"
)

// blocks is a hash table of blocks by block hash: extendible hashing over
// segments with linear probing. A Go map of these would take up to 90 bytes a
// block just after it has grown, and two lookups for a change.
//
// A segment is 60 to 75 % full once it has grown beyond some hundred blocks, so
// that a block takes 43 to 53 bytes; fuller ones probe for long. It grows by small steps up to
// maxSegment slots, and then splits: no insertion moves more than one segment's
// blocks, which is what bounds how long a lane is held up. Segments do not
// shrink.
type blocks struct {
	// dir has a segment for each value of the first depth bits of a mixed hash;
	// several point to one segment where that is less deep.
	dir   []*segment
	depth uint
	n     int
	// digest is the XOR of splitmix64 over the hashes of all blocks.
	digest uint64
	age    age
}

// segment holds the blocks whose mixed hashes begin with the same bits.
type segment struct {
	slots []block
	n     int
	depth uint // how many bits those are
	// stale is how many of its blocks were as of a generation, see age.
	generation, stale uint32
}

const (
	// slotsPerPage is how many slots fill 8 KiB, which Go's allocator wastes
	// nothing of.
	slotsPerPage = 8192 / int(unsafe.Sizeof(block{}))
	minSegment   = 8
	maxSegment   = 8 * slotsPerPage
	// maxDepth bounds the directory, whatever the hashes: 2^24 segments are many
	// more than there can be blocks for.
	maxDepth = 24
)

// mixSeed makes it hard to choose block hashes that collide.
var mixSeed = rand.Uint64()

// mix spreads a hash over all bits. It is one to one (splitmix64).
func mix(hash uint64) uint64 {
	x := hash ^ mixSeed
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func newBlocks() blocks {
	return blocks{dir: []*segment{{slots: make([]block, minSegment)}}}
}

func (t *blocks) len() int { return t.n }

// find returns where a block is, good until the next put or delete.
func (t *blocks) find(hash uint64) (s *segment, i int, ok bool) {
	m := mix(hash)
	s = t.segment(m)
	i, ok = s.find(hash, m)
	return s, i, ok
}

// put returns a block's slot, good until the next put or delete, and whether it
// was there. A new slot has its hash, and nothing else but that it is held. The
// block is stale no longer.
func (t *blocks) put(hash uint64) (b *block, held bool) {
	m := mix(hash)
	s := t.segment(m)
	i, ok := s.find(hash, m)
	if ok {
		if t.age.stale(&s.slots[i]) {
			t.refresh(s, i)
		}
		return &s.slots[i], true
	}
	for s.full() {
		if len(s.slots) < maxSegment || s.depth == maxDepth {
			s.grow()
		} else {
			t.split(s, m)
			s = t.segment(m)
		}
		i, _ = s.find(hash, m)
	}
	s.reach(t.age.generation)
	s.n++
	t.n++
	t.digest ^= wire.BlockDigest(hash)
	s.slots[i] = block{hash: hash, flags: flagHeld | t.age.mark()}
	return &s.slots[i], false
}

// delete takes out a block that find returned, and that is not stale.
func (t *blocks) delete(s *segment, i int) {
	t.digest ^= wire.BlockDigest(s.slots[i].hash)
	s.delete(i)
	t.n--
}

func (t *blocks) segment(m uint64) *segment { return t.dir[t.index(m)] }

// index is that of a mixed hash in the directory: its first depth bits.
func (t *blocks) index(m uint64) uint64 { return m >> 1 >> (63 - t.depth) }

// split divides a full segment, which m belongs to, by the next bit.
func (t *blocks) split(s *segment, m uint64) {
	if s.depth == t.depth {
		t.double()
	}
	bit := uint64(1) << (63 - s.depth)
	size := pages(s.n/2 + s.n/4)
	zero := &segment{slots: make([]block, size), depth: s.depth + 1, generation: t.age.generation}
	one := &segment{slots: make([]block, size), depth: s.depth + 1, generation: t.age.generation}
	for i := range s.slots {
		if b := &s.slots[i]; b.flags&flagHeld != 0 {
			half := zero
			if mix(b.hash)&bit != 0 {
				half = one
			}
			half.add(b)
			if t.age.stale(b) {
				half.stale++
			}
		}
	}
	// The directory's entries for s are adjacent; the second half has the bit.
	span := uint64(1) << (t.depth - s.depth)
	first := t.index(m) &^ (span - 1)
	for i := range span {
		if i < span/2 {
			t.dir[first+i] = zero
		} else {
			t.dir[first+i] = one
		}
	}
}

// segments yields every segment once.
func (t *blocks) segments() iter.Seq[*segment] {
	return func(yield func(*segment) bool) {
		for i, s := range t.dir {
			if (i == 0 || t.dir[i-1] != s) && !yield(s) {
				return
			}
		}
	}
}

// after returns the mixed hash that the next segment begins with, given the one
// that this begins with: 0 after the last.
func (s *segment) after(first uint64) uint64 {
	if s.depth == 0 {
		return 0
	}
	return first + 1<<(64-s.depth)
}

// double makes the directory one bit deeper.
func (t *blocks) double() {
	dir := make([]*segment, 2*len(t.dir))
	for i, s := range t.dir {
		dir[2*i], dir[2*i+1] = s, s
	}
	t.dir = dir
	t.depth++
}

// pages rounds a number of slots up to whole pages.
func pages(slots int) int {
	return (slots + slotsPerPage - 1) / slotsPerPage * slotsPerPage
}

// full tells that one more block would leave too few free slots for short
// probes: fewer than a quarter.
func (s *segment) full() bool { return s.n+1 > len(s.slots)-len(s.slots)/4 }

// homeAmong is where a mixed hash's probes begin among so many slots: its last 32
// bits, scaled.
func homeAmong(m uint64, slots int) int { return int(uint64(uint32(m)) * uint64(slots) >> 32) }

func (s *segment) home(m uint64) int { return homeAmong(m, len(s.slots)) }

// find returns where a block is, or where it would go.
func (s *segment) find(hash, m uint64) (int, bool) {
	slots := s.slots
	for i := s.home(m); ; {
		b := &slots[i]
		if b.flags&flagHeld == 0 {
			return i, false
		}
		if b.hash == hash {
			return i, true
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// add puts in a block that is not there, and for which there is room.
func (s *segment) add(b *block) {
	if s.full() {
		s.grow()
	}
	i, _ := s.find(b.hash, mix(b.hash))
	s.slots[i] = *b
	s.n++
}

// grow gives the segment more slots: twice as many while it is small, then a
// page more.
func (s *segment) grow() {
	old := s.slots
	s.slots = make([]block, min(2*len(old), pages(len(old)+1)))
	for i := range old {
		if b := &old[i]; b.flags&flagHeld != 0 {
			k, _ := s.find(b.hash, mix(b.hash))
			s.slots[k] = *b
		}
	}
}

// delete empties a slot, and moves those after it back that were probed past it.
func (s *segment) delete(hole int) {
	slots := s.slots
	for i := hole; ; {
		if i++; i == len(slots) {
			i = 0
		}
		b := &slots[i]
		if b.flags&flagHeld == 0 {
			break
		}
		// b may fill the hole unless its home lies behind it, going round.
		if home := s.home(mix(b.hash)); between(hole, home, i) {
			continue
		}
		slots[hole] = *b
		hole = i
	}
	slots[hole] = block{}
	s.n--
}

// between tells whether home is in (hole, i], going round.
func between(hole, home, i int) bool {
	if hole < i {
		return hole < home && home <= i
	}
	return hole < home || home <= i
}

package wire

import (
	"math/bits"
	"math/rand/v2"
	"unicode/utf8"
)

// slab allocates slices that are valid until release. A slice that does not fit into the buffer gets a new buffer of its exact length. The
// next batch that needs a new buffer gets one for as many elements as the earlier batch used. Doubling the buffer instead would reserve
// memory that may never be used.
type slab[T any] struct {
	// buf is the used part of the current buffer; its spare capacity is available.
	buf []T
	// full is the number of elements in the batch's earlier buffers. wanted is the largest
	// number of elements of a batch that needed several buffers.
	full, wanted int
}

// release frees all slices, and keeps a buffer of at most limit elements.
func (s *slab[T]) release(limit int) {
	if s.full != 0 {
		s.wanted = min(max(s.wanted, s.full+len(s.buf)), limit)
		s.full = 0
	}
	s.buf = reuse(s.buf, limit)
}

// clear is release, and zeroes the elements.
func (s *slab[T]) clear(limit int) {
	if len(s.buf) != 0 {
		clear(s.buf)
		s.release(limit)
	}
}

// len returns the number of elements that are allocated.
func (s *slab[T]) len() int { return s.full + len(s.buf) }

// fits reports whether the current buffer has room for n elements.
func (s *slab[T]) fits(n int) bool { return n <= cap(s.buf)-len(s.buf) }

// grow replaces the buffer by a new one with room for n elements.
func (s *slab[T]) grow(n int) {
	s.full += len(s.buf)
	s.buf = make([]T, 0, max(n, s.wanted))
	s.wanted = 0
}

// room returns the room for n elements, which must fit. allocate allocates the first ones.
func (s *slab[T]) room(n int) []T {
	used := len(s.buf)
	return s.buf[used : used+n : used+n]
}

// reserve is room for any number of elements.
func (s *slab[T]) reserve(n int) []T {
	if !s.fits(n) {
		s.grow(n)
	}
	return s.room(n)
}

// allocate returns the first n elements of the memory that was reserved last.
func (s *slab[T]) allocate(n int) []T {
	used := len(s.buf)
	s.buf = s.buf[:used+n]
	return s.buf[used : used+n : used+n]
}

// one returns one element, which is zero if every release is a clear.
func (s *slab[T]) one() *T {
	s.reserve(1)
	return &s.allocate(1)[0]
}

// reuse returns s without its elements, or nil if its capacity exceeds the limit.
func reuse[T any](s []T, limit int) []T {
	if cap(s) > limit {
		return nil
	}
	return s[:0]
}

const (
	// maxInterned is the number of strings of an interner, and maxInternedBytes the length of each: 16 KiB together.
	maxInterned      = 64
	maxInternedBytes = 256
)

// interner caches strings: converting the same bytes again does not allocate. The zero value is ready.
type interner struct{ strings map[string]string }

// string converts b to a string, and reports whether it is valid UTF-8.
func (t *interner) string(b []byte) (string, bool) {
	if len(b) == 0 {
		return "", true
	}
	if s, ok := t.strings[string(b)]; ok {
		return s, true
	}
	if len(b) > maxInternedBytes || !utf8.Valid(b) {
		return string(b), utf8.Valid(b)
	}
	if t.strings == nil {
		t.strings = make(map[string]string)
	}
	if len(t.strings) >= maxInterned {
		clear(t.strings)
	}
	s := string(b)
	t.strings[s] = s
	return s, true
}

const (
	// fewHashes is the length of the longest list whose hashes are compared pairwise, which is cheaper than a table.
	fewHashes = 6
	// maxRepeatSlots is the size of the largest table that is kept: 1 MiB.
	maxRepeatSlots = 1 << 16
)

// repeatFinder finds a hash that occurs twice in a list. It reuses its table: only slots with
// the generation of the current list are in use.
type repeatFinder struct {
	slots      []repeatSlot
	generation uint64
	// mix is odd and random, so that no sender can choose hashes that collide in the table.
	mix uint64
}

type repeatSlot struct {
	hash       uint64
	generation uint64
}

func newRepeatFinder() repeatFinder { return repeatFinder{mix: rand.Uint64() | 1} }

// repeats reports whether a hash occurs twice.
func (r *repeatFinder) repeats(hashes []uint64) bool {
	if len(hashes) <= fewHashes {
		for k, h := range hashes {
			for _, g := range hashes[:k] {
				if g == h {
					return true
				}
			}
		}
		return false
	}
	// A large table is allocated only after the first half of the list has no repeats. The
	// hashes of that half differ, so that most of them take several bytes of the payload.
	n := min(len(hashes), maxRepeatSlots/2)
	for !r.repeatsInTable(hashes[:n]) {
		if n == len(hashes) {
			return false
		}
		n = min(len(hashes), 2*n)
	}
	return true
}

// repeatsInTable is repeats for a list that is not empty.
func (r *repeatFinder) repeatsInTable(hashes []uint64) bool {
	// At least half of the slots stay empty, so that probes are short.
	width := bits.Len(uint(2*len(hashes) - 1))
	if len(r.slots) < 1<<width {
		r.slots = make([]repeatSlot, 1<<width)
		r.generation = 0
	}
	slots := r.slots[:1<<width]
	r.generation++
	if len(r.slots) > maxRepeatSlots {
		r.slots = nil
	}
	mask := len(slots) - 1
	shift := 64 - width
	for _, h := range hashes {
		at := int(h * r.mix >> shift)
		for slots[at&mask].generation == r.generation {
			if slots[at&mask].hash == h {
				return true
			}
			at++
		}
		slots[at&mask] = repeatSlot{hash: h, generation: r.generation}
	}
	return false
}

package wire

// slab hands out lists that live until its release. A list that does not fit into
// what there is gets room made to measure, and the next batch that has one more
// than fits gets room for as much as the one before took in all. To double
// instead would take memory for lists that never come.
type slab[T any] struct {
	// buf is what was handed out of the present room, and beyond it what is left.
	buf []T
	// before is how many elements were handed out of rooms before it, wanted the
	// most that batches took which found too little room.
	before, wanted int
}

// release takes back what was handed out, and keeps room for most at most.
func (s *slab[T]) release(most int) {
	if s.before != 0 {
		s.wanted = min(max(s.wanted, s.before+len(s.buf)), most)
		s.before = 0
	}
	s.buf = s.buf[:0]
	if cap(s.buf) > most {
		s.buf = nil
	}
}

// room returns room for n, which take hands out; nil if there is not so much.
func (s *slab[T]) room(n int) []T {
	used := len(s.buf)
	if n > cap(s.buf)-used {
		return nil
	}
	return s.buf[used : used+n : used+n]
}

// grow makes room for n.
func (s *slab[T]) grow(n int) []T {
	s.before += len(s.buf)
	s.buf = make([]T, 0, max(n, s.wanted))
	s.wanted = 0
	return s.buf[:n:n]
}

// take hands out the first n of the room.
func (s *slab[T]) take(n int) []T {
	used := len(s.buf)
	s.buf = s.buf[:used+n]
	return s.buf[used : used+n : used+n]
}

// one hands out one element, which is zero if the slab is cleared with each release.
func (s *slab[T]) one() *T {
	if s.room(1) == nil {
		s.grow(1)
	}
	return &s.take(1)[0]
}

// clear is a release that also makes sure that nothing is kept of what the elements
// point to.
func (s *slab[T]) clear(most int) {
	clear(s.buf)
	s.release(most)
}

package consolidate

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

package consolidate

// slab stores records in chunks, so that adding a record moves no other. Records are identified by numbers from 1.
type slab[R any] struct {
	chunks [][]R
	last   uint32 // highest number allocated so far
	// peak is the greatest number of records at once: last, unless the records were restored.
	peak uint32
	free []uint32 // released numbers
}

// slabChunk is the number of records allocated together.
const slabChunk = 1024

func (s *slab[R]) at(id uint32) *R { return &s.chunks[id/slabChunk][id%slabChunk] }

// allocate returns the number of a free record. The caller must overwrite the record, which may have its previous value.
func (s *slab[R]) allocate() uint32 {
	if n := len(s.free); n > 0 {
		id := s.free[n-1]
		s.free = s.free[:n-1]
		return id
	}
	s.last++
	s.peak = max(s.peak, s.last)
	if int(s.last/slabChunk) >= len(s.chunks) {
		s.chunks = append(s.chunks, make([]R, slabChunk))
	}
	return s.last
}

func (s *slab[R]) release(id uint32) { s.free = append(s.free, id) }

// len returns the number of allocated records.
func (s *slab[R]) len() int { return int(s.last) - len(s.free) }

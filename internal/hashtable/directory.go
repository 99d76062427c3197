package hashtable

// minDirectory is the size up to which a directory may grow whatever the number of keys.
const minDirectory = 64

// index returns the directory index of a cursor.
func (t *Table[V, T]) index(at uint64) uint64 {
	return at << (t.base & 63) >> 1 >> ((63 - t.depth) & 63)
}

// locate returns the segment of a cursor, and the table whose directory has it: t or a nested table.
func (t *Table[V, T]) locate(at uint64) (in *Table[V, T], s *Segment[V, T]) {
	in = t
	for {
		s = in.dir[in.index(at)]
		if !s.nested {
			return in, s
		}
		in = in.nested[nestedKey(at, s.depth)]
	}
}

// nestedKey returns the key in Table.nested of a segment of some depth: the first bits of its cursors, below a set bit.
// The prefixes of nested tables have different lengths.
func nestedKey(at uint64, depth uint8) uint64 { return (at>>1 | 1<<63) >> (63 - depth) }

// find returns the segment and slot index of a hash, and the table whose directory has the segment.
func (t *Table[V, T]) find(hash uint64) (in *Table[V, T], s *Segment[V, T], i int, ok bool) {
	s = t.dir[t.index(cursor(hash))]
	// If the key is in its home slot, this does not read the first cache line of the segment.
	if i, ok = s.find(hash); ok || !s.nested {
		return t, s, i, ok
	}
	in, s = t.locate(cursor(hash))
	i, ok = s.find(hash)
	return in, s, i, ok
}

// point makes the directory elements of all cursors that share the first bits with a cursor refer
// to a segment of that depth.
func (t *Table[V, T]) point(at uint64, s *Segment[V, T]) {
	span := uint64(1) << (t.base + t.depth - uint(s.depth))
	first := t.index(at) &^ (span - 1)
	for i := range span {
		t.dir[first+i] = s
	}
}

// split divides a full segment, which has the cursor at, by the next bit of the cursors.
func (t *Table[V, T]) split(s *Segment[V, T], at uint64) {
	if uint(s.depth) == t.base+t.depth {
		if len(t.dir) >= minDirectory && len(t.dir) > t.n {
			t.nest(s, at)
			return
		}
		t.double()
	}
	s.depth++
	bit := uint64(1) << (64 - s.depth)
	upper := &Segment[V, T]{depth: s.depth}
	for i := range s.Slots {
		if s.Slots[i].Cursor()&bit != 0 {
			s.move(i, upper)
		}
	}
	t.point(at|bit, upper)
	if uint(s.depth) == t.base+t.depth {
		t.deepest += 2
	}
}

func (t *Table[V, T]) double() {
	dir := make([]*Segment[V, T], 2*len(t.dir))
	for i, s := range t.dir {
		dir[2*i], dir[2*i+1] = s, s
	}
	t.dir, t.deepest = dir, 0
	t.depth++
}

// halve undoes double, after which every segment was the same in two elements.
func (t *Table[V, T]) halve() {
	dir := make([]*Segment[V, T], len(t.dir)/2)
	t.depth--
	t.deepest = 0
	for i := range dir {
		dir[i] = t.dir[2*i]
		if uint(dir[i].depth) == t.base+t.depth {
			t.deepest++
		}
	}
	t.dir = dir
}

// nest moves a segment of the greatest depth to a nested table. So many hashes begin with the same
// bits only if they were chosen: names of an Index that have the same hash.
func (t *Table[V, T]) nest(s *Segment[V, T], at uint64) {
	if t.nested == nil {
		t.nested = make(map[uint64]*Table[V, T])
	}
	n := s.Len()
	t.nested[nestedKey(at, s.depth)] = &Table[V, T]{dir: []*Segment[V, T]{s}, base: uint(s.depth), deepest: 1, n: n}
	if t.base > 0 {
		t.n -= n
	}
	t.point(at, &Segment[V, T]{depth: s.depth, nested: true})
}

// unnest undoes nest for a nested table that has one segment, which has the cursor at. It returns the table that then has
// the segment.
func (t *Table[V, T]) unnest(nested *Table[V, T], at uint64) (in *Table[V, T]) {
	s := nested.dir[0]
	key := nestedKey(at, s.depth)
	for in = t; in.nested[key] != nested; {
		in = in.nested[nestedKey(at, in.dir[in.index(at)].depth)]
	}
	if delete(in.nested, key); len(in.nested) == 0 {
		in.nested = nil
	}
	if in != t {
		in.n += nested.n
	}
	in.point(at, s)
	return in
}

// merge merges a segment, which has the cursor at, with its buddy, from which it was split, if they
// have few keys. It returns the merged segment, or nil.
func (t *Table[V, T]) merge(s *Segment[V, T], at uint64) (merged *Segment[V, T]) {
	if uint(s.depth) == t.base {
		return nil
	}
	bit := uint64(1) << (64 - s.depth)
	buddy := t.dir[t.index(at^bit)]
	if buddy.depth != s.depth || buddy.nested || s.Len()+buddy.Len() > mergedSum {
		return nil
	}
	for i := range s.Slots {
		if s.Slots[i].Used() {
			s.move(i, buddy)
		}
	}
	if uint(s.depth) == t.base+t.depth {
		t.deepest -= 2
	}
	buddy.depth--
	t.point(at, buddy)
	// Not while there are many keys, so that the same few keys cannot double and halve the directory again and again.
	for t.deepest == 0 && (len(t.dir) <= minDirectory || len(t.dir) > t.n/4) {
		t.halve()
	}
	return buddy
}

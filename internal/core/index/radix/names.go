package radix

// KeepNames makes the index keep the block hashes of each rank by place as well, for Names: 8 bytes a block, and some 100 for each run in which a rank has
// blocks. It must be called before the first block is stored.
func (x *Index) KeepNames() { x.keepsNames = true }

// KeepsNames reports whether KeepNames was called.
func (x *Index) KeepsNames() bool { return x.keepsNames }

// rankNames has the block hashes of a rank's placed blocks, by run; nil if they are not kept.
type rankNames map[uint32]*runNames

// runNames has the names of a rank's blocks in a run.
type runNames struct {
	// hashes has a name of the block at each offset. The rank may not have it any more.
	hashes []uint64
	placed int // names that the rank has
}

// nameBlocks notes that blocks of a rank have got places in a run, from an offset on. A place keeps a name that the rank still has.
func (r *Rank) nameBlocks(at position, hashes ...uint64) {
	n := r.names[at.run]
	if n == nil {
		n = new(runNames)
		r.names[at.run] = n
	}
	n.placed += len(hashes)
	known := len(n.hashes)
	if missing := int(at.offset) + len(hashes) - known; missing > 0 {
		n.hashes = append(n.hashes, make([]uint64, missing)...)
	}
	for i, hash := range hashes {
		if offset := at.offset + uint32(i); int(offset) >= known || !r.isAt(n.hashes[offset], position{at.run, offset}) {
			n.hashes[offset] = hash
		}
	}
}

// isAt reports whether a rank has a block at a place.
func (r *Rank) isAt(hash uint64, at position) bool {
	place, ok := r.locate(hash)
	return ok && place == at
}

// unplace notes that a block has lost its place in a run.
func (n rankNames) unplace(run uint32) {
	if r := n[run]; r != nil {
		if r.placed--; r.placed == 0 {
			delete(n, run)
		}
	}
}

// Names appends the block hashes by which a rank has the first blocks of the prompt of the last Match, up to a number of them. It ends before a block that
// the rank does not have, or that has had several names of which the first is gone. Names must be kept, and KeepPath be set.
func (m *Matcher) Names(r *Rank, most int, to []uint64) []uint64 {
	next := 0
	for i := range m.path {
		s := &m.path[i]
		if s.model != r.model {
			continue
		}
		if s.from != next || next >= most {
			return to
		}
		n := r.names[s.run]
		if n == nil {
			return to
		}
		for ; next < min(s.end, most); next++ {
			at := position{s.run, uint32(next - s.from)}
			if int(at.offset) >= len(n.hashes) {
				return to
			}
			hash := n.hashes[at.offset]
			if !r.isAt(hash, at) {
				return to
			}
			to = append(to, hash)
		}
	}
	return to
}

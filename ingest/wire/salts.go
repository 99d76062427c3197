package wire

const (
	// maxSaltedBlocks is how many salted blocks are remembered of one source, over
	// all its ranks: those of 16 Mi tokens at the usual 16 a block.
	maxSaltedBlocks = 1 << 20
	// maxSaltBytes bounds the salts themselves, saltCost being what each takes
	// beside its bytes.
	maxSaltBytes = 4 << 20
	saltCost     = 128
	// saltedBlockCost is what a salted block takes.
	saltedBlockCost = 48
)

// saltID names a cache salt among those remembered.
type saltID uint32

const (
	// noSalt is that of blocks outside of all namespaces.
	noSalt saltID = iota
	// unknownSalt is that of blocks which may have any, or none.
	unknownSalt
	// firstSalt is the first of those that have a name.
	firstSalt
)

// salts remembers which blocks of a source are salted, because most engines name
// a cache salt with the first block of a request only: later stores continue it
// by the hash of their parent. The invariant is that no store is taken for
// another's salt, or for unsalted, where what the engine said tells otherwise:
//
//  1. A store's own salt is its blocks'. Without one, its blocks have the salt of
//     its parent, if that is remembered.
//  2. A block stored under two salts, or under one and then, in device memory,
//     under none, has an unknown salt: the engine leaves salts out of its hashes.
//     So has a store that names neither salt nor salted parent, but a block that
//     is remembered. The children of such blocks are unknown as well. A store of a
//     lower tier that names no salt is a copy, and changes nothing of the block's.
//  3. Blocks are remembered as long as the engine holds a copy in any tier. Of each
//     tier up to 254 are counted; where there were more, until the rank is
//     cleared.
//  4. A salted block for which there is no room makes its rank incomplete. There,
//     until the rank is cleared, each store that names no salt may continue a
//     block that is not remembered, or be a copy of one, and is unknown. Not
//     so a first block in device memory, where an engine would have named the
//     salt. A salt for which there is no room is remembered as unknown.
//
// What it can not know is a salt that was told before the first batch read, or in
// one that was lost: the blocks that continue it pass for unsalted.
//
// Equal hashes of two ranks are two blocks. A source that never named a salt
// costs a test of used. One that did takes 40 MiB at most for blocks and 4 MiB
// for salts. The zero value is ready.
type salts struct {
	ranks  map[uint32]*saltedRank
	blocks int
	ids    map[string]saltID
	// names are the salts by their ids from firstSalt on; free lists the ids that
	// name none.
	names []saltName
	free  []saltID
	bytes int
	// maxBlocks is in place of maxSaltedBlocks where it is not 0: for tests.
	maxBlocks int
	memory    memory
}

// saltName is a salt, and how many blocks have it.
type saltName struct {
	salt   string
	blocks int
}

// saltedRank is a dp rank that has salted blocks, or had more than there is room
// for.
type saltedRank struct {
	blocks     map[uint64]saltedBlock
	incomplete bool
}

// saltedBlock is a block's salt, and its copies in each tier from TierDevice on.
type saltedBlock struct {
	salt   saltID
	copies [NumTiers - 1]uint8
}

// manyCopies is more copies than are counted.
const manyCopies = 255

// used tells whether anything is remembered.
func (s *salts) used() bool { return len(s.ranks) != 0 }

// name returns the salt of an id, empty for one without name.
func (s *salts) name(id saltID) string {
	if id < firstSalt {
		return ""
	}
	return s.names[id-firstSalt].salt
}

// id returns the id of a store's own salt, for remember, which is unknownSalt
// where there is no room for it. It is good until the next call of any other
// method.
func (s *salts) id(salt string) saltID {
	if id, ok := s.ids[salt]; ok {
		return id
	}
	if s.bytes+saltCost+len(salt) > maxSaltBytes || !s.memory.take(saltCost+len(salt)) {
		return unknownSalt
	}
	var id saltID
	if n := len(s.free); n > 0 {
		id = s.free[n-1]
		s.free = s.free[:n-1]
	} else {
		s.names = append(s.names, saltName{})
		id = firstSalt + saltID(len(s.names)-1)
	}
	if s.ids == nil {
		s.ids = make(map[string]saltID)
	}
	s.ids[salt] = id
	s.names[id-firstSalt].salt = salt
	s.bytes += saltCost + len(salt)
	return id
}

// of returns the salt of a store's blocks that names none itself.
func (s *salts) of(ev *Event, rank uint32) saltID {
	r := s.ranks[rank]
	if r == nil {
		return noSalt
	}
	if ev.HasParent {
		if b, ok := r.blocks[ev.Parent]; ok {
			return b.salt
		}
	}
	if r.incomplete && (ev.HasParent && ev.Parent != 0 || ev.Tier != TierDevice) {
		return unknownSalt
	}
	if ev.hashOnly() {
		return noSalt
	}
	for _, h := range ev.BlockHashes {
		if _, ok := r.blocks[h]; ok {
			return unknownSalt
		}
	}
	return noSalt
}

// remember takes note of blocks that were stored, and have a salt.
func (s *salts) remember(ev *Event, rank uint32, id saltID) {
	r := s.ranks[rank]
	if r == nil {
		if id == noSalt || len(ev.BlockHashes) == 0 {
			s.drop(id)
			return
		}
		if s.ranks == nil {
			s.ranks = make(map[uint32]*saltedRank)
		}
		r = &saltedRank{blocks: make(map[uint64]saltedBlock)}
		s.ranks[rank] = r
	}
	for _, h := range ev.BlockHashes {
		b, ok := r.blocks[h]
		switch {
		case ok:
			if b.salt != id && (id >= firstSalt || id == unknownSalt && ev.Tier == TierDevice) {
				s.release(b.salt)
				b.salt = unknownSalt
			}
		case id == noSalt:
			continue
		case s.full():
			r.incomplete = true
			continue
		default:
			s.blocks++
			b.salt = id
			if id >= firstSalt {
				s.names[id-firstSalt].blocks++
			}
		}
		if n := &b.copies[ev.Tier-TierDevice]; *n < manyCopies {
			*n++
		}
		r.blocks[h] = b
	}
	s.drop(id)
}

// full reports whether there is no room for a further block, which otherwise counts from
// then on.
func (s *salts) full() bool {
	limit := maxSaltedBlocks
	if s.maxBlocks != 0 {
		limit = s.maxBlocks
	}
	return s.blocks >= limit || !s.memory.take(saltedBlockCost)
}

// remove takes note of copies that are gone.
func (s *salts) remove(ev *Event, rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for _, h := range ev.BlockHashes {
		b, ok := r.blocks[h]
		n := &b.copies[ev.Tier-TierDevice]
		if !ok || *n == 0 || *n == manyCopies {
			continue
		}
		*n--
		if b.copies != ([NumTiers - 1]uint8{}) {
			r.blocks[h] = b
			continue
		}
		delete(r.blocks, h)
		s.blocks--
		s.memory.release(saltedBlockCost)
		s.release(b.salt)
	}
	if len(r.blocks) == 0 && !r.incomplete {
		delete(s.ranks, rank)
	}
}

// clear forgets a rank's blocks.
func (s *salts) clear(rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for _, b := range r.blocks {
		s.release(b.salt)
	}
	s.blocks -= len(r.blocks)
	s.memory.release(saltedBlockCost * len(r.blocks))
	delete(s.ranks, rank)
}

// release takes a block from a salt.
func (s *salts) release(id saltID) {
	if id < firstSalt {
		return
	}
	s.names[id-firstSalt].blocks--
	s.drop(id)
}

// drop forgets a salt that no block has.
func (s *salts) drop(id saltID) {
	if id < firstSalt || s.names[id-firstSalt].blocks > 0 {
		return
	}
	n := &s.names[id-firstSalt]
	delete(s.ids, n.salt)
	s.bytes -= saltCost + len(n.salt)
	s.memory.release(saltCost + len(n.salt))
	*n = saltName{}
	s.free = append(s.free, id)
}

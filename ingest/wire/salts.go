package wire

const (
	// maxSaltedBlocks bounds the salted blocks remembered per source, over all its ranks:
	// those of 16 Mi tokens at the usual 16 a block.
	maxSaltedBlocks = 1 << 20
	// saltedBlockCost is the size of a salted block in bytes.
	saltedBlockCost = 48
	// maxSaltBytes bounds the memory of the salts themselves, each accounted as its bytes
	// plus saltCost.
	maxSaltBytes = 4 << 20
	saltCost     = 128
)

// saltID identifies a cache salt among those remembered.
type saltID uint32

const (
	// noSalt is that of unsalted blocks.
	noSalt saltID = iota
	// unknownSalt is that of blocks which may have any salt, or none.
	unknownSalt
	// firstSalt is the first that has a name.
	firstSalt
)

// salts remembers which blocks of a source are salted: most engines send a cache salt
// with the first block of a request only, and later stores continue it by the hash of
// their parent. Invariant: if the engine's events determine the salt of
// a store, the store gets that salt.
//
//  1. A store's own salt is that of its blocks. Without one, its blocks have the salt of
//     its parent, if that is remembered.
//  2. A block that is stored under two salts, or under one and then, in device memory,
//     under none, has an unknown salt: engines do not hash salts. So has a store with
//     neither salt nor salted parent, but a block that is remembered. The children of
//     such blocks are unknown as well. A store of a lower tier without a salt is a copy,
//     and does not change the block's salt.
//  3. Blocks are remembered while the engine holds a copy in any tier. Up to 254 copies
//     are counted in each tier; a block that had more stays until the rank is cleared.
//  4. A salted block for which there is no room makes its rank incomplete. Until the rank
//     is cleared, each of its stores without a salt may continue a block that is not
//     remembered, or be a copy of one, and is unknown; except for a first block in device
//     memory, where an engine would have sent the salt. A salt for which there is no room
//     is remembered as unknown.
//
// A salt that was sent before the first batch, or in a lost one, is not known: the blocks
// that continue it count as unsalted.
//
// Equal hashes of two ranks are two blocks. Blocks take 40 MiB at most, salts 4 MiB, and
// a source that never sent a salt nothing.
type salts struct {
	ranks  map[uint32]*saltedRank
	blocks int
	ids    map[string]saltID
	// names are the salts by id, from firstSalt on; free are the ids without a salt.
	names  []saltName
	free   []saltID
	bytes  int
	budget Budget
	// maxBlocks replaces maxSaltedBlocks in tests, unless it is 0.
	maxBlocks int
}

// saltName is a salt, and the number of blocks that have it.
type saltName struct {
	salt   string
	blocks int
}

// saltedRank is a dp rank with salted blocks; incomplete if there were more of them than
// there is room for.
type saltedRank struct {
	blocks     map[uint64]saltedBlock
	incomplete bool
}

// saltedBlock is a block's salt, and its copies in each tier from TierDevice on.
type saltedBlock struct {
	salt   saltID
	copies [NumTiers - 1]uint8
}

// manyCopies is the count of copies that is not changed any more.
const manyCopies = 255

// used reports whether any rank has salted blocks.
func (s *salts) used() bool { return len(s.ranks) != 0 }

// name returns the salt of an id, "" if it has none.
func (s *salts) name(id saltID) string {
	if id < firstSalt {
		return ""
	}
	return s.names[id-firstSalt].salt
}

// id returns the id of a store's own salt, which is unknownSalt if there is no room for
// it. It must be passed to remember before any other method is called.
func (s *salts) id(salt string) saltID {
	if id, ok := s.ids[salt]; ok {
		return id
	}
	if s.bytes+saltCost+len(salt) > maxSaltBytes || !s.budget.Take(int64(saltCost+len(salt))) {
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

// of returns the salt that the blocks of a store without a salt inherit.
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

// remember adds the blocks of a store, and their salt.
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

// full reports whether there is no room for another block. If there is room, full reserves
// it.
func (s *salts) full() bool {
	limit := maxSaltedBlocks
	if s.maxBlocks != 0 {
		limit = s.maxBlocks
	}
	return s.blocks >= limit || !s.budget.Take(saltedBlockCost)
}

// remove removes a copy of each of a remove's blocks.
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
		s.budget.Release(saltedBlockCost)
		s.release(b.salt)
	}
	if len(r.blocks) == 0 && !r.incomplete {
		delete(s.ranks, rank)
	}
}

// clear removes a rank's blocks.
func (s *salts) clear(rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for _, b := range r.blocks {
		s.release(b.salt)
	}
	s.blocks -= len(r.blocks)
	s.budget.Release(int64(saltedBlockCost * len(r.blocks)))
	delete(s.ranks, rank)
}

// release removes one block from a salt.
func (s *salts) release(id saltID) {
	if id < firstSalt {
		return
	}
	s.names[id-firstSalt].blocks--
	s.drop(id)
}

// drop removes a salt that no block has.
func (s *salts) drop(id saltID) {
	if id < firstSalt || s.names[id-firstSalt].blocks > 0 {
		return
	}
	n := &s.names[id-firstSalt]
	delete(s.ids, n.salt)
	s.bytes -= saltCost + len(n.salt)
	s.budget.Release(int64(saltCost + len(n.salt)))
	*n = saltName{}
	s.free = append(s.free, id)
}

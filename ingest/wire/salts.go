package wire

const (
	// maxSaltedBlocks bounds the salted blocks of a source, over all its ranks: enough for
	// 16 Mi tokens in blocks of 16.
	maxSaltedBlocks = 1 << 20
	// saltedBlockCost is the size of a salted block in bytes.
	saltedBlockCost = 48
	// maxSaltBytes bounds the memory of the salts of a source. Each salt counts as its length
	// plus saltCost, in bytes.
	maxSaltBytes = 4 << 20
	saltCost     = 128
)

// saltID identifies a cache salt in a salts.
type saltID uint32

const (
	// noSalt marks blocks without a salt.
	noSalt saltID = iota
	// unknownSalt marks blocks that may have any salt, or none.
	unknownSalt
	// firstSalt is the smallest id of a known salt.
	firstSalt
)

// salts records the salted blocks of a source. Most engines send a cache salt only with the
// first block of a request. Later stores name a parent, which has the salt. Invariant: if the
// engine's events determine the salt of a store, the store gets that salt.
//
//  1. If a store has a salt, its blocks have that salt. Otherwise its blocks have the salt of
//     its parent, if the parent is recorded.
//  2. A block has an unknown salt if it is stored with two salts, or first with a salt and
//     then, in device memory, without: engines do not hash salts. A store also has an unknown
//     salt if it has neither a salt nor a recorded parent, but a recorded block. Children of
//     blocks with an unknown salt have an unknown salt. A store without a salt in a lower tier
//     is a copy, and does not change the block's salt.
//  3. A block is recorded while the engine has a copy in any tier. Up to 254 copies are
//     counted in each tier. A block that had more copies is recorded until its rank is
//     cleared.
//  4. If there is no room for a salted block, its rank becomes incomplete until it is
//     cleared. A store without a salt in an incomplete rank has an unknown salt, because it
//     may continue or copy the missing block. The exception is a store in device memory
//     without parent: the engine would have sent the salt. If there is no room for a salt, it
//     is recorded as unknown.
//
// Salts in lost batches, and before the first batch, are not known. Blocks that continue them
// count as unsalted.
//
// Equal hashes of two ranks are two blocks. Blocks take at most 40 MiB, and salts at most
// 4 MiB. A source that never sent a salt takes no memory.
type salts struct {
	ranks  map[uint32]*saltedRank
	blocks int
	ids    map[string]saltID
	// names are the salts by id, from firstSalt on. free are unused ids in names.
	names  []saltName
	free   []saltID
	bytes  int
	budget Budget
	// maxBlocks is maxSaltedBlocks, or fewer in tests.
	maxBlocks int
	// changes are recorded after Rules.TrackChanges; nil before.
	changes *changes
}

// saltName is a salt, and the number of blocks that have the salt.
type saltName struct {
	salt   string
	blocks int
}

// saltedRank is a dp rank with salted blocks.
type saltedRank struct {
	blocks map[uint64]saltedBlock
	// incomplete reports whether there was no room for a block.
	incomplete bool
}

// saltedBlock is a block's salt, and its copies in each tier from TierDevice on.
type saltedBlock struct {
	salt   saltID
	copies [NumTiers - 1]uint8
}

// manyCopies is the largest count of copies, which then no longer changes.
const manyCopies = 255

// used reports whether any rank has salted blocks.
func (s *salts) used() bool { return len(s.ranks) != 0 }

// name returns the salt of an id, or "" for noSalt and unknownSalt.
func (s *salts) name(id saltID) string {
	if id < firstSalt {
		return ""
	}
	return s.names[id-firstSalt].salt
}

// id returns the id of a salt, or unknownSalt if there is no room for the salt. The caller
// must pass the id to record before it calls any other method.
func (s *salts) id(salt string) saltID {
	if id, ok := s.ids[salt]; ok {
		return id
	}
	if s.bytes+saltCost+len(salt) > maxSaltBytes || !s.budget.Reserve(int64(saltCost+len(salt))) {
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

// inherited returns the salt of a store that does not have one itself.
func (s *salts) inherited(ev *Event, rank uint32) saltID {
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

// record adds the blocks of a store, and their salt.
func (s *salts) record(ev *Event, rank uint32, id saltID) {
	r := s.ranks[rank]
	if r == nil {
		if id == noSalt || len(ev.BlockHashes) == 0 {
			s.drop(id)
			return
		}
		r = s.addRank(rank)
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
		case !s.reserveBlock():
			r.incomplete = true
			s.changes.touch(rank)
			continue
		default:
			s.blocks++
			b.salt = id
			s.retain(id)
		}
		if n := &b.copies[ev.Tier-TierDevice]; *n < manyCopies {
			*n++
		}
		r.blocks[h] = b
		s.changes.addBlock(rank, h)
	}
	s.drop(id)
}

// addRank adds a rank without blocks.
func (s *salts) addRank(rank uint32) *saltedRank {
	if s.ranks == nil {
		s.ranks = make(map[uint32]*saltedRank)
	}
	r := &saltedRank{blocks: make(map[uint64]saltedBlock)}
	s.ranks[rank] = r
	return r
}

// reserveBlock reserves memory for another block, and reports whether there was room.
func (s *salts) reserveBlock() bool {
	return s.blocks < s.maxBlocks && s.budget.Reserve(saltedBlockCost)
}

// remove removes one copy of each block of a remove.
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
		s.changes.addBlock(rank, h)
		if b.copies != ([NumTiers - 1]uint8{}) {
			r.blocks[h] = b
			continue
		}
		s.forget(r, h, b.salt)
	}
	s.dropRank(rank, r)
}

// forget deletes a block with a salt.
func (s *salts) forget(r *saltedRank, hash uint64, id saltID) {
	delete(r.blocks, hash)
	s.blocks--
	s.budget.Release(saltedBlockCost)
	s.release(id)
}

// dropRank removes a rank if it has no salted blocks.
func (s *salts) dropRank(rank uint32, r *saltedRank) {
	if len(r.blocks) == 0 && !r.incomplete {
		delete(s.ranks, rank)
	}
}

// clear removes all blocks of a rank.
func (s *salts) clear(rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	s.changes.clearSalts(rank)
	for _, b := range r.blocks {
		s.release(b.salt)
	}
	s.blocks -= len(r.blocks)
	s.budget.Release(int64(saltedBlockCost * len(r.blocks)))
	delete(s.ranks, rank)
}

// retain increments the number of blocks that have a salt.
func (s *salts) retain(id saltID) {
	if id >= firstSalt {
		s.names[id-firstSalt].blocks++
	}
}

// release decrements the number of blocks that have a salt.
func (s *salts) release(id saltID) {
	if id < firstSalt {
		return
	}
	s.names[id-firstSalt].blocks--
	s.drop(id)
}

// drop removes a salt if no block has it.
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

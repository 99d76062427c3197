package wire

import (
	"slices"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

const (
	// maxScopedBlocks bounds the scoped blocks of a source, over all its ranks: enough for 16 Mi tokens in blocks of 16.
	maxScopedBlocks = 1 << 20
	// scopedBlockCost is the size of a scoped block in bytes.
	scopedBlockCost = 64
	// maxScopeBytes bounds the memory of the scopes of a source. Each scope counts as the length of its names plus scopeCost, in bytes.
	maxScopeBytes = 4 << 20
	scopeCost     = 128
)

// scope is what a block was computed with beside its tokens: the name of a LoRA adapter, and a cache salt. Each is empty for none.
type scope struct{ lora, salt string }

func (s scope) bytes() int { return scopeCost + len(s.lora) + len(s.salt) }

// scopeID identifies a scope in a scopes.
type scopeID uint32

const (
	// baseScope is the scope of blocks with neither adapter nor salt.
	baseScope scopeID = iota
	// unknownScope marks blocks that may have any adapter and salt, or none.
	unknownScope
	// firstScope is the smallest id of a known scope.
	firstScope
)

// scopes records the scoped blocks of a source. Most engines send a cache salt only with the first block of a request. Later stores name a
// parent, which has the salt. Invariant: if the engine's events determine the scope of a store, the store gets that scope.
//
//  1. If a store has a salt, its blocks have that salt. Otherwise its blocks have the scope of
//     its parent, if the parent is recorded.
//  2. A block has an unknown scope if it is stored with two scopes, or first with a salt and
//     then, in device memory, without: engines do not hash salts. A store also has an unknown
//     scope if it has neither a salt nor a recorded parent, but a recorded block. Children of
//     blocks with an unknown scope have an unknown scope. A store without a salt in a lower tier
//     is a copy, and does not change the block's scope.
//  3. A block is recorded while the engine has a copy in any tier. Up to 254 copies are
//     counted in each tier. A block that had more copies is recorded until its rank is
//     cleared.
//  4. If there is no room for a scoped block, its rank becomes incomplete until it is
//     cleared. A store without a salt in an incomplete rank has an unknown scope, because it
//     may continue or copy the missing block. The exception is a store in device memory
//     without parent: the engine would have sent the salt. If there is no room for a scope, it
//     is recorded as unknown.
//  5. Sources of a worker are peers, of which one may leave out adapter and salt. A store without
//     them has the scope of its parent, or of the blocks that it names, in the record of a peer.
//     Blocks with an adapter alone are recorded only for peers: an engine names its adapter in
//     each store.
//  6. vLLM hashes salts, and names none in stores in lower tiers, which it sends some time after
//     those in device memory: the block may be evicted or cleared by then. Such a store has the
//     scope of its first block or of its parent, as it is recorded or was in the last maxFormer
//     blocks that were forgotten. It has an unknown scope in the copyBatches batches after one by
//     which more were forgotten at a time, or a restart. A store in device memory ends that: it has
//     the salt of its block, or none if it has no parent.
//     Copies that are never removed do not count: a block would be recorded for ever.
//
// Scopes in lost batches, and before the first batch, are not known. Blocks that continue them count as blocks of the base scope.
//
// Equal hashes of two ranks are two blocks. Blocks take at most 64 MiB, and scopes at most
// 4 MiB. A source that never sent a salt, of a worker without others, takes no memory.
type scopes struct {
	ranks  map[uint32]*scopedRank
	blocks int
	ids    map[scope]scopeID
	// names are the scopes by id, from firstScope on. free are unused ids in names.
	names  []scopeName
	free   []scopeID
	bytes  int
	budget *budget.Budget // nil: no limit
	// maxBlocks is maxScopedBlocks, or fewer in tests.
	maxBlocks int
	// peers are the scopes of the worker's other sources.
	peers []*scopes
	// changes are recorded after Rules.TrackChanges; nil before.
	changes *changes
	// hashed reports whether the engine hashes salts. former are then blocks that were forgotten. The state has whether a rank has some.
	hashed bool
	former former
}

// scopeName is a scope, and the number of blocks that have it.
type scopeName struct {
	scope  scope
	blocks int
}

// scopedRank is a dp rank with scoped blocks.
type scopedRank struct {
	blocks map[uint64]scopedBlock
	// incomplete reports whether there was no room for a block.
	incomplete bool
}

// scopedBlock is a block's scope, its tokens hash in that scope (0: unknown), and its copies in each tier from TierDevice on.
type scopedBlock struct {
	tokens uint64
	scope  scopeID
	copies [kvblock.TierEnd - 1]uint8
}

// manyCopies is the largest count of copies, which then no longer changes.
const manyCopies = 255

// used reports whether any rank has scoped blocks, or had some lately.
func (s *scopes) used() bool { return len(s.ranks) != 0 || s.former.used() }

// peersUsed reports whether a peer has scoped blocks.
func (s *scopes) peersUsed() bool {
	return slices.ContainsFunc(s.peers, (*scopes).used)
}

// name returns the scope of an id; the base scope for unknownScope.
func (s *scopes) name(id scopeID) scope {
	if id < firstScope {
		return scope{}
	}
	return s.names[id-firstScope].scope
}

// id returns the id of a scope, or unknownScope if there is no room for it. The caller
// must pass the id to record before it calls any other method.
func (s *scopes) id(name scope) scopeID {
	if name == (scope{}) {
		return baseScope
	}
	if id, ok := s.ids[name]; ok {
		return id
	}
	if s.bytes+name.bytes() > maxScopeBytes || !s.reserve(int64(name.bytes())) {
		return unknownScope
	}
	var id scopeID
	if n := len(s.free); n > 0 {
		id = s.free[n-1]
		s.free = s.free[:n-1]
	} else {
		s.names = append(s.names, scopeName{})
		id = firstScope + scopeID(len(s.names)-1)
	}
	if s.ids == nil {
		s.ids = make(map[scope]scopeID)
	}
	s.ids[name] = id
	s.names[id-firstScope].scope = name
	s.bytes += name.bytes()
	return id
}

// idOf is id for the scope of a store. A source without peers names its adapter in each store.
func (s *scopes) idOf(ev *Event) scopeID {
	name := scope{salt: ev.CacheSalt}
	if len(s.peers) > 0 {
		name.lora = ev.LoRAName
	}
	return s.id(name)
}

// inherited returns the scope of a store that does not have a salt itself; known is false if it cannot be told.
func (s *scopes) inherited(ev *Event, rank uint32) (_ scope, known bool) {
	r := s.ranks[rank]
	if s.hashed && ev.Tier != kvblock.TierDevice {
		if in, known, ok := s.ofCopy(ev, rank); ok {
			return in, known
		}
	}
	if ev.HasParent {
		if in, known, recorded := s.recorded(rank, ev.Parent); recorded {
			return in, known
		}
		for _, p := range s.peers {
			if in, known, recorded := p.recorded(rank, ev.Parent); recorded {
				return in, known
			}
		}
	}
	if r != nil && r.incomplete && (ev.HasParent && ev.Parent != 0 || ev.Tier != kvblock.TierDevice) {
		return scope{}, false
	}
	if ev.hashOnly() {
		return scope{}, true
	}
	isCertain := s.hashed && ev.Tier == kvblock.TierDevice && (!ev.HasParent || ev.Parent == 0) // the engine would have sent the salt
	for _, h := range ev.BlockHashes {
		if _, known, recorded := s.recorded(rank, h); recorded && (known || !isCertain) {
			return scope{}, false
		}
	}
	return s.inheritedFromPeers(ev, rank)
}

// ofCopy returns the scope of a store in a lower tier of an engine that hashes salts; ok is false if it has neither adapter nor salt, as far as it is known.
func (s *scopes) ofCopy(ev *Event, rank uint32) (_ scope, known, ok bool) {
	blocks := make([]uint64, 0, 2)
	if len(ev.BlockHashes) > 0 {
		blocks = append(blocks, ev.BlockHashes[0])
	}
	if ev.HasParent {
		blocks = append(blocks, ev.Parent)
	}
	for _, h := range blocks {
		if in, known, recorded := s.recorded(rank, h); recorded {
			return in, known, true
		}
		if id, found := s.former.find(rank, h); found {
			return s.name(id), id != unknownScope, true
		}
	}
	return scope{}, false, s.former.isLost(rank)
}

// inheritedFromPeers returns the scope of the blocks that a store names, in the record of a peer: that of the first
// which has the tokens of the store.
func (s *scopes) inheritedFromPeers(ev *Event, rank uint32) (_ scope, known bool) {
	for _, p := range s.peers {
		for i, h := range ev.BlockHashes {
			if in, known, recorded := p.recorded(rank, h); recorded && p.hasTokens(rank, ev, i, in) {
				return in, known
			}
		}
	}
	return scope{}, true
}

// recorded returns the scope of a block; known is false if it may have any.
func (s *scopes) recorded(rank uint32, hash uint64) (_ scope, known, ok bool) {
	r := s.ranks[rank]
	if r == nil {
		return scope{}, false, false
	}
	b, ok := r.blocks[hash]
	return s.name(b.scope), b.scope != unknownScope, ok
}

// hasTokens reports whether the recorded block that is a store's block i may have the same tokens.
func (s *scopes) hasTokens(rank uint32, ev *Event, i int, in scope) bool {
	tokens, size := s.ranks[rank].blocks[ev.BlockHashes[i]].tokens, int(ev.BlockSize)
	if tokens == 0 || size == 0 || (i+1)*size > len(ev.Tokens) {
		return true
	}
	content := ev.Tokens[i*size:]
	if !ev.Eagle {
		content = content[:size]
	} else if len(content) > size {
		content = content[:size+1]
	}
	hash := kvblock.AppendTokensHashes(nil, content, size, kvblock.Seed(in.lora, in.salt), ev.Eagle, nil)
	return len(hash) == 0 || hash[0] == tokens
}

// setTokens records the tokens hashes of a store's blocks, for peers.
func (s *scopes) setTokens(ev *Event, rank uint32) {
	r := s.ranks[rank]
	if r == nil || len(s.peers) == 0 {
		return
	}
	for i, tokens := range ev.TokensHashes {
		if b, ok := r.blocks[ev.BlockHashes[i]]; ok && b.tokens != tokens {
			b.tokens = tokens
			r.blocks[ev.BlockHashes[i]] = b
			s.changes.addBlock(rank, ev.BlockHashes[i])
		}
	}
}

// record adds the blocks of a store, and their scope. conflict reports whether a block is recorded with another scope: its
// content cannot be told from then on.
func (s *scopes) record(ev *Event, rank uint32, id scopeID) (conflict bool) {
	s.retain(id) // memory that is made for a block may be that of the scope's last one
	defer s.release(id)
	r := s.ranks[rank]
	isCounted := !s.hashed || !ev.isNeverRemoved()
	if r == nil {
		if id == baseScope || !isCounted || len(ev.BlockHashes) == 0 {
			return false
		}
		r = s.addRank(rank)
	}
	for _, h := range ev.BlockHashes {
		b, ok := r.blocks[h]
		switch {
		case ok && s.hashed && ev.Tier == kvblock.TierDevice && b.scope == unknownScope && id != unknownScope: // of a copy, before the scope was told
			if id == baseScope {
				s.unrecord(rank, r, h)
				continue
			}
			b.scope = id
			s.retain(id)
		case ok:
			if b.scope != id && (id >= firstScope || id == unknownScope && ev.Tier == kvblock.TierDevice) {
				s.release(b.scope)
				b.scope, conflict = unknownScope, true
			}
		case id == baseScope || !isCounted:
			continue
		case !s.reserveBlock():
			r.incomplete = true
			s.changes.touch(rank)
			continue
		default:
			s.blocks++
			b.scope = id
			s.retain(id)
		}
		if n := &b.copies[ev.Tier-kvblock.TierDevice]; isCounted && *n < manyCopies {
			*n++
		}
		r.blocks[h] = b
		s.changes.addBlock(rank, h)
	}
	return conflict
}

// unrecord deletes a block of the base scope that was recorded with an unknown one.
func (s *scopes) unrecord(rank uint32, r *scopedRank, hash uint64) {
	delete(r.blocks, hash)
	s.blocks--
	s.budget.Release(scopedBlockCost)
	s.changes.addBlock(rank, hash)
}

// addRank adds a rank without blocks.
func (s *scopes) addRank(rank uint32) *scopedRank {
	if s.ranks == nil {
		s.ranks = make(map[uint32]*scopedRank)
	}
	r := &scopedRank{blocks: make(map[uint64]scopedBlock)}
	s.ranks[rank] = r
	return r
}

// reserveBlock reserves memory for another block, and reports whether there was room.
func (s *scopes) reserveBlock() bool {
	return s.blocks < s.maxBlocks && s.reserve(scopedBlockCost)
}

// reserve reserves memory, if need be that of blocks that were forgotten, and reports whether there was room.
func (s *scopes) reserve(bytes int64) bool {
	if s.budget.Reserve(bytes) {
		return true
	}
	s.former.makeRoom(s)
	return s.budget.Reserve(bytes)
}

// remove removes one copy of each block of a remove.
func (s *scopes) remove(ev *Event, rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for _, h := range ev.BlockHashes {
		b, ok := r.blocks[h]
		n := &b.copies[ev.Tier-kvblock.TierDevice]
		if !ok || *n == 0 || *n == manyCopies {
			continue
		}
		*n--
		s.changes.addBlock(rank, h)
		if b.copies != ([kvblock.TierEnd - 1]uint8{}) {
			r.blocks[h] = b
			continue
		}
		s.forget(rank, r, h, b.scope)
	}
	s.dropRank(rank, r)
}

// forget deletes a block.
func (s *scopes) forget(rank uint32, r *scopedRank, hash uint64, id scopeID) {
	if s.hashed {
		s.former.add(s, rank, hash, id)
	}
	delete(r.blocks, hash)
	s.blocks--
	s.budget.Release(scopedBlockCost)
	s.release(id)
}

// dropRank removes a rank if it has no scoped blocks.
func (s *scopes) dropRank(rank uint32, r *scopedRank) {
	if len(r.blocks) == 0 && !r.incomplete {
		delete(s.ranks, rank)
	}
}

// clearTier removes the copies of a rank's blocks in a tier.
func (s *scopes) clearTier(rank uint32, tier kvblock.Tier) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	for h, b := range r.blocks {
		if b.copies[tier-kvblock.TierDevice] == 0 {
			continue
		}
		b.copies[tier-kvblock.TierDevice] = 0
		s.changes.addBlock(rank, h)
		if b.copies == ([kvblock.TierEnd - 1]uint8{}) {
			s.forget(rank, r, h, b.scope)
		} else {
			r.blocks[h] = b
		}
	}
	s.dropRank(rank, r)
}

// clear removes all blocks of a rank.
func (s *scopes) clear(rank uint32) {
	r := s.ranks[rank]
	if r == nil {
		return
	}
	s.changes.clearScopes(rank)
	if s.hashed && r.incomplete {
		s.former.lose(rank)
	}
	for h, b := range r.blocks {
		if s.hashed {
			s.former.add(s, rank, h, b.scope)
		}
		s.release(b.scope)
	}
	s.blocks -= len(r.blocks)
	s.budget.Release(int64(scopedBlockCost * len(r.blocks)))
	delete(s.ranks, rank)
}

// retain increments the number of blocks that have a scope.
func (s *scopes) retain(id scopeID) {
	if id >= firstScope {
		s.names[id-firstScope].blocks++
	}
}

// release decrements the number of blocks that have a scope.
func (s *scopes) release(id scopeID) {
	if id < firstScope {
		return
	}
	s.names[id-firstScope].blocks--
	s.drop(id)
}

// drop removes a scope if no block has it.
func (s *scopes) drop(id scopeID) {
	if id < firstScope || s.names[id-firstScope].blocks > 0 {
		return
	}
	n := &s.names[id-firstScope]
	delete(s.ids, n.scope)
	s.bytes -= n.scope.bytes()
	s.budget.Release(int64(n.scope.bytes()))
	*n = scopeName{}
	s.free = append(s.free, id)
}

package wire

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// TrackChanges makes Changes return what changes from now on.
func (r *Rules) TrackChanges() {
	r.changes = new(changes)
	r.scopes.changes = r.changes
}

// RawID returns the last raw event id.
func (r *Rules) RawID() uint64 { return r.rawID }

// Changed reports whether Changes would return changes.
func (r *Rules) Changed() bool { return len(r.changes.ranks) > 0 }

// Changes returns the changes of groups and scoped blocks since the last call. There must be some: see Changed.
func (r *Rules) Changes() *statev1.IngestSource {
	source := r.encode(r.changes.ranks)
	r.changes.clear()
	return source
}

// State returns the groups and scoped blocks.
func (r *Rules) State() *statev1.IngestSource {
	var all []rankChanges
	for rank := range r.groups {
		all = append(all, rankChanges{rank: rank, groups: true, blocks: r.scopes.hashes(rank)})
	}
	for rank := range r.scopes.ranks {
		if r.groups[rank] == nil {
			all = append(all, rankChanges{rank: rank, blocks: r.scopes.hashes(rank)})
		}
	}
	for rank := range r.scopes.former.batches {
		if r.groups[rank] == nil && r.scopes.ranks[rank] == nil && r.scopes.former.isNeeded(rank) {
			all = append(all, rankChanges{rank: rank})
		}
	}
	return r.encode(all)
}

// hashes returns the blocks of a rank.
func (s *scopes) hashes(rank uint32) []uint64 {
	if r := s.ranks[rank]; r != nil {
		return slices.AppendSeq(make([]uint64, 0, len(r.blocks)), maps.Keys(r.blocks))
	}
	return nil
}

// encode returns the changed parts of the state.
func (r *Rules) encode(all []rankChanges) *statev1.IngestSource {
	e := stateEncoder{rules: r, source: new(statev1.IngestSource)}
	for i := range all {
		c := &all[i]
		rank := &statev1.IngestRank{Rank: c.rank, Cleared: c.reset, SaltsCleared: c.saltsCleared && !c.reset}
		if salted := r.scopes.ranks[c.rank]; salted != nil {
			rank.Incomplete = salted.incomplete
		}
		rank.SaltsForgotten = r.scopes.former.isNeeded(c.rank)
		if g := r.groups[c.rank]; c.groups && g != nil {
			for _, a := range g.all {
				rank.Groups = append(rank.Groups, &statev1.IngestGroup{Index: a.idx, Kind: a.kind, BlockSize: a.blockSize, Window: a.window})
			}
			rank.HashUnit, rank.HashAlgorithm, rank.HashSeed, rank.GroupsLost = g.unit, uint32(g.algorithm), g.seed, g.lost
		}
		if n := len(c.blocks); n > 0 {
			rank.SaltedBlocks, rank.BlockSalts, rank.BlockCopies = make([]uint64, 0, n), make([]uint32, 0, n), make([]uint32, 0, n)
		}
		for _, hash := range c.blocks {
			e.block(rank, hash)
		}
		e.source.Ranks = append(e.source.Ranks, rank)
	}
	return e.source
}

// stateEncoder adds parts of the state of Rules to a message.
type stateEncoder struct {
	rules  *Rules
	source *statev1.IngestSource
	salts  map[scopeID]uint32 // 1 plus the index in the message
}

func (e *stateEncoder) block(to *statev1.IngestRank, hash uint64) {
	var b scopedBlock
	if salted := e.rules.scopes.ranks[to.Rank]; salted != nil {
		b = salted.blocks[hash]
	}
	copies := uint32(0)
	for i, n := range b.copies {
		copies |= uint32(n) << (8 * i)
	}
	to.SaltedBlocks = append(to.SaltedBlocks, hash)
	to.BlockSalts = append(to.BlockSalts, e.salt(b.scope))
	to.BlockCopies = append(to.BlockCopies, copies)
	if len(e.rules.scopes.peers) > 0 { // only they compare tokens
		to.BlockTokens = append(to.BlockTokens, b.tokens)
	}
}

// salt returns the number of a salt in the message.
func (e *stateEncoder) salt(id scopeID) uint32 {
	if id < firstScope {
		return 0
	}
	n, ok := e.salts[id]
	if !ok {
		name := e.rules.scopes.name(id)
		e.source.Salts = append(e.source.Salts, []byte(name.salt))
		e.source.Adapters = append(e.source.Adapters, []byte(name.lora))
		n = uint32(len(e.source.Salts))
		if e.salts == nil {
			e.salts = make(map[scopeID]uint32)
		}
		e.salts[id] = n
	}
	return n
}

// CheckState returns an error if a state or change cannot be restored.
func CheckState(s *statev1.IngestSource) error {
	if n := len(s.Adapters); n != 0 && n != len(s.Salts) {
		return fmt.Errorf("%d adapters of %d salts", n, len(s.Salts))
	}
	for i := range s.Salts {
		name := scopeAt(s.Salts, s.Adapters, i)
		if name == (scope{}) || len(name.salt) > maxNameBytes || len(name.lora) > maxNameBytes {
			return fmt.Errorf("salt has %d bytes and adapter %d; want 1 to %d of either", len(name.salt), len(name.lora), maxNameBytes)
		}
	}
	for _, rank := range s.Ranks {
		if n := len(rank.SaltedBlocks); len(rank.BlockSalts) != n || len(rank.BlockCopies) != n {
			return errors.New("salted blocks differ in number from their salts or copies")
		}
		if n := len(rank.BlockTokens); n != 0 && n != len(rank.SaltedBlocks) {
			return errors.New("salted blocks differ in number from their tokens hashes")
		}
		for _, n := range rank.BlockSalts {
			if int(n) > len(s.Salts) {
				return errors.New("a block's salt is missing")
			}
		}
	}
	return nil
}

// scopeAt returns a scope of a state.
func scopeAt(salts, adapters [][]byte, i int) scope {
	name := scope{salt: string(salts[i])}
	if i < len(adapters) {
		name.lora = string(adapters[i])
	}
	return name
}

// Restore adds a state or change that CheckState accepts, and is not tracked as a change. Salts and blocks for which
// there is no room become unknown, as in Admit.
func (r *Rules) Restore(s *statev1.IngestSource) {
	tracked := r.changes
	r.changes, r.scopes.changes = nil, nil
	defer func() { r.changes, r.scopes.changes = tracked, tracked }()
	for _, rank := range s.Ranks {
		switch {
		case rank.Cleared:
			r.Reset(rank.Rank)
		case rank.SaltsCleared:
			r.scopes.clear(rank.Rank)
		}
		for _, idx := range rank.MainGroups {
			r.setGroup(rank.Rank, attentionGroup{idx: idx, kind: "full_attention"})
		}
		for _, idx := range rank.OtherGroups {
			r.setGroup(rank.Rank, attentionGroup{idx: idx})
			r.lose(rank.Rank, "an earlier version of kvcast did not follow other attention groups: reset the engine's prefix cache")
		}
		for _, g := range rank.Groups {
			r.setGroup(rank.Rank, attentionGroup{idx: g.Index, kind: g.Kind, blockSize: g.BlockSize, window: g.Window})
		}
		if g := r.groupsOf(rank.Rank); g != nil && len(rank.Groups) > 0 {
			g.lost, g.isDescribed = rank.GroupsLost, false
			g.unit, g.algorithm, g.seed = rank.HashUnit, vllmhash.Algorithm(rank.HashAlgorithm), rank.HashSeed
		}
		r.scopes.restore(rank, s.Salts, s.Adapters)
	}
}

// RestoreRawID makes id the last raw event id if it is larger.
func (r *Rules) RestoreRawID(id uint64) { r.rawID = min(max(r.rawID, id), MaxRawID) }

// restore sets the salted blocks of a rank.
func (s *scopes) restore(state *statev1.IngestRank, salts, adapters [][]byte) {
	if state.SaltsForgotten {
		s.former.lose(state.Rank)
	}
	if len(state.SaltedBlocks) == 0 && !state.Incomplete {
		return
	}
	r := s.ranks[state.Rank]
	if r == nil {
		r = s.addRank(state.Rank)
	}
	r.incomplete = r.incomplete || state.Incomplete
	ids := make([]scopeID, 1+len(salts))
	ids[0] = unknownScope
	for i := range salts {
		ids[1+i] = s.id(scopeAt(salts, adapters, i))
		s.retain(ids[1+i]) // until all blocks are set
	}
	for i, hash := range state.SaltedBlocks {
		tokens := uint64(0)
		if i < len(state.BlockTokens) {
			tokens = state.BlockTokens[i]
		}
		s.set(state.Rank, r, hash, ids[state.BlockSalts[i]], state.BlockCopies[i], tokens)
	}
	for _, id := range ids {
		s.release(id)
	}
	s.dropRank(state.Rank, r)
}

// set sets the salt and the copies of a block, which is forgotten if it has none.
func (s *scopes) set(rank uint32, r *scopedRank, hash uint64, id scopeID, copies uint32, tokens uint64) {
	b, ok := r.blocks[hash]
	switch {
	case ok && copies == 0:
		s.forget(rank, r, hash, b.scope)
		return
	case copies == 0:
		return
	case !ok && !s.reserveBlock():
		r.incomplete = true
		return
	case !ok:
		s.blocks++
	}
	s.retain(id)
	s.release(b.scope)
	b.scope, b.tokens = id, tokens
	for i := range b.copies {
		b.copies[i] = uint8(copies >> (8 * i))
	}
	r.blocks[hash] = b
}

// State returns the size.
func (s *BlockSize) State() *statev1.IngestBlockSize {
	return &statev1.IngestBlockSize{Tokens: s.Tokens, OffDevice: s.offDevice, Former: s.former}
}

// Restore sets the size, unless it was configured. A size above MaxBlockSize, which earlier versions learned, stays unknown.
func (s *BlockSize) Restore(state *statev1.IngestBlockSize) {
	if !s.Configured && state.Tokens <= MaxBlockSize {
		*s = BlockSize{Tokens: state.Tokens, offDevice: state.OffDevice, former: state.Former}
	}
}

// changes records which groups and scoped blocks of Rules have changed. Its methods do nothing if it is nil.
type changes struct {
	// ranks are the dp ranks with changes, usually one.
	ranks []rankChanges
}

// rankChanges are the changes of a dp rank.
type rankChanges struct {
	rank uint32
	// reset reports whether groups and scoped blocks were forgotten before the other changes, and saltsCleared whether salted blocks were.
	reset, saltsCleared bool
	groups              bool     // whether a group has changed
	blocks              []uint64 // hashes; may repeat
}

// of returns the changes of a rank.
func (c *changes) of(rank uint32) *rankChanges {
	for i := range c.ranks {
		if c.ranks[i].rank == rank {
			return &c.ranks[i]
		}
	}
	n := len(c.ranks)
	c.ranks = slices.Grow(c.ranks, 1)[:n+1]
	r := &c.ranks[n]
	*r = rankChanges{rank: rank, blocks: r.blocks[:0]}
	return r
}

// clear forgets the changes, and keeps at most maxRulesKept bytes of memory for the next.
func (c *changes) clear() {
	if len(c.ranks) > 1 || cap(c.ranks[0].blocks) > maxRulesKept/8 {
		c.ranks = nil
		return
	}
	c.ranks = c.ranks[:0]
}

// touch records that a rank has changed.
func (c *changes) touch(rank uint32) {
	if c != nil {
		c.of(rank)
	}
}

// groupsChanged records that an attention group of a rank has changed.
func (c *changes) groupsChanged(rank uint32) {
	if c != nil {
		c.of(rank).groups = true
	}
}

func (c *changes) addBlock(rank uint32, hash uint64) {
	if c != nil {
		r := c.of(rank)
		r.blocks = append(r.blocks, hash)
	}
}

// clearScopes records that all salted blocks of a rank are forgotten.
func (c *changes) clearScopes(rank uint32) {
	if c != nil {
		r := c.of(rank)
		r.saltsCleared, r.blocks = true, r.blocks[:0]
	}
}

// reset records that all state of a rank is forgotten.
func (c *changes) reset(rank uint32) {
	if c != nil {
		r := c.of(rank)
		*r = rankChanges{rank: rank, reset: true, blocks: r.blocks[:0]}
	}
}

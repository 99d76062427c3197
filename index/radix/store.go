package radix

import (
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/attribute"
)

// Stored is a chain of blocks.
type Stored struct {
	// Parent is the block hash before the first block, if HasParent; otherwise, the chain starts a prompt.
	Parent    uint64
	HasParent bool
	// Blocks are the block hashes. Tokens are the tokens hashes of the first len(Tokens) blocks; the contents of the
	// others are unknown.
	Blocks, Tokens []uint64
	// LoRA is the name of the LoRA adapter; "" if none. The index keeps no reference to it.
	LoRA string
	// BlockSize is in tokens; 0 if unknown.
	BlockSize uint32
}

// Store adds blocks of a rank in a tier, which is below NumTiers.
func (x *Index) Store(r *Rank, tier int, s Stored) {
	x.stored += len(s.Blocks)
	attr := x.attributes(r, s)
	b := Block{Parent: s.Parent, HasParent: s.HasParent}
	before, placed := position{run: r.model.root}, true
	if b.HasParent {
		before, placed = x.locate(r, b.Parent)
	}
	for i, h := range s.Blocks {
		b.Hash = h
		if b.HasTokens = i < len(s.Tokens); b.HasTokens {
			b.Tokens = s.Tokens[i]
		}
		before, placed = x.storeBlock(r, tier, b, attr, before, placed)
		b.Parent, b.HasParent = h, true
	}
	r.attrs.Release(attr)
}

// attributes returns the slot of a chain's attributes, which the caller must release. A rank with too many different
// attributes loses the further ones.
func (x *Index) attributes(r *Rank, s Stored) uint32 {
	attr, _ := r.attrs.Acquire(attribute.Set{LoRA: s.LoRA, BlockSize: s.BlockSize})
	if attr >= x.tree.limits.attributes {
		r.attrs.Release(attr)
		attr = 0
		r.attrs.Use(attr)
	}
	return attr
}

// locate returns the place of a block of a rank, and records it if it was split off its run.
func (x *Index) locate(r *Rank, hash uint64) (_ position, ok bool) {
	s, i, ok := r.table.Find(hash)
	if !ok || !s.Tags[i].hasPlace() {
		return position{}, false
	}
	at := &s.Slots[i].Value.at
	*at = x.tree.resolve(*at)
	return *at, true
}

// storeBlock stores a block. The parent has the place before, if placed; otherwise it has no place. It returns the
// block's place; ok is false if it has none.
func (x *Index) storeBlock(r *Rank, tier int, b Block, attr uint32, before position, placed bool) (_ position, ok bool) {
	seg, i, existed := r.table.Put(b.Hash)
	s, tag := &seg.Slots[i].Value, &seg.Tags[i]
	old, was := s.at, *tag
	bit := tierBit(tier)
	switch {
	case !existed:
		r.attrs.Use(attr)
		tag.setAttr(attr)
	case b.HasTokens && attr != was.attr():
		r.attrs.Use(attr)
		r.attrs.Release(was.attr())
		tag.setAttr(attr)
	}
	if was&bit == 0 {
		r.blocks[tier]++
		r.digests[tier] ^= wire.BlockDigest(b.Hash)
	}
	*tag |= bit
	h := newHolder(r.number, tier)
	switch {
	case b.HasTokens && placed:
		if was&tagOrphan != 0 {
			r.orphans.remove(old.offset)
		}
		s.setParent(tag, b)
		*tag &^= tagNoContent | tagOrphan
		s.at = x.tree.place(before, b.Tokens, h)
		at := s.at
		switch {
		case was.hasPlace() && x.tree.resolve(old) == at:
			if was&bit == 0 {
				x.tree.hold(at, h)
			}
		default: // hold first, since the new place may follow the old one
			x.hold(r, at, *tag)
			if was.hasPlace() {
				x.release(r, old, was)
			}
		}
		if r.orphans.any() {
			x.adopt(r, b.Hash, at)
		}
		return at, true
	case was.hasPlace():
		if was&bit == 0 {
			x.tree.hold(old, h)
		}
		return old, true
	case b.HasTokens:
		if was&tagOrphan != 0 {
			r.orphans.remove(old.offset)
		}
		s.setParent(tag, b)
		*tag = *tag&^tagNoContent | tagOrphan
		s.at = position{offset: r.orphans.add(orphan{hash: b.Hash, tokens: b.Tokens, parent: b.Parent})}
	case !existed:
		s.setParent(tag, b)
		*tag |= tagNoContent
	}
	return position{}, false
}

func (s *slot) setParent(tag *tag, b Block) {
	if s.parent, *tag = 0, *tag&^tagParent; b.HasParent {
		s.parent, *tag = b.Parent, *tag|tagParent
	}
}

// hold adds a name of a block in the tiers of a tag.
func (x *Index) hold(r *Rank, at position, tag tag) {
	for tier := range NumTiers {
		if tag&tierBit(tier) != 0 {
			x.tree.hold(at, newHolder(r.number, tier))
		}
	}
}

// release removes a name of a block in the tiers of a tag.
func (x *Index) release(r *Rank, at position, tag tag) {
	for tier := range NumTiers {
		if tag&tierBit(tier) != 0 {
			x.tree.release(at, newHolder(r.number, tier))
		}
	}
}

package radix

import (
	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/kvblock"
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
	// TokenIDs are the tokens of all blocks, the same number for each; none if they are unknown.
	TokenIDs []uint32
}

// Store adds blocks of a rank in a tier, which is below NumTiers. Consecutive new blocks of a run are added to the tree at
// once.
//
// A store in device memory, the first tier, sets the content of a block. A store in another tier is of a copy: it sets the content only if that is
// unknown and device memory does not hold the block.
func (x *Index) Store(r *Rank, tier int, s Stored) {
	x.stored += len(s.Blocks)
	attr := x.attributes(r, s)
	b := Block{Parent: s.Parent, HasParent: s.HasParent}
	before, placed := position{run: r.model.root}, true
	// A chain of several blocks is usually new to the rank: storeNew is tried first. Prefetch would look for slots that do not exist.
	mayBeNew := len(s.Blocks) >= minNew && len(s.Tokens) == len(s.Blocks) && x.tree.retained.limit == 0
	if len(s.Blocks) > 1 && !mayBeNew {
		r.table.Prefetch(s.Blocks)
	}
	if b.HasParent {
		before, placed = r.locate(b.Parent)
	}
	bit, held := r.bits[tier], stretch{} // the stretch is not yet held in the tree
	for i := 0; i < len(s.Blocks); i++ {
		if mayBeNew && placed && len(r.orphans.first) == 0 {
			n, known := x.storeNew(r, tier, attr, &b, s.Blocks[i:], s.Tokens[i:], &before, &held)
			if i += n; i == len(s.Blocks) {
				break
			}
			if known {
				mayBeNew = false
				r.table.Prefetch(s.Blocks[i:])
			}
		}
		h := s.Blocks[i]
		b.Hash = h
		if b.HasTokens = i < len(s.Tokens); b.HasTokens {
			b.Tokens = s.Tokens[i]
		}
		e, existed := r.table.Put(h)
		if existed || !b.HasTokens || !placed {
			x.tree.hold(held, r.number, bit)
			held = stretch{}
			before, placed = x.storeBlock(r, tier, b, attr, e, existed, before, placed)
			if placed && b.HasTokens && x.tree.run(before.run).tokens[before.offset] == b.Tokens {
				x.tree.retain(before, s.idsOf(i))
			}
		} else {
			before = x.tree.place(before, s.Tokens[i:])
			x.tree.retain(before, s.idsOf(i))
			e.Value = slot{b.Parent, newTag(bit, b.HasParent, attr).withPlace(before)}
			r.attrs.Use(attr, 1)
			r.count(tier, h)
			if r.names != nil {
				r.nameBlocks(before, h)
			}
			if !held.extend(before.stretch()) {
				x.tree.hold(held, r.number, bit)
				held = before.stretch()
			}
			if r.orphans.awaits(h) {
				x.adopt(r, h, before)
			}
		}
		b.Parent, b.HasParent = h, true
	}
	x.tree.hold(held, r.number, bit)
	r.attrs.Release(attr)
}

// minNew is the number of blocks of a chain from which on storeNew is worth its preparation.
const minNew = 4

// storeNew stores the first blocks of a chain that the rank does not have, and whose places follow the block before in its run. It returns how many there are, and
// whether it ended at a block that the rank has. b is the block before, as a parent; held is the stretch that is not yet held in the tree. All are
// updated.
func (x *Index) storeNew(
	r *Rank, tier int, attr uint32, b *Block, blocks, tokens []uint64, before *position, held *stretch,
) (n int, known bool) {
	in := x.tree.run(before.run)
	from, length, most := before.offset+1, uint32(len(in.tokens)), 0
	if from < length {
		most = commonPrefix(in.tokens[from:], tokens)
	} else if from == length {
		most = min(len(tokens), int(x.tree.limits.run-length))
		if _, hasBranch := in.findBranch(before.offset); hasBranch {
			most = 0 // the block may follow in another run
		}
	}
	if most == 0 {
		return 0, false
	}
	next := slot{b.Parent, newTag(r.bits[tier], b.HasParent, attr).withPlace(position{before.run, from})}
	digest := r.digests[tier]
	n = r.table.PutNew(blocks[:most], func(i int) slot {
		s := next
		next.parent, next.tag = blocks[i], (next.tag|tagParent)+1<<placeShift
		digest ^= kvblock.Digest(blocks[i])
		return s
	})
	if n == 0 {
		return 0, true
	}
	if r.names != nil {
		r.nameBlocks(position{before.run, from}, blocks[:n]...)
	}
	r.digests[tier] = digest
	r.blocks[tier] += uint64(n)
	r.attrs.Use(attr, n)
	if from == length {
		x.tree.grow(in, n, len(tokens))
		in.tokens = append(in.tokens, tokens[:n]...)
	}
	if added := (stretch{before.run, from, from + uint32(n)}); !held.extend(added) {
		x.tree.hold(*held, r.number, r.bits[tier])
		*held = added
	}
	b.Parent, b.HasParent = blocks[n-1], true
	*before = position{before.run, from + uint32(n) - 1}
	return n, n < most
}

// attributes returns the slot of a chain's attributes, which the caller must release. A rank with too many different
// attributes loses the further ones.
func (x *Index) attributes(r *Rank, s Stored) uint32 {
	attr, _ := r.attrs.Acquire(attribute.Set{LoRA: s.LoRA, BlockSize: s.BlockSize})
	if attr >= x.tree.limits.attributes {
		r.attrs.Release(attr)
		attr = 0
		r.attrs.Use(attr, 1)
	}
	return attr
}

// clean removes the stale bits of a block, and reports whether a tier is left. Otherwise, the slot is like a new one.
func (x *Index) clean(r *Rank, e *entry) bool {
	t := &e.Value.tag
	if t.has(r.stale) {
		if t.isPlaced() {
			x.tree.releaseRun(t.place().run, r.number, r.stale)
		}
		*t &^= tag(r.stale)
	}
	if t.has(r.live) {
		return true
	}
	r.release(*t)
	e.Value = slot{}
	return false
}

// storeBlock stores a block in a slot, which is new unless existed is set. The parent has the place before, if placed;
// otherwise it has no place. It returns the block's place; ok is false if it has none.
func (x *Index) storeBlock(
	r *Rank, tier int, b Block, attr uint32, e *entry, existed bool,
	before position, placed bool,
) (_ position, ok bool) {
	existed = existed && x.clean(r, e)
	s, was := &e.Value, e.Value.tag
	bit := r.bits[tier]
	if existed && tier > 0 && (was.has(r.bits[0]) || was&tagNoContent == 0) {
		b.HasTokens = false // of a copy, by a connector that may know less of its content
	}
	added := !was.has(bit)
	if s.tag |= tag(bit); added {
		r.count(tier, b.Hash)
	}
	wasPlaced := existed && was.isPlaced()
	if !existed || b.HasTokens {
		// Use before Release, since it may be the same slot.
		if r.attrs.Use(attr, 1); existed {
			r.attrs.Release(was.attr())
		}
		s.tag = s.tag.withAttr(attr)
	}
	if b.HasTokens && was&tagNoContent != 0 {
		r.hidden--
	}
	switch {
	case b.HasTokens && placed:
		if was&tagOrphan != 0 {
			r.orphans.remove(was.orphan())
		}
		at := x.tree.place(before, []uint64{b.Tokens})
		s.setParent(b)
		s.tag = s.tag.withPlace(at)
		if wasPlaced && at == was.place() {
			if added {
				x.tree.hold(at.stretch(), r.number, bit)
			}
		} else { // hold first, since the new place may follow the old one
			x.hold(r, at, s.tag)
			if wasPlaced {
				x.release(r, was.place(), was)
			}
			if r.names != nil {
				r.nameBlocks(at, b.Hash)
				if wasPlaced {
					r.names.unplace(was.place().run)
				}
			}
		}
		if r.orphans.awaits(b.Hash) {
			x.adopt(r, b.Hash, at)
		}
		return at, true
	case wasPlaced:
		if added {
			x.tree.hold(was.place().stretch(), r.number, bit)
		}
		return was.place(), true
	case b.HasTokens:
		if was&tagOrphan != 0 {
			r.orphans.remove(was.orphan())
		}
		s.setParent(b)
		s.tag = s.tag.withOrphan(r.orphans.add(orphan{hash: b.Hash, tokens: b.Tokens, parent: b.Parent}))
	case !existed:
		s.setParent(b)
		s.tag |= tagNoContent
		r.hidden++
	}
	return position{}, false
}

// hold adds a name of a block in the tiers of a tag.
func (x *Index) hold(r *Rank, at position, t tag) {
	for _, bit := range r.bits {
		if t.has(bit) {
			x.tree.hold(at.stretch(), r.number, bit)
		}
	}
}

// release removes a name of a block in the tiers of a tag.
func (x *Index) release(r *Rank, at position, t tag) {
	for _, bit := range r.bits {
		if t.has(bit) {
			x.tree.release(at.stretch(), r.number, bit)
		}
	}
}

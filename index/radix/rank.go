package radix

import (
	"iter"

	"github.com/kvcast/kvcast/internal/hashtable"
)

// Rank is the blocks of a dp rank, by block hash. A block hash is one name of a block: several may have the same
// place in the tree.
type Rank struct {
	model   *model
	number  uint32 // in Index.ranks
	table   hashtable.Table[slot, uint8]
	orphans orphans
	blocks  [NumTiers]uint64 // number of block hashes
	digests [NumTiers]uint64 // XOR of wire.BlockDigest of the block hashes
}

// slot is what a rank knows of a block, beside its tag.
type slot struct {
	parent uint64 // block hash, if the tag has tagParent
	// at is the block's place in the tree, if the tag has neither tagNoContent nor tagOrphan. For an orphan, offset
	// is its number.
	at position
}

// Tag bits of a block, above one bit for each tier that holds it.
const (
	allTiers     uint8 = 1<<NumTiers - 1
	tagNoContent uint8 = 1 << 4 // the content is unknown
	tagOrphan    uint8 = 1 << 5 // the content is known, and the parent's place is unknown
	tagParent    uint8 = 1 << 6 // the block has a parent
)

func hasPlace(tag uint8) bool { return tag&allTiers != 0 && tag&(tagNoContent|tagOrphan) == 0 }

// Block is a block of a rank.
type Block struct {
	// Hash is the block hash.
	Hash uint64
	// Tokens is the tokens hash, if HasTokens; otherwise, the content is unknown.
	Tokens    uint64
	HasTokens bool
	// Parent is the block hash before the block, if HasParent; otherwise, the block starts a prompt.
	Parent    uint64
	HasParent bool
}

// Digest returns the number of block hashes that a rank holds in a tier, and the XOR of their wire.BlockDigest.
func (r *Rank) Digest(tier int) (blocks, digest uint64) { return r.blocks[tier], r.digests[tier] }

// Tiers returns the tiers in which a rank holds a block, as bits; 0 if none.
func (r *Rank) Tiers(hash uint64) uint8 {
	_, tag, _ := r.table.Get(hash)
	return tag & allTiers
}

// Blocks yields the blocks of a rank in a tier, in no order. Parent and Tokens are those of the store that gave the
// block its place. The index must not be changed meanwhile.
func (x *Index) Blocks(r *Rank, tier int) iter.Seq[Block] {
	return func(yield func(Block) bool) {
		for s := range r.table.Segments() {
			for i := range s.Slots {
				if tag := s.Tags[i]; tag&(1<<tier) != 0 && !yield(x.block(r, s.Slots[i].Key(), s.Slots[i].Value, tag)) {
					return
				}
			}
		}
	}
}

func (x *Index) block(r *Rank, hash uint64, s slot, tag uint8) Block {
	b := Block{Hash: hash, Parent: s.parent, HasParent: tag&tagParent != 0, HasTokens: tag&tagNoContent == 0}
	switch {
	case tag&tagOrphan != 0:
		b.Tokens = r.orphans.all[s.at.offset].tokens
	case b.HasTokens:
		at := x.tree.resolve(s.at)
		b.Tokens = x.tree.runs[at.run].tokens[at.offset]
	}
	return b
}

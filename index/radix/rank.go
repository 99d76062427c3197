package radix

import (
	"github.com/kvcast/kvcast/internal/attribute"
	"github.com/kvcast/kvcast/internal/hashtable"
)

// Rank is the blocks of a dp rank, by block hash. A block hash is one name of a block: several may have the same
// place in the tree.
type Rank struct {
	// Owner is the value given to AddRank.
	Owner   any
	model   *model
	number  uint32 // in Index.ranks
	table   hashtable.Table[slot, tag]
	orphans orphans
	attrs   attribute.Interner
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

// tag has one bit for each tier that holds a block, then flags, then the slot of the block's attributes in Rank.attrs.
type tag uint32

const (
	allTiers     tag = 1<<NumTiers - 1
	tagNoContent tag = 1 << 8  // the content is unknown
	tagOrphan    tag = 1 << 9  // the content is known, and the parent's place is unknown
	tagParent    tag = 1 << 10 // the block has a parent
	attrShift        = 11
	// maxAttributes is the number of slots of attributes that a tag can have.
	maxAttributes = 1 << (32 - attrShift)
)

func tierBit(tier int) tag { return 1 << tier }

func (t tag) tiers() uint8   { return uint8(t & allTiers) }
func (t tag) attr() uint32   { return uint32(t >> attrShift) }
func (t tag) hasPlace() bool { return t&allTiers != 0 && t&(tagNoContent|tagOrphan) == 0 }

func (t *tag) setAttr(slot uint32) { *t = *t&(1<<attrShift-1) | tag(slot)<<attrShift }

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
	// Tiers has a bit for each tier that holds the block: 1 for tier 0, 2 for tier 1, and so on.
	Tiers uint8
	// LoRA is the name of the LoRA adapter; "" if none.
	LoRA string
	// BlockSize is in tokens; 0 if unknown.
	BlockSize uint32
}

// Model returns the model that was given to AddRank.
func (r *Rank) Model() string { return r.model.name }

// Digest returns the number of block hashes that a rank holds in a tier, and the XOR of their wire.BlockDigest.
func (r *Rank) Digest(tier int) (blocks, digest uint64) { return r.blocks[tier], r.digests[tier] }

// Tiers returns the tiers in which a rank holds a block, as bits; 0 if none.
func (r *Rank) Tiers(hash uint64) uint8 {
	_, t, _ := r.table.Get(hash)
	return t.tiers()
}

// Find returns a block of a rank, if a tier holds it.
func (x *Index) Find(r *Rank, hash uint64) (_ Block, ok bool) {
	s, t, ok := r.table.Get(hash)
	if !ok {
		return Block{}, false
	}
	return x.block(r, hash, s, t), true
}

// Scan appends blocks of a rank to a slice, in no order, and returns the slice and where the next call continues: 0 if
// the scan is complete. The first call is from 0. A call visits a bounded number of blocks. The index may be changed
// between the calls: a scan has each block once at most, as it was at one of the calls, and misses no block that the
// rank holds all the time. Scan only reads; several calls may run at the same time as matches.
func (x *Index) Scan(r *Rank, from uint64, to []Block) (blocks []Block, next uint64) {
	s, next := r.table.SegmentAt(from)
	for i := range s.Slots {
		if b := &s.Slots[i]; b.Used() && b.Hash() >= from {
			to = append(to, x.block(r, b.Key(), b.Value, s.Tags[i]))
		}
	}
	return to, next
}

func (x *Index) block(r *Rank, hash uint64, s slot, t tag) Block {
	set := r.attrs.At(t.attr())
	b := Block{
		Hash: hash, Parent: s.parent, HasParent: t&tagParent != 0, HasTokens: t&tagNoContent == 0,
		Tiers: t.tiers(), LoRA: set.LoRA, BlockSize: set.BlockSize,
	}
	switch {
	case t&tagOrphan != 0:
		b.Tokens = r.orphans.all[s.at.offset].tokens
	case b.HasTokens:
		at := x.tree.resolve(s.at)
		b.Tokens = x.tree.runs[at.run].tokens[at.offset]
	}
	return b
}

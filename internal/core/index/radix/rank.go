package radix

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Rank is the blocks of a dp rank, by block hash. A block hash is one name of a block: several may have the same
// place in the tree.
type Rank struct {
	// Owner is the value given to AddRank.
	Owner   any
	model   *model
	number  uint32 // in Index.ranks
	table   table
	orphans orphans
	hidden  int // the number of blocks whose content is unknown
	names   rankNames
	attrs   attribute.Interner
	// bits has the bit of each tier in tags and holdings. A tier that is cleared gets another bit.
	bits [NumTiers]uint8
	live uint8 // all bits
	// stale is the former bits that tags and holdings may still have. Exactly if it is not 0, a sweep removes them.
	stale   uint8
	blocks  [NumTiers]uint64 // number of block hashes
	digests [NumTiers]uint64 // XOR of kvblock.Digest of the block hashes
}

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
	// Place is 0 if the block has no place in the tree. Otherwise, places in ascending order are those of runs, one
	// after the other, from the first block to the last. Blocks with the same place have the same prefix.
	Place uint64
}

// Model returns the model that was given to AddRank.
func (r *Rank) Model() string { return r.model.name }

// Number returns the rank's number in its index: a small one that no other rank has. A rank that is cleared may get another one.
func (r *Rank) Number() uint32 { return r.number }

// Numberings returns how often a rank has got a number.
func (x *Index) Numberings() uint64 { return x.numberings }

// NumNumbers returns a number that is larger than those of all ranks.
func (x *Index) NumNumbers() uint32 { return uint32(len(x.ranks)) }

// Rank returns the rank with a number, which must exist.
func (x *Index) Rank(number uint32) *Rank { return x.ranks[number].rank }

// Digest returns the number of block hashes that a rank holds in a tier, and the XOR of their kvblock.Digest.
func (r *Rank) Digest(tier int) (blocks, digest uint64) { return r.blocks[tier], r.digests[tier] }

// tiers returns the tiers of bits.
func (r *Rank) tiers(bits uint8) (tiers uint8) {
	for tier, bit := range r.bits {
		if bits&bit != 0 {
			tiers |= 1 << tier
		}
	}
	return tiers
}

// Tiers returns the tiers in which a rank holds a block, as bits; 0 if none.
func (r *Rank) Tiers(hash uint64) uint8 {
	s, _ := r.table.Get(hash)
	return r.tiers(uint8(s.tag))
}

// locate returns the place of a block, if it has one.
func (r *Rank) locate(hash uint64) (_ position, ok bool) {
	s, _ := r.table.Get(hash)
	return s.tag.place(), s.tag.has(r.live) && s.tag.isPlaced()
}

// Place returns the place of a block in the tree, if it has one: a number that is the same for all ranks that hold the content after
// the same prompt, as long as one of them does.
func (r *Rank) Place(hash uint64) (place uint64, ok bool) {
	at, ok := r.locate(hash)
	return at.number(), ok
}

// Holds reports whether a tier of a rank holds the block with a place.
func (x *Index) Holds(r *Rank, place uint64, tier int) bool {
	at := tag(place << placeShift).place()
	return x.tree.run(at.run).tiers(r.number, at.offset)&r.bits[tier] != 0
}

// PlaceOf is Rank.Place, and reports whether the block hash is the only name that the rank has for the block.
func (x *Index) PlaceOf(r *Rank, hash uint64) (place uint64, only, ok bool) {
	s, _ := r.table.Get(hash)
	if !s.tag.has(r.live) || !s.tag.isPlaced() {
		return 0, false, false
	}
	at := s.tag.place()
	run := x.tree.run(at.run)
	only = run.tiers(r.number, at.offset)&r.live == uint8(s.tag)&r.live
	if len(run.twins()) > 0 {
		only = only && !slices.ContainsFunc(r.bits[:], func(bit uint8) bool {
			return run.twins()[twin{at.offset, r.number, bit}] > 0
		})
	}
	return at.number(), only, true
}

// HasUnplaced reports whether a rank may have blocks that Match does not find: without a place, or after blocks that were forgotten.
func (x *Index) HasUnplaced(r *Rank) bool {
	return r.hidden > 0 || len(r.orphans.first) > 0 || x.tree.detachedRuns > 0
}

// Prefetch loads what Store and Remove read of the rank's table for some blocks, so that the cache misses of several calls overlap.
func (r *Rank) Prefetch(blocks []uint64) { r.table.Prefetch(blocks) }

// count adds a block hash to a tier.
func (r *Rank) count(tier int, hash uint64) {
	r.blocks[tier]++
	r.digests[tier] ^= kvblock.Digest(hash)
}

// drop deletes a block without tiers from the table.
func (r *Rank) drop(e *entry) {
	r.release(e.Value.tag)
	r.table.Delete(e)
}

// release frees what a block without tiers uses.
func (r *Rank) release(t tag) {
	if t&tagOrphan != 0 {
		r.orphans.remove(t.orphan())
	}
	if t&tagNoContent != 0 {
		r.hidden--
	}
	if r.names != nil && t.isPlaced() {
		r.names.unplace(t.place().run)
	}
	r.attrs.Release(t.attr())
}

// Find returns a block of a rank, if a tier holds it.
func (x *Index) Find(r *Rank, hash uint64) (_ Block, ok bool) {
	s, _ := r.table.Get(hash)
	if !s.tag.has(r.live) {
		return Block{}, false
	}
	b := x.block(r, hash, s)
	if s.tag.isPlaced() {
		at := s.tag.place()
		b.Tokens = x.tree.run(at.run).tokens[at.offset]
	}
	return b, true
}

// scanSlots is the number of slots that Scan visits at least. Scan reads the contents of all blocks together, so that
// cache misses overlap.
const scanSlots = 256

// maxScanned is the number of blocks that Scan returns at most.
const maxScanned = scanSlots + hashtable.MaxSegment - 1

// Scan appends blocks of a rank to a slice, in no order, and returns the slice and where the next call continues: 0 if
// the scan is complete. The first call is from 0. A call returns at most 383 blocks. The index may be changed between the
// calls: a scan has each block once at most, as it was at one of the calls, and misses no block that the rank holds all
// the time. Scan only reads; several calls may run at the same time as matches.
func (x *Index) Scan(r *Rank, from uint64, to []Block) (blocks []Block, next uint64) {
	places := make([]position, 0, maxScanned) // of the blocks from first on; zero if unknown
	first := len(to)
	for slots := 0; slots < scanSlots && (slots == 0 || from != 0); {
		s, next := r.table.SegmentAt(from)
		s.Prefetch()
		for i := range s.Len() {
			b := s.At(i)
			if b == nil || !b.Value.tag.has(r.live) || b.Cursor() < from {
				continue
			}
			t := b.Value.tag
			at := position{}
			if t.isPlaced() {
				at = t.place()
			}
			places = append(places, at)
			to = append(to, x.block(r, b.Key(), b.Value))
		}
		slots, from = slots+s.Len(), next
	}
	x.readContents(to[first:], places)
	return to, from
}

// readContents sets the tokens hashes of blocks that have places.
func (x *Index) readContents(blocks []Block, places []position) {
	tokens := make([][]uint64, 0, maxScanned)
	for i := range blocks {
		tokens = append(tokens, x.tree.run(places[i].run).tokens)
	}
	for i := range blocks {
		if p := places[i]; p.run != 0 {
			blocks[i].Tokens = tokens[i][p.offset]
		}
	}
}

// block returns a block of a rank, without the content of one that has a place.
func (x *Index) block(r *Rank, hash uint64, s slot) Block {
	t := s.tag
	set := r.attrs.At(t.attr())
	b := Block{
		Hash: hash, Parent: s.parent, HasParent: t&tagParent != 0, HasTokens: t&tagNoContent == 0,
		Tiers: r.tiers(uint8(t)), LoRA: set.LoRA, BlockSize: set.BlockSize,
	}
	if t.isPlaced() {
		b.Place = t.place().number()
	} else if t&tagOrphan != 0 {
		b.Tokens = r.orphans.all[t.orphan()].tokens
	}
	return b
}

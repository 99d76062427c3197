// Package groups has the blocks of a dp rank in attention groups other than the main group, and judges stores of all groups.
//
// Of these blocks, the hashes are kept and the number of their copies: a physical block belongs to one group, so that copies are counted
// for each tier and group. Blocks are never evicted.
package groups

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Key identifies the blocks of an attention group in a tier.
type Key struct {
	// Group is one more than the engine's number, as in wire.Event.
	Group uint8
	Tier  kvblock.Tier
}

// KeyOf returns the key of a group in stored state.
func KeyOf(group uint32, tier kvblock.Tier) (Key, error) {
	if group == 0 || group > math.MaxUint8 {
		return Key{}, fmt.Errorf("attention group %d", group)
	}
	return Key{uint8(group), tier}, nil
}

// Blocks are the blocks of an attention group in a tier.
type Blocks struct {
	table      hashtable.Table[block]
	generation uint8 // the number of gaps
}

// block is a block's copies.Count, as of a generation: after the next gap, it has one copy.
type block struct {
	further            uint16
	unsure, generation uint8
}

func newBlocks() *Blocks { return &Blocks{table: hashtable.New[block]()} }

func (g *Blocks) count(b block) copies.Count {
	if b.generation != g.generation {
		return copies.Count{}
	}
	return copies.Count{Further: uint32(b.further), Unsure: uint32(b.unsure)}
}

func (g *Blocks) block(c copies.Count) block {
	return block{uint16(min(c.Further, math.MaxUint16)), uint8(min(c.Unsure, math.MaxUint8)), g.generation}
}

// Store stores a block. op is the effect if the block exists.
func (g *Blocks) Store(hash uint64, op copies.Op) {
	b, existed := g.table.Put(hash)
	c := copies.Count{}
	if existed {
		c = g.count(b.Value)
		c.Stored(op)
	}
	b.Value = g.block(c)
}

// Remove applies a remove of a block, and reports whether the block is gone, which is also said of most removes of unknown blocks.
func (g *Blocks) Remove(hash uint64, op copies.Op) (gone bool) {
	b := g.table.Find(hash)
	if b == nil {
		return op <= copies.RemoveDownTo || op == copies.RemoveCopy
	}
	c := g.count(b.Value)
	if c.Removed(op, false) {
		g.table.Delete(b)
		return true
	}
	b.Value = g.block(c)
	return false
}

// Has reports whether there is a block. A nil Blocks has none.
func (g *Blocks) Has(hash uint64) bool { return g != nil && g.table.Find(hash) != nil }

// Len returns the number of blocks. A nil Blocks has none.
func (g *Blocks) Len() int {
	if g == nil {
		return 0
	}
	return g.table.Len()
}

// Prefetch loads the blocks of hashes into the caches of the processor.
func (g *Blocks) Prefetch(hashes []uint64) { g.table.Prefetch(hashes) }

// All yields the blocks and their copies, in any order.
func (g *Blocks) All() func(yield func(uint64, copies.Count) bool) {
	return func(yield func(uint64, copies.Count) bool) {
		for b := range g.table.All() {
			if !yield(b.Key(), g.count(b.Value)) {
				return
			}
		}
	}
}

// gap leaves one copy of each block.
func (g *Blocks) gap() {
	if g.generation++; g.generation == 0 { // blocks may be of an earlier generation 0
		for b := range g.table.All() {
			b.Value = block{}
		}
	}
}

// State returns the blocks as they are in a checkpoint.
func (g *Blocks) State(rank uint32, key Key) *statev1.Table {
	s := &statev1.Table{DpRank: rank, Tier: uint32(key.Tier), Group: uint32(key.Group), BlockHashes: make([]uint64, 0, g.table.Len())}
	for hash, c := range g.All() {
		s.BlockHashes = append(s.BlockHashes, hash)
		if c != (copies.Count{}) {
			s.CopiedHashes = append(s.CopiedHashes, hash)
			s.FurtherCopies, s.UnsureStores = append(s.FurtherCopies, c.Further), append(s.UnsureStores, c.Unsure)
		}
	}
	return s
}

func (g *Blocks) restore(s *statev1.Table) error {
	if n := len(s.GetCopiedHashes()); len(s.GetFurtherCopies()) != n || len(s.GetUnsureStores()) != n {
		return fmt.Errorf("%d blocks with %d copies and %d unsure stores", n, len(s.GetFurtherCopies()), len(s.GetUnsureStores()))
	}
	for _, hash := range s.GetBlockHashes() {
		if _, existed := g.table.Put(hash); existed {
			return fmt.Errorf("block %d is there twice", hash)
		}
	}
	for i, hash := range s.GetCopiedHashes() {
		b := g.table.Find(hash)
		if b == nil {
			return fmt.Errorf("copies of block %d, which is missing", hash)
		}
		b.Value = g.block(copies.Count{Further: s.GetFurtherCopies()[i], Unsure: s.GetUnsureStores()[i]})
	}
	return nil
}

// Rank are the blocks of a dp rank in all groups but the main group. The zero value has none.
type Rank struct {
	tables map[Key]*Blocks
	// sparse has bit n set if group n has left out blocks of a store before. suspects are blocks that a group may not hold, though it has
	// them here. Both are lost in a recovery: more stores are unsure then.
	sparse   uint64
	suspects []Suspect
}

// Blocks returns the blocks of a group in a tier, for changes.
func (r *Rank) Blocks(key Key) *Blocks {
	g := r.tables[key]
	if g == nil {
		if r.tables == nil {
			r.tables = make(map[Key]*Blocks)
		}
		g = newBlocks()
		r.tables[key] = g
	}
	return g
}

// Find returns the blocks of a group in a tier; nil if it never had any.
func (r *Rank) Find(key Key) *Blocks { return r.tables[key] }

// Len returns the number of blocks.
func (r *Rank) Len() (n int) {
	for _, g := range r.tables {
		n += g.Len()
	}
	return n
}

// HasTier reports whether there are blocks in a tier.
func (r *Rank) HasTier(tier kvblock.Tier) bool {
	for key, g := range r.tables {
		if key.Tier == tier && g.Len() > 0 {
			return true
		}
	}
	return false
}

// Keys returns the keys of all blocks, sorted.
func (r *Rank) Keys() []Key {
	return slices.SortedFunc(maps.Keys(r.tables), func(a, b Key) int {
		return int(a.Group)<<8 + int(a.Tier) - int(b.Group)<<8 - int(b.Tier)
	})
}

// Gap leaves one copy of each block.
func (r *Rank) Gap() {
	for _, g := range r.tables {
		g.gap()
	}
}

// Drop drops the blocks of a tier, and returns their number.
func (r *Rank) Drop(tier kvblock.Tier) (blocks int) {
	r.suspects = slices.DeleteFunc(r.suspects, func(s Suspect) bool { return s.Key.Tier == tier })
	for key, g := range r.tables {
		if key.Tier == tier {
			blocks += g.Len()
			delete(r.tables, key)
		}
	}
	return blocks
}

// Restarted forgets what the stores of an engine have shown, which restarted.
func (r *Rank) Restarted() { r.sparse = 0 }

// Restore restores the blocks of a group in a tier from a checkpoint, which has them once.
func (r *Rank) Restore(key Key, s *statev1.Table) error {
	if r.tables[key] != nil {
		return fmt.Errorf("attention group %d is there twice", key.Group-1)
	}
	return r.Blocks(key).restore(s)
}

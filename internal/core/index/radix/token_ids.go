package radix

import (
	"math"
	"slices"
)

// tokenIDs are the token ids of a run's blocks, of which each has the same number of tokens. A block whose token ids are
// unknown has unknownID in place of its first one. Blocks at the end of the run may have none.
type tokenIDs struct {
	all []uint32
	// size is the number of tokens in each block.
	size uint32
}

// bounds returns where in all the token ids of a block begin and end. They are computed as int: a product of two uint32 wraps
// in a run of many large blocks.
func (ids *tokenIDs) bounds(offset uint32) (from, to int) {
	from = int(offset) * int(ids.size)
	return from, from + int(ids.size)
}

// unknownID is no token id. A block that has it is treated like one without token ids.
const unknownID = math.MaxUint32

// retained bounds the memory of token ids.
type retained struct {
	limit int64 // in bytes; 0: none are retained
	used  int64
}

// RetainTokenIDs makes the index keep the token ids of blocks that are stored from now on, up to a number of bytes. The ids
// of a block are kept once for all ranks that hold its content, and as long as the content has a place. Blocks are without
// them if there is no room, if they were orphans, or if blocks before them had another size.
func (x *Index) RetainTokenIDs(maxBytes int64) { x.tree.retained.limit = maxBytes }

// RetainsTokenIDs reports whether RetainTokenIDs was called.
func (x *Index) RetainsTokenIDs() bool { return x.tree.retained.limit > 0 }

// TokenIDLimit returns the argument of RetainTokenIDs; 0 if it was not called.
func (x *Index) TokenIDLimit() int64 { return x.tree.retained.limit }

// TokenIDBytes returns the memory of token ids.
func (x *Index) TokenIDBytes() int64 { return x.tree.retained.used }

// idsOf returns the token ids of a block of a chain; nil if there are none.
func (s *Stored) idsOf(block int) []uint32 {
	if len(s.TokenIDs) == 0 || len(s.TokenIDs)%len(s.Blocks) != 0 {
		return nil
	}
	size := len(s.TokenIDs) / len(s.Blocks)
	return s.TokenIDs[block*size : (block+1)*size]
}

// retain keeps the token ids of a block, if there is room.
func (t *tree) retain(p position, ids []uint32) {
	if t.retained.limit == 0 || len(ids) == 0 || ids[0] == unknownID {
		return
	}
	r := t.run(p.run)
	own := &r.rarely().ids
	if own.size == 0 {
		own.size = uint32(len(ids))
	}
	if own.size != uint32(len(ids)) {
		return
	}
	from, to := own.bounds(p.offset)
	if to > cap(own.all) && !t.growIDs(own, max(to, cap(r.tokens)*int(own.size))) {
		return
	}
	for len(own.all) < from {
		own.all = append(own.all, unknownID)
	}
	if to > len(own.all) {
		own.all = append(own.all, ids...)
		return
	}
	copy(own.all[from:to], ids)
}

// growIDs enlarges the capacity, and reports whether there was room.
func (t *tree) growIDs(own *tokenIDs, capacity int) bool {
	more := 4 * int64(capacity-cap(own.all))
	if t.retained.used+more > t.retained.limit {
		return false
	}
	t.retained.used += more
	own.all = append(make([]uint32, 0, capacity), own.all...)
	return true
}

// truncateIDs drops the token ids of the blocks from an offset on.
func (t *tree) truncateIDs(r *run, blocks uint32) {
	if r.rare == nil {
		return
	}
	own := &r.rare.ids
	if keep, _ := own.bounds(blocks); keep < len(own.all) {
		own.all = own.all[:keep]
	}
	if was := cap(own.all); was > 4*len(own.all)+minTokens*int(own.size) {
		own.all = slices.Clip(slices.Clone(own.all))
		t.retained.used -= 4 * int64(was-cap(own.all))
	}
}

func (t *tree) dropIDs(r *run) {
	if r.rare != nil {
		t.retained.used -= 4 * int64(cap(r.rare.ids.all))
		r.rare.ids = tokenIDs{}
	}
}

// tokenIDs returns the token ids of a block with a place; nil if they are unknown. They are valid until the index changes.
func (t *tree) tokenIDs(p position) []uint32 {
	rare := t.run(p.run).rare
	if rare == nil {
		return nil
	}
	own := &rare.ids
	from, to := own.bounds(p.offset)
	if own.size == 0 || to > len(own.all) || own.all[from] == unknownID {
		return nil
	}
	return own.all[from:to]
}

// AppendTokenIDs appends the token ids of a block that Scan has returned, if they are known.
func (x *Index) AppendTokenIDs(to []uint32, b *Block) []uint32 {
	if b.Place == 0 {
		return to
	}
	return append(to, x.tree.tokenIDs(tag(b.Place<<placeShift).place())...)
}

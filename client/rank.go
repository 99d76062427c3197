package client

import (
	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// rank is what a dp rank of a worker holds. Its table has each block hash that is in
// any tier, with its sequence hash as the value and, in the tag, its tiers and what
// is known of it.
//
// A block's sequence hash is computed when it is stored, where it begins a prompt or
// its parent's is known; else when the parent is stored whose sequence hash is. It
// stays the block's for as long as any tier has it, whether its parent does or not:
// the hash names all the tokens up to the block's end. A store that does not tell the
// block's contents, or follows a parent that is not known, changes nothing that is
// known; any other has the last word.
type rank struct {
	worker *worker
	number uint32
	holder uint32 // its name in the index
	table  *table

	waiting []waiting        // blocks that wait for their parent; those after the first are linked
	vacant  int32            // a free place there, -1 for none; linked by next
	first   map[uint64]int32 // by the parent's hash
	blocks  [numTiers]uint64 // distinct block hashes
	digests [numTiers]uint64 // XOR of splitmix64 of them

	incomplete bool
	gaps       uint64
	gap        *kvcastv1.Gap // the last one
}

// What a tag tells of a block, beside its tiers.
const (
	tagBare    uint8 = 1 << 4 // its contents are unknown, and the value means nothing
	tagWaiting uint8 = 1 << 5 // it waits for its parent, and the value is its place among those
)

// waiting is a block whose parent's sequence hash is not known.
type waiting struct {
	hash, tokens, parent uint64
	prev, next           int32 // of the same parent; -1 for none
}

// rankBits chooses how many segments a rank's table has.
const rankBits = 6

func newRank(w *worker, number, holder uint32, seed uint64) *rank {
	return &rank{worker: w, number: number, holder: holder, table: newTable(rankBits, seed, true), vacant: -1}
}

// storing is the stored block that is applied.
type storing struct {
	hash      uint64
	tokens    uint64
	hashed    bool // tokens is known
	parent    uint64
	hasParent bool
}

// store applies a stored block.
func (st *state) store(r *rank, tier int, b storing) {
	bit := uint8(1) << tier
	val, tag, held := r.table.tag(b.hash)
	if tag&bit == 0 {
		r.blocks[tier]++
		r.digests[tier] ^= wire.BlockDigest(b.hash)
	}
	known := held && tag&(tagBare|tagWaiting) == 0
	if known && tag&bit == 0 {
		st.index(val, r, tiers(bit))
	}
	tag |= bit
	if !held {
		tag |= tagBare
	}
	if !b.hashed {
		r.table.put(b.hash, val, tag)
		return
	}
	if seq, ok := r.sequence(b); ok {
		st.name(r, b.hash, val, tag, seq)
		return
	}
	if known {
		r.table.put(b.hash, val, tag)
		return
	}
	if tag&tagWaiting != 0 {
		r.stopWaiting(int32(val))
	}
	at := r.wait(b)
	r.table.put(b.hash, uint64(at), tag&^tagBare|tagWaiting)
}

// sequence returns a block's sequence hash, where its parent's is known.
func (r *rank) sequence(b storing) (uint64, bool) {
	if !b.hasParent {
		return b.tokens, true
	}
	parent, tag, ok := r.table.tag(b.parent)
	if !ok || tag&(tagBare|tagWaiting) != 0 {
		return 0, false
	}
	return wire.SequenceHash(parent, b.tokens), true
}

// name gives a block, whose table entry is val and tag, its sequence hash, and then
// those that wait for it theirs.
func (st *state) name(r *rank, hash, val uint64, tag uint8, seq uint64) {
	type named struct{ hash, seq uint64 }
	var more []named // that have become known, and whose children have not been looked at
	for {
		was := tag
		if tag &^= tagBare | tagWaiting; was&tagWaiting != 0 {
			r.stopWaiting(int32(val))
		}
		r.table.put(hash, seq, tag)
		switch {
		case was != tag:
			st.index(seq, r, tiers(tag))
		case val != seq:
			st.unindex(val, r, tiers(tag))
			st.index(seq, r, tiers(tag))
		}
		if at, ok := r.first[hash]; ok {
			for ; at >= 0; at = r.waiting[at].next {
				w := &r.waiting[at]
				more = append(more, named{w.hash, wire.SequenceHash(seq, w.tokens)})
			}
		}
		// One that was found twice has been named meanwhile.
		for {
			if len(more) == 0 {
				return
			}
			hash, seq = more[len(more)-1].hash, more[len(more)-1].seq
			more = more[:len(more)-1]
			if val, tag, _ = r.table.tag(hash); tag&tagWaiting != 0 {
				break
			}
		}
	}
}

// wait puts a block among those that wait for their parent.
func (r *rank) wait(b storing) int32 {
	if r.first == nil {
		r.first = make(map[uint64]int32)
	}
	at := r.vacant
	if at >= 0 {
		r.vacant = r.waiting[at].next
	} else {
		at = int32(len(r.waiting))
		r.waiting = append(r.waiting, waiting{})
	}
	next, ok := r.first[b.parent]
	if ok {
		r.waiting[next].prev = at
	} else {
		next = -1
	}
	r.waiting[at] = waiting{hash: b.hash, tokens: b.tokens, parent: b.parent, prev: -1, next: next}
	r.first[b.parent] = at
	return at
}

func (r *rank) stopWaiting(at int32) {
	w := r.waiting[at]
	switch {
	case w.prev >= 0:
		r.waiting[w.prev].next = w.next
	case w.next >= 0:
		r.first[w.parent] = w.next
	default:
		delete(r.first, w.parent)
	}
	if w.next >= 0 {
		r.waiting[w.next].prev = w.prev
	}
	r.waiting[at] = waiting{next: r.vacant}
	r.vacant = at
}

// remove applies a removed block.
func (st *state) remove(r *rank, tier int, hash uint64) {
	bit := uint8(1) << tier
	val, tag, ok := r.table.tag(hash)
	if !ok || tag&bit == 0 {
		return
	}
	r.blocks[tier]--
	r.digests[tier] ^= wire.BlockDigest(hash)
	if tag&(tagBare|tagWaiting) == 0 {
		st.unindex(val, r, tiers(bit))
	}
	if tag &^= bit; tiers(tag)&allTiers != 0 {
		r.table.put(hash, val, tag)
		return
	}
	if tag&tagWaiting != 0 {
		r.stopWaiting(int32(val))
	}
	r.table.remove(hash)
}

// reset makes a rank that holds nothing what a new one is, but for its gaps. What its
// tables have grown to is let go.
func (r *rank) reset() {
	for i := range r.table.segments {
		if s := &r.table.segments[i]; len(s.slots) > minSlots {
			*s = segment{}
		}
	}
	r.waiting, r.first, r.vacant, r.incomplete = nil, nil, -1, false
}

// clearTier empties a tier of a rank that may have others.
func (st *state) clearTier(r *rank, tier int) {
	if r.blocks[tier] == 0 {
		return
	}
	var hashes []uint64
	for seg := range r.table.segments {
		hashes = hashes[:0]
		r.table.each(seg, func(key, _ uint64, tag uint8) {
			if tag&(1<<tier) != 0 {
				hashes = append(hashes, key)
			}
		})
		for _, h := range hashes {
			st.remove(r, tier, h)
		}
	}
}

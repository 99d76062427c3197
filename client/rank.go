package client

import (
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// rank is the state of a dp rank of a worker. Its table maps each block hash that is held in a tier to the block's
// sequence hash, with the tiers and tag bits.
//
// The sequence hash is known if the block starts a prompt or its parent's sequence hash is known. Otherwise the
// block is an orphan until its parent's sequence hash is known. A known sequence hash stays while a tier holds the
// block, even if the parent is removed. A store without content, or with an unknown parent, does not change a known
// sequence hash; any other store replaces it.
type rank struct {
	worker *worker
	number uint32
	holder uint32 // the rank's number in the index
	table  hashtable.Table[uint64, uint8]

	orphans     []orphan
	freeOrphan  int32            // first unused element of orphans, linked by next; -1: none
	firstOrphan map[uint64]int32 // index of the first orphan, by the parent's block hash
	blocks      [numTiers]uint64 // number of distinct block hashes
	digests     [numTiers]uint64 // XOR of splitmix64 of the block hashes

	incomplete bool
	gaps       uint64
	lastGap    *kvcastv1.Gap
}

// Tag bits of a block, above the bits of its tiers.
const (
	tagNoContent uint8 = 1 << 4 // the content is unknown; the table's value is undefined
	tagOrphan    uint8 = 1 << 5 // the parent's sequence hash is unknown; the table's value is an index into orphans
)

// orphan is a block whose parent's sequence hash is unknown.
type orphan struct {
	hash, tokens, parent uint64
	prev, next           int32 // indexes of orphans with the same parent; -1: none
}

func newRank(w *worker, number, holder uint32) *rank {
	return &rank{worker: w, number: number, holder: holder, table: hashtable.New[uint64, uint8](), freeOrphan: -1}
}

// storedBlock is one block of a Stored event.
type storedBlock struct {
	hash      uint64
	tokens    uint64
	hasTokens bool
	parent    uint64
	hasParent bool
}

func (st *state) store(r *rank, tier int, b storedBlock) {
	bit := uint8(1) << tier
	val, tag, present := r.table.Get(b.hash)
	if tag&bit == 0 {
		r.blocks[tier]++
		r.digests[tier] ^= wire.BlockDigest(b.hash)
	}
	hasSequence := present && tag&(tagNoContent|tagOrphan) == 0
	if hasSequence && tag&bit == 0 {
		st.addToIndex(val, r, tiers(bit))
	}
	tag |= bit
	if !present {
		tag |= tagNoContent
	}
	if !b.hasTokens {
		r.table.Set(b.hash, val, tag)
		return
	}
	if seq, ok := r.sequenceHash(b); ok {
		st.setSequenceHash(r, b.hash, val, tag, seq)
		return
	}
	if hasSequence {
		r.table.Set(b.hash, val, tag)
		return
	}
	if tag&tagOrphan != 0 {
		r.removeOrphan(int32(val))
	}
	r.table.Set(b.hash, uint64(r.addOrphan(b)), tag&^tagNoContent|tagOrphan)
}

// sequenceHash returns a block's sequence hash; ok is false if the parent's sequence hash is unknown.
func (r *rank) sequenceHash(b storedBlock) (_ uint64, ok bool) {
	if !b.hasParent {
		return b.tokens, true
	}
	parent, tag, ok := r.table.Get(b.parent)
	if !ok || tag&(tagNoContent|tagOrphan) != 0 {
		return 0, false
	}
	return wire.SequenceHash(parent, b.tokens), true
}

// setSequenceHash sets the sequence hash of a block, whose table entry has val and tag, and of all orphans that
// descend from the block.
func (st *state) setSequenceHash(r *rank, hash, val uint64, tag uint8, seq uint64) {
	type adopted struct{ hash, seq uint64 }
	var queue []adopted
	for {
		before := tag
		if tag &^= tagNoContent | tagOrphan; before&tagOrphan != 0 {
			r.removeOrphan(int32(val))
		}
		r.table.Set(hash, seq, tag)
		switch {
		case before != tag:
			st.addToIndex(seq, r, tiers(tag))
		case val != seq:
			st.removeFromIndex(val, r, tiers(tag))
			st.addToIndex(seq, r, tiers(tag))
		}
		if at, ok := r.firstOrphan[hash]; ok {
			for ; at >= 0; at = r.orphans[at].next {
				o := &r.orphans[at]
				queue = append(queue, adopted{o.hash, wire.SequenceHash(seq, o.tokens)})
			}
		}
		for { // take the next block that is still an orphan, since a block may be queued twice
			if len(queue) == 0 {
				return
			}
			hash, seq = queue[len(queue)-1].hash, queue[len(queue)-1].seq
			queue = queue[:len(queue)-1]
			if val, tag, _ = r.table.Get(hash); tag&tagOrphan != 0 {
				break
			}
		}
	}
}

// addOrphan adds an orphan and returns its index.
func (r *rank) addOrphan(b storedBlock) int32 {
	if r.firstOrphan == nil {
		r.firstOrphan = make(map[uint64]int32)
	}
	at := r.freeOrphan
	if at >= 0 {
		r.freeOrphan = r.orphans[at].next
	} else {
		at = int32(len(r.orphans))
		r.orphans = append(r.orphans, orphan{})
	}
	next, ok := r.firstOrphan[b.parent]
	if ok {
		r.orphans[next].prev = at
	} else {
		next = -1
	}
	r.orphans[at] = orphan{hash: b.hash, tokens: b.tokens, parent: b.parent, prev: -1, next: next}
	r.firstOrphan[b.parent] = at
	return at
}

func (r *rank) removeOrphan(at int32) {
	o := r.orphans[at]
	switch {
	case o.prev >= 0:
		r.orphans[o.prev].next = o.next
	case o.next >= 0:
		r.firstOrphan[o.parent] = o.next
	default:
		delete(r.firstOrphan, o.parent)
	}
	if o.next >= 0 {
		r.orphans[o.next].prev = o.prev
	}
	r.orphans[at] = orphan{next: r.freeOrphan}
	r.freeOrphan = at
}

func (st *state) remove(r *rank, tier int, hash uint64) {
	bit := uint8(1) << tier
	val, tag, ok := r.table.Get(hash)
	if !ok || tag&bit == 0 {
		return
	}
	r.blocks[tier]--
	r.digests[tier] ^= wire.BlockDigest(hash)
	if tag&(tagNoContent|tagOrphan) == 0 {
		st.removeFromIndex(val, r, tiers(bit))
	}
	if tag &^= bit; tiers(tag)&allTiers != 0 {
		r.table.Set(hash, val, tag)
		return
	}
	if tag&tagOrphan != 0 {
		r.removeOrphan(int32(val))
	}
	r.table.Remove(hash)
}

// reset frees the memory of a rank without blocks. The gaps stay.
func (r *rank) reset() {
	r.table.Clear()
	r.orphans, r.firstOrphan, r.freeOrphan, r.incomplete = nil, nil, -1, false
}

func (st *state) clearTier(r *rank, tier int) {
	if r.blocks[tier] == 0 {
		return
	}
	var hashes []uint64
	for s := range r.table.Segments() {
		hashes = hashes[:0]
		for i := range s.Slots {
			if s.Slots[i].Used() && s.Tags[i]&(1<<tier) != 0 {
				hashes = append(hashes, s.Slots[i].Key())
			}
		}
		for _, h := range hashes {
			st.remove(r, tier, h)
		}
	}
}

package pipeline

import "strings"

// table holds the blocks of one worker, dp rank and tier: how often the engine
// holds each (it caches one hash in several physical blocks), and what a
// snapshot says of them.
type table struct {
	blocks blocks
	// copies are the further copies of blocks held more than once: few.
	copies map[uint64]uint32
	attrs  attributes
}

// block is a slot of the table. It holds no pointer, so that the garbage
// collector need not look into the table.
type block struct {
	hash       uint64
	parent     uint64
	tokensHash uint64
	attr       uint32 // slot in the table's attributes
	flags      blockFlags
}

// blockFlags are some flags, and above them the block's generation.
type blockFlags uint32

const (
	// flagHeld tells a block from an empty slot.
	flagHeld blockFlags = 1 << iota
	flagParent
	flagTokensHash
	// flagCopies says that the block may be in copies.
	flagCopies
	// flagTold is for a copy of the table that is being told to somebody.
	flagTold

	// generationShift is the number of flags.
	generationShift = iota
)

func newTable() *table {
	return &table{blocks: newBlocks(), copies: make(map[uint64]uint32)}
}

// storeRun adds a copy of each block of a run.
func (t *table) storeRun(r *run) {
	b := block{
		parent: r.parent,
		attr:   t.attrs.slot(attr{lora: r.key.lora, blockSize: r.key.blockSize}),
		flags:  flagHeld | t.blocks.age.mark(),
	}
	if r.hasParent {
		b.flags |= flagParent
	}
	if r.key.hashed {
		b.flags |= flagTokensHash
	}
	for i, hash := range r.hashes {
		b.hash = hash
		if r.key.hashed {
			b.tokensHash = r.tokensHashes[i]
		}
		t.store(&b)
		b.parent = hash
		b.flags |= flagParent
	}
	t.attrs.tidy(b.attr)
}

// store adds a copy of a block. What the newest store says of a block holds,
// but a store without tokens does not take away what is known of them.
func (t *table) store(b *block) {
	slot, held := t.blocks.put(b.hash)
	if !held {
		t.attrs.use(b.attr)
		*slot = *b
		return
	}
	t.copies[b.hash]++
	if b.flags&flagTokensHash != 0 {
		t.attrs.use(b.attr)
		t.attrs.release(slot.attr) // last, since it may be the same
		*slot = *b
	}
	slot.flags |= flagCopies
}

// remove takes away a copy of a block, and tells whether the block is now gone.
// A block that is not there counts as gone: the engine is right, and a router
// may hold it.
func (t *table) remove(hash uint64) (gone bool) {
	s, i, held := t.blocks.find(hash)
	if !held {
		return true
	}
	b := &s.slots[i]
	if b.flags&flagCopies != 0 {
		switch n := t.copies[hash]; n {
		case 0: // they were removed, or there was a gap
		case 1:
			delete(t.copies, hash)
			return false
		default:
			t.copies[hash] = n - 1
			return false
		}
	}
	if t.blocks.age.stale(b) {
		t.blocks.refresh(s, i)
	}
	t.attrs.release(b.attr)
	t.blocks.delete(s, i)
	return true
}

// gap makes every block stale, and lets it count once: a remove of it may have
// been lost, and must not pin it for good. It does not look at the blocks. It is
// false where there have been more gaps than a table can number.
func (t *table) gap() bool {
	if len(t.copies) > 0 {
		t.copies = make(map[uint64]uint32) // quicker than to clear a large one
	}
	return t.blocks.gap()
}

// expire takes away n stale blocks, or all if there are fewer, and appends them
// to gone.
func (t *table) expire(n int, gone []uint64) []uint64 {
	for range min(n, t.blocks.age.blocks) {
		s, i := t.blocks.nextStale()
		gone = append(gone, s.slots[i].hash)
		t.blocks.refresh(s, i)
		t.attrs.release(s.slots[i].attr)
		t.blocks.delete(s, i) // it has no copies: those before the gap are forgotten
	}
	return gone
}

func (t *table) holds(hash uint64) bool {
	_, _, held := t.blocks.find(hash)
	return held
}

// attr is what many blocks have in common.
type attr struct {
	lora string
	// salt is the cache salt; only trackers care for it.
	salt      string
	blockSize uint32
}

// attributes gives each attr in use a slot, so that a block need only hold a
// number. A slot is free again when no block uses it: what it takes is bounded
// by the blocks.
type attributes struct {
	slots []attrSlot
	index map[attr]uint32
	free  []uint32
	// recent is the slot that was asked for last, mostly the one asked for next.
	recent uint32
}

type attrSlot struct {
	attr   attr
	blocks int
}

func (a *attributes) slot(v attr) uint32 {
	if i := int(a.recent); i < len(a.slots) && a.slots[i].blocks > 0 && a.slots[i].attr == v {
		return a.recent
	}
	if i, ok := a.index[v]; ok {
		a.recent = i
		return i
	}
	if a.index == nil {
		a.index = make(map[attr]uint32)
	}
	v.lora, v.salt = strings.Clone(v.lora), strings.Clone(v.salt) // a batch's strings are the caller's memory
	var i uint32
	if n := len(a.free); n > 0 {
		i, a.free = a.free[n-1], a.free[:n-1]
	} else {
		i = uint32(len(a.slots))
		a.slots = append(a.slots, attrSlot{})
	}
	a.slots[i] = attrSlot{attr: v}
	a.index[v] = i
	a.recent = i
	return i
}

func (a *attributes) use(i uint32) { a.slots[i].blocks++ }

func (a *attributes) release(i uint32) {
	a.slots[i].blocks--
	a.tidy(i)
}

// tidy frees a slot that no block uses.
func (a *attributes) tidy(i uint32) {
	if s := &a.slots[i]; s.blocks == 0 {
		delete(a.index, s.attr)
		*s = attrSlot{}
		a.free = append(a.free, i)
	}
}

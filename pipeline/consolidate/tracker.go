package consolidate

import (
	"math"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/hashtable"
	"github.com/kvcast/kvcast/pipeline/attribute"
	"github.com/kvcast/kvcast/pipeline/copies"
)

// tracker records which of a worker's sources hold which blocks of one dp rank, so that a
// block is emitted once: stored when the first source stores it, and removed when the last
// one releases it. Changes to emit are queued until drain.
//
//   - A block is identified by its content: LoRA adapter, cache salt and sequence hash. One
//     whose sequence hash is unknown, since its tokens or its parent's are, is known by its
//     name alone until a store identifies it.
//   - A name is what a source calls a block: a source and a block hash. It refers to the
//     block that it was last stored as. A name that a source never gave refers to what
//     another source, the first of those that did, means by it.
//   - A name has copies, counted as those of a block in a table are. A source holds a block
//     while one of its names for it has a copy.
//   - A name resolves until its block is gone, even an idle name, which has no copy since
//     its source released it: offloading engines store children of blocks that they have
//     evicted. The same goes for the names of a source that cleared its cache or restarted.
//     Where hashes follow from contents, they mean the same block in the next incarnation,
//     and other sources may still use them. Where they are random, the next incarnation does
//     not use them. A name that its source stores as another block refers to that one.
//   - A source has at most maxIdleNames idle names for a block, beside the name that routers
//     know it by; the one released first is dropped. This bounds the names of an engine that
//     keeps renaming its blocks.
//   - Routers know a block by the name that it was first stored by.
//   - After a gap each name of a source has one copy, and is uncertain until it is stored
//     again: it does not keep a block without a certain holder when a source removes it.
type Tracker struct {
	sources   int
	maxBlocks int

	blocks slab[trackedBlock]
	names  slab[blockName]
	// byContent finds the blocks whose sequence hash is known, byName the names.
	byContent, byName hashtable.Index
	spaces            attribute.Interner
	// copies are the counts of names that have more than a first copy: few.
	copies map[uint32]copies.Count
	// children are the sources' numbers of held children.
	children []nameChildren
	// generations are the sources' numbers of gaps; see blockName.
	generations []uint32
	// named are the numbers of names by source, held those of names with copies, and
	// holdings is the sum of held. unresolved is the number of the blocks that are known by
	// their names alone.
	named, held []int
	holdings    int
	unresolved  int
	// oldest and newest are the ends of the list of all blocks in the order of creation. No block
	// before uncertainFrom has uncertain names only: only a gap makes names uncertain, and it
	// sets uncertainFrom to the oldest.
	oldest, newest, uncertainFrom uint32
	// out are the changes to emit; gone are the blocks removed in it.
	out  []Change
	gone []uint64
	// scratch is a reusable buffer for names.
	scratch []uint32
	counted *Counts
	// blocksLeft is the process's budget of blocks, of which a block uses trackedBlockUnits
	// and a name one; prepaid is the reserved part that is not used.
	blocksLeft *budget.Budget
	prepaid    int64
}

// trackedBlockUnits is a block's use of the budget: one for its record, and one for its
// place in the routers' table.
const trackedBlockUnits = 2

// trackedBlock is a block that some source holds.
type trackedBlock struct {
	sequence uint64
	// first is the block hash that routers know it by.
	first uint64
	// names is one of the names with copies, which form a ring; idle is the most recently
	// released of the idle names, which form another. 0 means an empty ring.
	names, idle uint32
	// space is the slot of its LoRA adapter and salt, counted from 1; 0 where the
	// block is known by its name alone.
	space        uint32
	older, newer uint32
}

// blockName is a source's name of a block.
type blockName struct {
	hash uint64
	// parent is the source's name of the block's parent.
	parent     uint64
	block      uint32 // 0 where the record is not in use
	next, prev uint32 // in one of the block's rings; 0 in none
	flags      nameFlags
}

// maxIdleNames bounds a source's idle names for a block. Most sources have one name
// for a block, and their next incarnation another.
const maxIdleNames = 4

// MaxSources is the number of sources that nameFlags can represent.
const MaxSources = 128

// nameFlags are a source, three flags, and above them the generation in which the name was
// last stored: if that is not the source's current one, the name is uncertain.
type nameFlags uint32

const (
	nameSource nameFlags = MaxSources - 1
	// nameIdle is set if the name has no copy, nameCopies if it may be in copies, and
	// nameParent if the block has a parent.
	nameIdle   nameFlags = 1 << 7
	nameCopies nameFlags = 1 << 8
	nameParent nameFlags = 1 << 9

	nameGenerationShift = 10
	maxNameGeneration   = 1<<(32-nameGenerationShift) - 1
)

func (n *blockName) source() int { return int(n.flags & nameSource) }

// held reports whether the source holds the block by this name.
func (n *blockName) held() bool { return n.flags&nameIdle == 0 }

// Change is a change to emit: the blocks of an event from index i up to j are stored,
// or those of the tracker's gone are removed.
type Change struct {
	Removed bool
	I, J    int
	// Rooted reports whether the stored blocks have no parent.
	Rooted bool
	Parent uint64
}

// Counts are the counters of trackers.
type Counts struct {
	// Suppressed are removes that left a block with a holder, Unknown those of unknown
	// blocks, NotHeld those by a source that does not hold the block by that name.
	Suppressed, Unknown, NotHeld uint64
	// UncertainRemoved are uncertain blocks that were removed to make room.
	UncertainRemoved uint64
	// Stores of blocks or names that were refused, by the bound.
	RefusedRank, RefusedTotal, RefusedAttributes uint64
}

// maxTracked bounds the numbers of records.
const maxTracked = math.MaxUint32 - 2*slabChunk

// New makes a tracker of up to MaxSources sources, with at most maxBlocks blocks
// and as many names with copies per source. It adds to counted.
// It reserves blocks and attributes in budgets, which may be nil.
func New(sources, maxBlocks int, blocks, attributeBytes *budget.Budget, counted *Counts) *Tracker {
	return &Tracker{
		blocksLeft:  blocks,
		spaces:      attribute.NewInterner(attributeBytes),
		sources:     sources,
		maxBlocks:   maxBlocks,
		counted:     counted,
		byContent:   hashtable.NewIndex(),
		byName:      hashtable.NewIndex(),
		copies:      make(map[uint32]copies.Count),
		children:    make([]nameChildren, sources),
		generations: make([]uint32, sources),
		named:       make([]int, sources),
		held:        make([]int, sources),
	}
}

// len returns the number of blocks.
func (t *Tracker) Len() int { return t.blocks.len() }

// maxIdleRemoved is the number of removed blocks for which an idle tracker keeps memory.
const maxIdleRemoved = 8192

// drain returns the changes since the last call, in order, and the blocks that they remove.
// Both are valid until the next call of the tracker.
func (t *Tracker) Drain() (out []Change, gone []uint64) {
	out, gone = t.out, t.gone
	t.out, t.gone = t.out[:0], t.gone[:0]
	if cap(gone) > maxIdleRemoved {
		t.gone = nil
	}
	return out, gone
}

// nameStore is a source's store of one block.
type nameStore struct {
	source int
	hash   uint64
	// parent is the source's name of the block's parent, unless the store is rooted.
	parent uint64
	rooted bool
	// hashed reports whether the store has the block's content.
	hashed bool
	op     copies.Op
}

// store applies a store of a source; op is its operation on blocks that the source holds.
func (t *Tracker) Store(source int, e *wire.Event, op copies.Op) {
	var id content
	if len(e.TokensHashes) == len(e.BlockHashes) {
		slot, ok := t.spaces.Acquire(attribute.Set{LoRA: e.LoRAName, Salt: e.CacheSalt})
		if !ok {
			t.counted.RefusedAttributes += uint64(len(e.BlockHashes))
			return
		}
		id.space = slot + 1
		defer t.spaces.Release(slot)
	}
	t.prepay((trackedBlockUnits + 1) * len(e.BlockHashes))
	defer t.refund()
	from := len(t.out)
	parent := t.parentOf(source, e)
	s := nameStore{source: source, parent: e.Parent, rooted: parent.rooted, hashed: id.space != 0, op: op}
	for i, hash := range e.BlockHashes {
		s.hash = hash
		id := id
		switch {
		case id.space == 0:
		case parent.rooted:
			id.sequence = e.TokensHashes[i]
		case parent.resolved:
			id.sequence = wire.SequenceHash(parent.sequence, e.TokensHashes[i])
		default:
			id.space = 0
		}
		ref, isNew := t.storeBlock(&s, id)
		s.parent, s.rooted = hash, false
		if isNew {
			t.queueStored(from, i, parent)
		}
		if ref == 0 { // refused
			parent = chainLink{hash: hash}
		} else {
			parent = t.linkTo(ref)
		}
	}
}

// chainLink describes a block's parent.
type chainLink struct {
	rooted   bool // it has none
	hash     uint64
	resolved bool
	sequence uint64
}

func (t *Tracker) parentOf(source int, e *wire.Event) chainLink {
	if !e.HasParent {
		return chainLink{rooted: true}
	}
	ref := t.resolve(source, e.Parent)
	if ref == 0 {
		// Some engines write 0 for the parent of a first block.
		return chainLink{rooted: e.Parent == 0, hash: e.Parent}
	}
	return t.linkTo(ref)
}

func (t *Tracker) linkTo(ref uint32) chainLink {
	b := t.blocks.at(ref)
	return chainLink{hash: b.first, resolved: b.space != 0, sequence: b.sequence}
}

// content identifies a block by its content; space is 0 if that is unknown.
type content struct {
	space    uint32
	sequence uint64
}

// storeBlock stores a block for a source. It returns the block, and whether it is new to
// routers. The block is 0 if there was no room:
//
//  1. The block is that of the content, or else that of the name.
//  2. A block known only by this name is identified with the content: it gets that content,
//     or is merged into the block that has it. The former is then removed for routers, and
//     the content stored unless they have it.
//  3. Where the name referred to another block, it no longer does, and its copies move.
//  4. Where there is no block, it is made, if there is room.
func (t *Tracker) storeBlock(s *nameStore, id content) (ref uint32, isNew bool) {
	source, hash := s.source, s.hash
	if id.space == 0 {
		ref = t.resolve(source, hash)
	} else if ref = t.find(id); t.unresolved > 0 {
		if alone := t.resolve(source, hash); alone != 0 && t.blocks.at(alone).space == 0 {
			ref, isNew = t.identify(alone, ref, id)
		}
	}
	name, held, count := t.name(source, hash), false, copies.Count{}
	if name != 0 {
		held, count = t.names.at(name).held(), t.count(name)
	}
	if name != 0 && t.names.at(name).block != ref {
		t.dropName(name)
		name = 0
	}
	if name == 0 || !t.names.at(name).held() {
		if t.holdings >= t.sources*t.maxBlocks || name == 0 && t.names.len() >= maxTracked || ref == 0 && !t.makeRoom() {
			t.counted.RefusedRank++
			return 0, false
		}
		if !t.pay(name == 0, ref == 0) {
			t.counted.RefusedTotal++
			return 0, false
		}
		if ref == 0 {
			ref, isNew = t.addBlock(hash, id), true
		}
		if name == 0 {
			name = t.addName(source, hash, ref)
		}
	}
	if held {
		count.Stored(s.op)
	}
	comes := !t.names.at(name).held()
	if comes || s.hashed {
		t.setParent(name, s)
	}
	if comes {
		t.revive(name)
	}
	t.setCount(name, count)
	return ref, isNew
}

// identify assigns a content to a block known only by its name or, unless ref is 0, merges
// it into the block ref of that content.
func (t *Tracker) identify(alone, ref uint32, id content) (_ uint32, isNew bool) {
	b := t.blocks.at(alone)
	t.queueRemoved(b.first)
	if ref == 0 {
		t.setContent(alone, id)
		t.unresolved--
		return alone, true
	}
	for b.names != 0 {
		t.move(b.names, ref)
	}
	for b.idle != 0 { // from the one released first
		name := t.names.at(b.idle).prev
		t.move(name, ref)
		t.boundIdle(t.names.at(name).source(), ref)
	}
	t.freeBlock(alone)
	return ref, false
}

// remove applies a remove of a block by a source.
func (t *Tracker) Remove(source int, hash uint64, op copies.Op) {
	defer t.refund()
	name := t.name(source, hash)
	if name == 0 {
		ref := t.resolve(source, hash)
		if ref == 0 {
			t.counted.Unknown++
			return
		}
		name = t.nameBy(source, ref)
	}
	if name == 0 || !t.names.at(name).held() {
		t.counted.NotHeld++
		return
	}
	count := t.count(name)
	gone := count.Removed(op, op == copies.RemoveAnnounced && t.hasHeldChild(name))
	if !gone {
		t.setCount(name, count)
	}
	if !gone || !t.releaseName(name) {
		t.counted.Suppressed++
	}
}

// releaseSource removes all blocks of a source whose engine restarted or cleared its cache.
// It returns true, with no changes queued, if the rank is then empty.
func (t *Tracker) ClearSource(source int) (empty bool) {
	defer t.refund()
	if n := t.held[source]; 0 < n && n < t.holdings {
		for ref := t.oldest; ref != 0; {
			newer := t.blocks.at(ref).newer
			t.release(source, ref)
			ref = newer
		}
	} else if n > 0 {
		t.Reset() // no other source holds a block
	}
	if t.Len() > 0 {
		return false
	}
	t.out, t.gone = t.out[:0], t.gone[:0]
	return true
}

// gap makes all names of a source uncertain, with one copy each, without visiting them. It
// returns false where there have been more gaps than can be numbered.
func (t *Tracker) Gap(source int) bool {
	if t.generations[source] == maxNameGeneration {
		return false
	}
	t.generations[source]++
	t.uncertainFrom = t.oldest
	return true
}

// reset deletes all blocks and names.
func (t *Tracker) Reset() {
	t.prepaid += int64(trackedBlockUnits*t.blocks.len() + t.names.len())
	t.refund()
	t.spaces.Reset()
	fresh := New(t.sources, t.maxBlocks, t.blocksLeft, nil, t.counted)
	fresh.out, fresh.gone, fresh.generations, fresh.spaces = t.out, t.gone, t.generations, t.spaces
	*t = *fresh
}

// blocksNamed returns the blocks that have a hash as a current or former name.
func (t *Tracker) blocksNamed(hash uint64) (blocks []uint32) {
	for source := range t.sources {
		if name := t.name(source, hash); name != 0 {
			if ref := t.names.at(name).block; !slices.Contains(blocks, ref) {
				blocks = append(blocks, ref)
			}
		}
	}
	return blocks
}

// firstHashes returns the given sorted hashes and those by which routers know the blocks that
// sources call so, sorted; and which blocks the latter are.
func (t *Tracker) FirstHashes(hashes []uint64) (known []uint64, blocks map[uint64][]uint32) {
	known, blocks = slices.Clone(hashes), make(map[uint64][]uint32)
	for _, hash := range hashes {
		for _, ref := range t.blocksNamed(hash) {
			if first := t.blocks.at(ref).first; first != hash {
				known, blocks[first] = append(known, first), append(blocks[first], ref)
			}
		}
	}
	slices.Sort(known)
	return slices.Compact(known), blocks
}

// holders returns the sources that hold a block that routers know by a hash, in order. also
// are further blocks to consider.
func (t *Tracker) Holders(first uint64, also ...uint32) (sources []int) {
	for _, ref := range append(t.blocksNamed(first), also...) {
		b := t.blocks.at(ref)
		if b.first != first {
			continue
		}
		for n := b.names; ; {
			if s := t.names.at(n); !slices.Contains(sources, s.source()) {
				sources = append(sources, s.source())
			}
			if n = t.names.at(n).next; n == b.names {
				break
			}
		}
	}
	slices.Sort(sources)
	return sources
}

// Knows reports whether a hash names a block, by the name of this or of another source.
func (t *Tracker) Knows(source int, hash uint64) bool { return t.resolve(source, hash) != 0 }

// Names returns the numbers of names by source.
func (t *Tracker) Names() []int { return slices.Clone(t.named) }

// Package consolidate merges the blocks of several engine sources of one worker, such as vLLM
// and an offloading engine beside it, into one view.
//
// Each source's stores and removes flow in. The changes that routers apply flow out: a block is
// stored when the first source stores it, and removed when the last source removes it.
//
// Those changes do not determine a Tracker. AppendState and Restore store its state, and a Recorder and Replay the calls
// since then; a tracker that was restored decides everything as the original does.
package consolidate

import (
	"math"
	"slices"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Tracker records which of a worker's sources have which blocks of one dp rank. It queues
// changes for routers until Drain. A Tracker is not safe for concurrent use.
//
//   - The content of a block is its scope, which is a LoRA adapter and cache salt, and its
//     sequence hash. A block is identified by its content. The sequence hash is unknown if the
//     block's tokens or its parent's sequence hash are unknown; only its names identify such a
//     block, until a store provides its content.
//   - A name is what one source calls a block: the source and a block hash. It refers to the
//     block that the source last stored by it. A hash that is no name of the source itself
//     refers to the block that it names for another source, the one of lowest index.
//   - A live name has one copy of the block or more, counted as in package copies. An idle name
//     has none, since its source removed the block, cleared its cache or restarted. A source
//     has a block while one of its names for the block is live. A block has a live name.
//   - Idle names resolve as long as the block exists: offloading engines store children of
//     blocks that they have evicted, and after a restart, hashes that are derived from contents
//     name the same blocks. A name that its source stores as another block refers to that block
//     from then on.
//   - A source has at most maxIdleNames idle names for a block, apart from the block's router
//     hash. Of those that no store has named as a parent the one that became idle first is
//     dropped, else of all. This bounds the names of an engine that keeps renaming its blocks.
//   - Routers know a block by its router hash: the hash of its first store.
//   - A gap of a source makes its names stale, with one copy each, until it stores them
//     again. A block with only stale names is removed when any source removes it, or to make
//     room.
type Tracker struct {
	sources   int
	maxBlocks int

	blocks slab[block]
	names  slab[name]
	// byContent has the blocks whose content is known, byName all names.
	byContent, byName hashtable.Index
	scopes            attribute.Interner
	// copies are the counts of the few names with more than one copy.
	copies map[uint32]copies.Count
	// Indexed by source.
	children    []childCounts
	generations []uint32 // number of gaps
	named, live []int    // numbers of names and of live names

	liveNames int // of all sources
	// unidentified is the number of blocks whose content is unknown.
	unidentified int
	// oldest and newest are the ends of the list of blocks in the order of creation. The
	// blocks before staleFrom have a name that is not stale.
	oldest, newest, staleFrom uint32
	changes                   []Change
	removed                   []uint64 // router hashes of the blocks removed in changes
	scratch                   []uint32 // reused by clearBlock
	counts                    *Counts
	allowance
	recording
}

// allowance is what a tracker has of the budget of the process.
type allowance struct {
	// budget bounds the blocks of the process: a block uses unitsPerBlock, a name one unit. reserved units are not used yet.
	budget   *budget.Budget
	reserved int64
	// evict reserves units that the budget does not have; nil if nothing can.
	evict func(units int64) bool
}

// recording records the calls of a tracker.
type recording struct {
	// recorder records calls as those of a dp rank; nil if they are not recorded.
	recorder *Recorder
	rank     uint32
	// checks are those of the current Store; nil if it is neither recorded nor replayed.
	checks *checks
}

const (
	// unitsPerBlock is one for the block's record and one for its entry in the lane's table.
	unitsPerBlock = 2
	// MaxSources is the number of sources that a name can represent.
	MaxSources = int(flagsSource) + 1
	// maxIdleNames bounds a source's idle names for a block. Most sources have one name for a block, and another after a restart.
	maxIdleNames = 4
	// maxRecords bounds the blocks, and the names.
	maxRecords = math.MaxUint32 - 2*slabChunk
	// maxIdleRemoved is the largest capacity of Tracker.removed that Drain keeps, and the greatest number of blocks in one recorded remove.
	maxIdleRemoved = 8192
)

// Refusal is the bound that a refused store would have exceeded.
type Refusal uint8

const (
	// RefusedRank is the bound on the blocks of the rank.
	RefusedRank Refusal = iota
	// RefusedTotal is the bound on the blocks of the process.
	RefusedTotal
	// RefusedAttributes is the bound on the memory of LoRA adapters and cache salts.
	RefusedAttributes
	// NumRefusals is the number of refusals.
	NumRefusals
)

// Counts are the counters of trackers.
type Counts struct {
	// Suppressed are removes of blocks that a source has afterwards, UnknownRemoves removes of
	// unknown blocks, IdleRemoves removes by a source that does not have the block.
	Suppressed, UnknownRemoves, IdleRemoves uint64
	// StaleRemoved are stale blocks that were removed to make room.
	StaleRemoved uint64
	// Refused are stored blocks that were refused, by the bound.
	Refused [NumRefusals]uint64
}

// New makes a tracker of up to MaxSources sources, with at most maxBlocks blocks, and as many live names
// per source on average. It reserves in the budgets, which may be nil, and adds to counts.
func New(sources, maxBlocks int, blocks, attributeBytes *budget.Budget, counts *Counts) *Tracker {
	return &Tracker{
		sources:     sources,
		maxBlocks:   maxBlocks,
		allowance:   allowance{budget: blocks},
		scopes:      attribute.NewInterner(attributeBytes),
		counts:      counts,
		byContent:   hashtable.NewIndex(),
		byName:      hashtable.NewIndex(),
		copies:      make(map[uint32]copies.Count),
		children:    make([]childCounts, sources),
		generations: make([]uint32, sources),
		named:       make([]int, sources),
		live:        make([]int, sources),
	}
}

// SetEvict makes the tracker call evict for units that its budget does not have. evict reserves them, for instance by evicting
// blocks of other workers, and reports whether it did.
func (t *Tracker) SetEvict(evict func(units int64) bool) { t.evict = evict }

// Len returns the number of blocks.
func (t *Tracker) Len() int { return t.blocks.len() }

// blockStore is a source's store of one block.
type blockStore struct {
	source int
	hash   uint64
	// parent is the source's hash of the parent, unless the block is rooted: has no parent.
	parent    uint64
	rooted    bool
	hasTokens bool
	op        copies.Op
	// name is the name of the block, which storeBlock sets; 0 if it was refused.
	name uint32
}

// Store applies a store event of a source. op is its effect on blocks that the source has.
func (t *Tracker) Store(source int, e *wire.Event, op copies.Op) {
	if len(e.TokensHashes) != len(e.BlockHashes) {
		t.storeBlocks(source, e, op, 0)
	} else if slot, ok := t.acquireScope(e); ok {
		t.storeBlocks(source, e, op, slot+1)
		t.scopes.Release(slot)
	} else {
		t.counts.Refused[RefusedAttributes] += uint64(len(e.BlockHashes))
	}
	if t.recorder != nil {
		t.recorder.store(t.rank, source, e, op)
	}
}

// storeBlocks stores the blocks of an event. scope is 0 if their contents are unknown.
func (t *Tracker) storeBlocks(source int, e *wire.Event, op copies.Op, scope uint32) {
	t.reserve((unitsPerBlock + 1) * len(e.BlockHashes))
	firstChange := len(t.changes)
	parent := parentBlock{rooted: !e.HasParent}
	if e.HasParent {
		nameID, id := t.resolveName(source, e.Parent), uint32(0)
		if nameID != 0 {
			n := t.names.at(nameID)
			n.flags |= flagNamed
			id = n.block
		}
		parent = t.parentBlock(id, e.Parent)
		parent.rooted = id == 0 && e.Parent == 0 // some engines write 0 for the parent of a first block
	}
	s := blockStore{source: source, parent: e.Parent, rooted: parent.rooted, hasTokens: scope != 0, op: op}
	for i, hash := range e.BlockHashes {
		s.hash = hash
		var c content
		if scope != 0 && parent.rooted {
			c = content{scope, e.TokensHashes[i]}
		} else if scope != 0 && parent.content.scope != 0 {
			c = content{scope, kvblock.SequenceHash(parent.content.sequence, e.TokensHashes[i])}
		}
		id, isNew := t.storeBlock(&s, c)
		if s.name != 0 && i+1 < len(e.BlockHashes) {
			t.names.at(s.name).flags |= flagNamed
		}
		s.parent, s.rooted = hash, false
		if isNew {
			t.queueStored(firstChange, i, parent)
		}
		parent = t.parentBlock(id, hash)
	}
	t.unreserve()
}

// acquireScope returns the slot of an event's scope; ok is false if the budget has no memory for it.
func (t *Tracker) acquireScope(e *wire.Event) (slot uint32, ok bool) {
	if !t.checks.failsNext() { // else the interner must not change
		slot, ok = t.scopes.Acquire(attribute.Set{LoRA: e.LoRAName, Salt: e.CacheSalt})
	}
	return slot, t.check(ok)
}

// parentBlock describes the parent of a stored block.
type parentBlock struct {
	rooted  bool    // there is no parent
	hash    uint64  // router hash, or the source's hash of an unknown block
	content content // scope is 0 if it is unknown
}

// parentBlock describes a block as a parent. id is 0 if the block is unknown or refused; hash is the source's.
func (t *Tracker) parentBlock(id uint32, hash uint64) parentBlock {
	if id == 0 {
		return parentBlock{hash: hash}
	}
	b := t.blocks.at(id)
	return parentBlock{hash: b.routerHash, content: b.content}
}

// storeBlock stores a block for a source. It returns the block, and whether the block is new to routers. The block is 0 if it was refused:
//
//  1. Find the block by its content if that is known, else by its name.
//  2. If the name refers to an unidentified block and the content is known, identify the
//     block: it gets the content, or is merged into the block of that content. Routers
//     remove the unidentified block, and store the identified block unless they have it.
//  3. If the name refers to another block, move the name and its copies to this block.
//  4. If there is no block or name, add it if there is room.
func (t *Tracker) storeBlock(s *blockStore, c content) (id uint32, isNew bool) {
	if c.scope == 0 {
		id = t.resolve(s.source, s.hash)
	} else if id = t.find(c); t.unidentified > 0 {
		if other := t.resolve(s.source, s.hash); other != 0 && t.blocks.at(other).content.scope == 0 {
			id, isNew = t.identify(other, id, c)
		}
	}
	nameID, live, count := t.name(s.source, s.hash), false, copies.Count{}
	if nameID != 0 {
		live, count = t.names.at(nameID).live(), t.count(nameID)
		if t.names.at(nameID).block != id {
			t.dropName(nameID)
			nameID = 0
		}
	}
	becomesLive := nameID == 0 || !live
	if becomesLive {
		if !t.check(t.liveNames < t.sources*t.maxBlocks) || nameID == 0 && t.names.len() >= maxRecords || id == 0 && !t.makeRoom() {
			t.counts.Refused[RefusedRank]++
			s.name = 0
			return 0, false
		}
		if !t.use(nameID == 0, id == 0) {
			t.counts.Refused[RefusedTotal]++
			s.name = 0
			return 0, false
		}
		if id == 0 {
			id, isNew = t.addBlock(s.hash, c), true
		}
		if nameID == 0 {
			nameID = t.addName(s.source, s.hash, id)
		}
	}
	if live {
		count.Stored(s.op)
	}
	if becomesLive || s.hasTokens {
		t.setParent(nameID, s)
	}
	if becomesLive {
		t.makeLive(nameID)
	}
	t.setCount(nameID, count)
	s.name = nameID
	return id, isNew
}

// identify gives an unidentified block its content or, unless into is 0, merges the block into
// the block of that content. It returns the identified block, and whether it is new to routers.
func (t *Tracker) identify(id, into uint32, c content) (_ uint32, isNew bool) {
	b := t.blocks.at(id)
	t.queueRemoved(b.routerHash)
	if into == 0 {
		t.setContent(id, c)
		t.unidentified--
		return id, true
	}
	for b.live != 0 {
		t.move(b.live, into)
	}
	for b.idle != 0 {
		first := t.names.at(b.idle).prev // the name that became idle first
		t.move(first, into)
		t.boundIdle(t.names.at(first).source(), into)
	}
	t.freeBlock(id)
	return into, false
}

// Remove applies a remove of a block by a source.
func (t *Tracker) Remove(source int, hash uint64, op copies.Op) {
	if t.recorder != nil {
		t.recorder.remove(t.rank, source, hash, op)
	}
	defer t.unreserve()
	nameID := t.name(source, hash)
	if nameID == 0 {
		id := t.resolve(source, hash)
		if id == 0 {
			t.counts.UnknownRemoves++
			return
		}
		nameID = t.liveName(source, id)
	}
	if nameID == 0 || !t.names.at(nameID).live() {
		t.counts.IdleRemoves++
		return
	}
	count := t.count(nameID)
	if !count.Removed(op, op == copies.RemoveAnnounced && t.hasLiveChild(nameID)) {
		t.setCount(nameID, count)
	} else if t.removeName(nameID) {
		return
	}
	t.counts.Suppressed++
}

// ClearSource removes all blocks of a source whose engine restarted or cleared its cache. If no
// source has a block afterwards, it returns true and queues no changes.
func (t *Tracker) ClearSource(source int) (empty bool) {
	t.recorder.call(statev1.TrackerCall_KIND_CLEAR_SOURCE, t.rank, source)
	defer t.unreserve()
	if n := t.live[source]; 0 < n && n < t.liveNames {
		for id := t.oldest; id != 0; {
			newer := t.blocks.at(id).newer
			t.clearBlock(source, id)
			id = newer
		}
	} else if n > 0 {
		t.reset() // no other source has a block
	}
	if empty = t.Len() == 0; empty {
		t.changes, t.removed = t.changes[:0], t.removed[:0]
	}
	return empty
}

// Gap makes all names of a source stale, with one copy each, without visiting them. It returns
// false if the source has had maxGeneration gaps.
func (t *Tracker) Gap(source int) bool {
	t.recorder.call(statev1.TrackerCall_KIND_GAP, t.rank, source)
	if t.generations[source] == maxGeneration {
		return false
	}
	t.generations[source]++
	t.staleFrom = t.oldest
	return true
}

// RemoveBlocks removes the blocks of sorted router hashes, whichever sources have them. It queues no changes.
func (t *Tracker) RemoveBlocks(routerHashes []uint64) {
	if len(routerHashes) == 0 {
		return
	}
	if t.recorder != nil {
		t.recorder.removeBlocks(t.rank, routerHashes)
	}
	defer t.unreserve()
	for id := t.oldest; id != 0; {
		newer := t.blocks.at(id).newer
		if _, found := slices.BinarySearch(routerHashes, t.blocks.at(id).routerHash); found {
			t.eraseBlock(id)
		}
		id = newer
	}
}

// Reset removes all blocks and names, after which the tracker is like a new one. It queues no changes.
func (t *Tracker) Reset() {
	t.recorder.call(statev1.TrackerCall_KIND_RESET, t.rank, 0)
	t.reset()
}

func (t *Tracker) reset() {
	t.reserved += int64(unitsPerBlock*t.blocks.len() + t.names.len())
	t.unreserve()
	t.scopes.Reset()
	empty := New(t.sources, t.maxBlocks, t.budget, nil, t.counts)
	empty.changes, empty.removed, empty.scopes = t.changes, t.removed, t.scopes
	empty.recorder, empty.rank, empty.checks, empty.evict = t.recorder, t.rank, t.checks, t.evict
	*t = *empty
}

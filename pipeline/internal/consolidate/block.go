package consolidate

import "github.com/kvcast/kvcast/internal/core/hashtable"

// block is a block that some source has.
type block struct {
	content    content
	routerHash uint64
	// live and idle are each a name in a ring of the block's live and idle names: live any of
	// them, idle the one that became idle last. 0 is an empty ring.
	live, idle   uint32
	older, newer uint32
}

// content identifies a block.
type content struct {
	scope    uint32 // 1 + its slot in Tracker.scopes; 0 if the content is unknown
	sequence uint64
}

// key returns the hash of a content in Tracker.byContent. Engines choose both fields, and could choose equal sums if the
// sequence hash were not hashed first.
func (c content) key() uint64 {
	return hashtable.Hash(hashtable.Hash(c.sequence) + uint64(c.scope))
}

// find returns the block of a content; 0 if there is none.
func (t *Tracker) find(c content) uint32 {
	return t.byContent.Find(c.key(), func(id uint32) bool { return t.blocks.at(id).content == c })
}

// addBlock adds a block without names, the newest.
func (t *Tracker) addBlock(routerHash uint64, c content) uint32 {
	id := t.blocks.allocate()
	*t.blocks.at(id) = block{routerHash: routerHash, older: t.newest}
	if t.newest != 0 {
		t.blocks.at(t.newest).newer = id
	} else {
		t.oldest = id
	}
	t.newest = id
	if c.scope != 0 {
		t.setContent(id, c)
	} else {
		t.unidentified++
	}
	return id
}

func (t *Tracker) setContent(id uint32, c content) {
	t.blocks.at(id).content = c
	t.scopes.Use(c.scope-1, 1)
	t.byContent.Add(c.key(), id)
}

// freeBlock frees the record of a block without names.
func (t *Tracker) freeBlock(id uint32) {
	b := t.blocks.at(id)
	if b.content.scope != 0 {
		t.byContent.Remove(b.content.key(), id)
		t.scopes.Release(b.content.scope - 1)
	} else {
		t.unidentified--
	}
	if t.staleFrom == id {
		t.staleFrom = b.newer
	}
	if b.older != 0 {
		t.blocks.at(b.older).newer = b.newer
	} else {
		t.oldest = b.newer
	}
	if b.newer != 0 {
		t.blocks.at(b.newer).older = b.older
	} else {
		t.newest = b.older
	}
	t.blocks.release(id)
	t.reserved += unitsPerBlock
}

// eraseBlock removes a block and its names.
func (t *Tracker) eraseBlock(id uint32) {
	b := t.blocks.at(id)
	for b.live != 0 {
		t.eraseName(b.live)
	}
	for b.idle != 0 {
		t.eraseName(b.idle)
	}
	t.freeBlock(id)
}

// removeBlock removes a block and its names, and queues the change.
func (t *Tracker) removeBlock(id uint32) {
	t.queueRemoved(t.blocks.at(id).routerHash)
	t.eraseBlock(id)
}

// removeIfStale removes a block unless it has a live name that is not stale, and reports whether it did. It moves the name found to the
// front of its ring, so that the next call checks the names before it last.
func (t *Tracker) removeIfStale(id uint32) bool {
	b := t.blocks.at(id)
	for nameID, n := range t.ring(b.live) {
		if !t.stale(n) {
			b.live = nameID
			return false
		}
	}
	t.removeBlock(id)
	return true
}

// maxStaleSteps bounds the blocks visited to make room for one, since the search blocks the
// lane. The next search continues at the next block.
const maxStaleSteps = 4096

// makeRoom reports whether there is room for another block. It may remove a stale block.
func (t *Tracker) makeRoom() bool {
	return t.Len() < maxRecords && t.check(t.Len() < t.maxBlocks) || t.removeStale()
}

// removeStale removes the oldest stale block, if it finds one within maxStaleSteps.
func (t *Tracker) removeStale() bool {
	for range maxStaleSteps {
		id := t.staleFrom
		if id == 0 {
			return false
		}
		t.staleFrom = t.blocks.at(id).newer
		if t.removeIfStale(id) {
			t.counts.StaleRemoved++
			return true
		}
	}
	return false
}

// reserve reserves units of the budget for a whole event, if the budget has them. If not, use reserves the units of each record.
func (t *Tracker) reserve(units int) {
	if t.check(t.budget.Reserve(int64(units))) {
		t.reserved += int64(units)
	}
}

// unreserve returns the reserved units that are not used.
func (t *Tracker) unreserve() {
	if t.reserved > 0 {
		t.budget.Release(t.reserved)
		t.reserved = 0
	}
}

// use uses the units of a new name, a new block, or both, and reports whether the budget has
// them, or evict reserves them. It may remove a stale block to make room for a new block.
func (t *Tracker) use(newName, newBlock bool) bool {
	units := int64(0)
	if newName {
		units++
	}
	if newBlock {
		units += unitsPerBlock
	}
	for t.reserved < units {
		lack := units - t.reserved
		if t.check(t.budget.Reserve(lack) || t.evict != nil && t.evict(lack)) {
			t.reserved = units
		} else if !newBlock || !t.removeStale() {
			return false
		}
		newBlock = false // remove one block at most
	}
	t.reserved -= units
	return true
}

package consolidate

import (
	"cmp"
	"slices"

	"github.com/kvcast/kvcast/internal/hashtable"
	"github.com/kvcast/kvcast/pipeline/copies"
)

// How a tracker keeps its blocks and names.

// maxUncertainSteps bounds the blocks visited to make room for one, since the search blocks
// the lane. The next search continues where it stopped.
const maxUncertainSteps = 4096

// generation returns a source's current generation, in a name's form.
func (t *Tracker) generation(source int) nameFlags {
	return nameFlags(t.generations[source] << nameGenerationShift)
}

func contentKey(id content) uint64 {
	return hashtable.Hash(id.sequence + uint64(id.space)*0x9e3779b97f4a7c15)
}

func nameKey(source int, hash uint64) uint64 {
	return hashtable.Hash(hash + uint64(source)*0x9e3779b97f4a7c15)
}

// find returns the block of a content; 0 if none.
func (t *Tracker) find(id content) uint32 {
	return t.byContent.Find(contentKey(id), func(ref uint32) bool {
		b := t.blocks.at(ref)
		return b.sequence == id.sequence && b.space == id.space
	})
}

// name returns a source's own name; 0 where it has none.
func (t *Tracker) name(source int, hash uint64) uint32 {
	return t.byName.Find(nameKey(source, hash), func(ref uint32) bool {
		n := t.names.at(ref)
		return n.hash == hash && n.source() == source
	})
}

// resolve returns the block that a source's hash names; 0 if no source has such a name.
func (t *Tracker) resolve(source int, hash uint64) uint32 {
	name := t.name(source, hash)
	for other := 0; name == 0 && other < t.sources; other++ {
		if other != source {
			name = t.name(other, hash)
		}
	}
	if name == 0 {
		return 0
	}
	return t.names.at(name).block
}

// nameBy returns the name by which a source holds a block: that of the lowest hash where
// there are several, 0 if none.
func (t *Tracker) nameBy(source int, ref uint32) (by uint32) {
	first := t.blocks.at(ref).names
	for name := first; ; {
		n := t.names.at(name)
		if n.source() == source && (by == 0 || n.hash < t.names.at(by).hash) {
			by = name
		}
		if name = n.next; name == first {
			return by
		}
	}
}

// count returns the counts of a name beyond its first copy.
func (t *Tracker) count(name uint32) copies.Count {
	if n := t.names.at(name); n.flags&nameCopies != 0 && !t.uncertain(n) {
		return t.copies[name]
	}
	return copies.Count{}
}

// setCount sets the counts of a name beyond its first copy, and makes the name certain.
func (t *Tracker) setCount(name uint32, c copies.Count) {
	n := t.names.at(name)
	if n.flags&nameCopies != 0 {
		delete(t.copies, name)
	}
	n.flags = n.flags&(nameSource|nameParent) | t.generation(n.source())
	if c != (copies.Count{}) {
		n.flags |= nameCopies
		t.copies[name] = c
	}
}

// uncertain reports whether a name was last stored before the last gap of its source.
func (t *Tracker) uncertain(n *blockName) bool {
	return n.flags>>nameGenerationShift != nameFlags(t.generations[n.source()])
}

// addName gives a block a new name without a copy, which is in none of its rings.
func (t *Tracker) addName(source int, hash uint64, ref uint32) uint32 {
	name := t.names.allocate()
	*t.names.at(name) = blockName{hash: hash, block: ref, flags: nameFlags(source) | nameIdle | t.generation(source)}
	t.byName.Add(nameKey(source, hash), name)
	t.named[source]++
	return name
}

// ring returns the ring of a block that a name belongs to.
func (b *trackedBlock) ring(n *blockName) *uint32 {
	if n.flags&nameIdle != 0 {
		return &b.idle
	}
	return &b.names
}

// link adds a name at the front of a block's ring.
func (t *Tracker) link(name, ref uint32) {
	n := t.names.at(name)
	front := t.blocks.at(ref).ring(n)
	n.block, n.next, n.prev = ref, name, name
	if *front != 0 {
		after := t.names.at(*front)
		n.next, n.prev = *front, after.prev
		t.names.at(after.prev).next = name
		after.prev = name
	}
	*front = name
}

// unlink removes a name from its block's ring.
func (t *Tracker) unlink(name uint32) {
	n := t.names.at(name)
	front := t.blocks.at(n.block).ring(n)
	if n.next == name {
		*front = 0
		return
	}
	t.names.at(n.prev).next, t.names.at(n.next).prev = n.next, n.prev
	if *front == name {
		*front = n.next
	}
}

// move assigns a name to another block.
func (t *Tracker) move(name, ref uint32) {
	t.unlink(name)
	t.link(name, ref)
}

// erase removes a name, and keeps its block.
func (t *Tracker) erase(name uint32) {
	t.unlink(name)
	n := t.names.at(name)
	if n.held() {
		t.partParent(name)
	}
	if n.flags&nameCopies != 0 {
		delete(t.copies, name)
	}
	t.byName.Remove(nameKey(n.source(), n.hash), name)
	t.named[n.source()]--
	if n.held() {
		t.held[n.source()]--
		t.holdings--
	}
	n.block = 0
	t.names.release(name)
	t.prepaid++
}

// makeIdle removes a name's copies. It still resolves, unless it is one of too many.
func (t *Tracker) makeIdle(name uint32) {
	n := t.names.at(name)
	ref, source := n.block, n.source()
	t.partParent(name)
	t.setCount(name, copies.Count{})
	t.unlink(name)
	n.flags |= nameIdle
	t.link(name, ref)
	t.held[source]--
	t.holdings--
	t.boundIdle(source, ref)
}

// boundIdle drops the idle name of a source for a block that was released first, where there
// are more than maxIdleNames. The name that routers know the block by stays: it is their name
// of its children's parent.
func (t *Tracker) boundIdle(source int, ref uint32) {
	b := t.blocks.at(ref)
	idle, oldest := 0, uint32(0)
	for name := b.idle; ; {
		n := t.names.at(name)
		if n.source() == source && n.hash != b.first {
			idle, oldest = idle+1, name
		}
		if name = n.next; name == b.idle {
			break
		}
	}
	if idle > maxIdleNames {
		t.erase(oldest)
	}
}

// revive gives a name without a copy its first copy.
func (t *Tracker) revive(name uint32) {
	n := t.names.at(name)
	if n.next != 0 {
		t.unlink(name)
	}
	n.flags &^= nameIdle
	t.link(name, n.block)
	t.joinParent(name)
	t.held[n.source()]++
	t.holdings++
}

// releaseName removes a name's copies, and reports whether its block is gone with it.
func (t *Tracker) releaseName(name uint32) (gone bool) {
	n := t.names.at(name)
	ref := n.block
	if n.next == name { // the block has no other holder
		t.removeBlock(ref)
		return true
	}
	t.makeIdle(name)
	return t.removeUnlessHeld(ref)
}

// dropName erases a name, and removes its block if the name was its only holder.
func (t *Tracker) dropName(name uint32) {
	ref, held := t.names.at(name).block, t.names.at(name).held()
	t.erase(name)
	if held {
		t.removeUnlessHeld(ref)
	}
}

// removeUnlessHeld removes a block without a certain holder, and reports whether it did.
func (t *Tracker) removeUnlessHeld(ref uint32) bool {
	if t.heldForCertain(ref) {
		return false
	}
	t.removeBlock(ref)
	return true
}

// removeBlock removes a block and its names, and queues the change.
func (t *Tracker) removeBlock(ref uint32) {
	b := t.blocks.at(ref)
	t.queueRemoved(b.first)
	for b.names != 0 {
		t.erase(b.names)
	}
	for b.idle != 0 {
		t.erase(b.idle)
	}
	t.freeBlock(ref)
}

// heldForCertain reports whether a name of a block is certain. It rotates the ring to that
// name, so that the names passed over are checked again last.
func (t *Tracker) heldForCertain(ref uint32) bool {
	b := t.blocks.at(ref)
	if b.names == 0 {
		return false
	}
	for name := b.names; ; {
		n := t.names.at(name)
		if !t.uncertain(n) {
			b.names = name
			return true
		}
		if name = n.next; name == b.names {
			return false
		}
	}
}

// release drops the copies of all of a source's names for a block.
func (t *Tracker) release(source int, ref uint32) {
	names, b := t.scratch[:0], t.blocks.at(ref)
	for name := b.names; ; {
		n := t.names.at(name)
		if n.source() == source {
			names = append(names, name)
		}
		if name = n.next; name == b.names {
			break
		}
	}
	if len(names) > maxIdleNames { // the names that are kept must not depend on the ring's order
		slices.SortFunc(names, func(a, b uint32) int { return cmp.Compare(t.names.at(a).hash, t.names.at(b).hash) })
	}
	for _, name := range names {
		t.makeIdle(name)
	}
	if len(names) > 0 {
		t.removeUnlessHeld(ref)
	}
	t.scratch = names
}

// makeRoom reports whether there is room for another block. It may remove the oldest block
// without a certain holder.
func (t *Tracker) makeRoom() bool {
	return t.Len() < min(t.maxBlocks, maxTracked) || t.removeDoubted()
}

// removeDoubted removes the oldest block without a certain holder, if it is found soon.
func (t *Tracker) removeDoubted() bool {
	for range maxUncertainSteps {
		ref := t.uncertainFrom
		if ref == 0 {
			return false
		}
		t.uncertainFrom = t.blocks.at(ref).newer
		if t.removeUnlessHeld(ref) {
			t.counted.UncertainRemoved++
			return true
		}
	}
	return false
}

// prepay reserves units of the process's budget together if they are available; otherwise
// each record reserves its own.
func (t *Tracker) prepay(units int) {
	if t.blocksLeft.Take(int64(units)) {
		t.prepaid += int64(units)
	}
}

// refund returns units that are not used.
func (t *Tracker) refund() {
	if t.prepaid > 0 {
		t.blocksLeft.Release(t.prepaid)
		t.prepaid = 0
	}
}

// pay reserves the budget of a new name, a new block, or both. It may remove a block without
// a certain holder.
func (t *Tracker) pay(name, block bool) bool {
	units := int64(0)
	if name {
		units++
	}
	if block {
		units += trackedBlockUnits
	}
	for left := block; t.prepaid < units; left = false {
		if t.blocksLeft.Take(units - t.prepaid) {
			t.prepaid = 0
			return true
		}
		if !left || !t.removeDoubted() {
			return false
		}
	}
	t.prepaid -= units
	return true
}

// addBlock makes a block, the newest.
func (t *Tracker) addBlock(first uint64, id content) uint32 {
	ref := t.blocks.allocate()
	*t.blocks.at(ref) = trackedBlock{first: first, older: t.newest}
	if t.newest != 0 {
		t.blocks.at(t.newest).newer = ref
	} else {
		t.oldest = ref
	}
	t.newest = ref
	if id.space != 0 {
		t.setContent(ref, id)
	} else {
		t.unresolved++
	}
	return ref
}

// setContent sets a block's content.
func (t *Tracker) setContent(ref uint32, id content) {
	b := t.blocks.at(ref)
	b.space, b.sequence = id.space, id.sequence
	t.spaces.Use(id.space - 1)
	t.byContent.Add(contentKey(id), ref)
}

// freeBlock frees the record of a block without names.
func (t *Tracker) freeBlock(ref uint32) {
	b := t.blocks.at(ref)
	if b.space != 0 {
		t.byContent.Remove(contentKey(content{space: b.space, sequence: b.sequence}), ref)
		t.spaces.Release(b.space - 1)
	} else {
		t.unresolved--
	}
	if t.uncertainFrom == ref {
		t.uncertainFrom = b.newer
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
	t.blocks.release(ref)
	t.prepaid += trackedBlockUnits
}

// queueRemoved queues the removal of a block.
func (t *Tracker) queueRemoved(first uint64) {
	t.gone = append(t.gone, first)
	end := len(t.gone)
	if n := len(t.out); n > 0 && t.out[n-1].Removed {
		t.out[n-1].J = end
		return
	}
	t.out = append(t.out, Change{Removed: true, I: end - 1, J: end})
}

// queueStored queues the store of block i of an event, whose changes begin at from in out.
func (t *Tracker) queueStored(from, i int, parent chainLink) {
	if n := len(t.out); n > from && !t.out[n-1].Removed && t.out[n-1].J == i {
		t.out[n-1].J++
		return
	}
	t.out = append(t.out, Change{Parent: parent.hash, Rooted: parent.rooted, I: i, J: i + 1})
}

// removeAll removes the blocks of some hashes, as routers know them and sorted, whatever
// sources hold them. It queues no changes.
func (t *Tracker) RemoveBlocks(firsts []uint64) {
	if len(firsts) == 0 {
		return
	}
	defer t.refund()
	for ref := t.oldest; ref != 0; {
		b := t.blocks.at(ref)
		next := b.newer
		if _, gone := slices.BinarySearch(firsts, b.first); gone {
			for b.names != 0 {
				t.erase(b.names)
			}
			for b.idle != 0 {
				t.erase(b.idle)
			}
			t.freeBlock(ref)
		}
		ref = next
	}
}

package consolidate

import (
	"cmp"
	"iter"
	"slices"

	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// name is a source's name of a block.
type name struct {
	hash uint64
	// parent is the source's hash of the block's parent, if flagParent is set.
	parent     uint64
	block      uint32 // 0 if the record is free
	next, prev uint32 // in one of the block's rings; 0 in none
	flags      nameFlags
}

// nameFlags are a source, flags, and above them the source's generation in which it last stored the name.
type nameFlags uint32

const (
	flagsSource nameFlags = 1<<7 - 1
	flagIdle    nameFlags = 1 << 7
	// flagCopies is set if Tracker.copies may have the name.
	flagCopies nameFlags = 1 << 8
	flagParent nameFlags = 1 << 9
	// flagNamed is set if a store has named the name as the parent of a block.
	flagNamed       nameFlags = 1 << 10
	generationShift           = 11
	maxGeneration             = 1<<(32-generationShift) - 1
)

func (n *name) source() int { return int(n.flags & flagsSource) }

func (n *name) live() bool { return n.flags&flagIdle == 0 }

// stale reports whether a name was last stored before the last gap of its source.
func (t *Tracker) stale(n *name) bool {
	return uint32(n.flags>>generationShift) != t.generations[n.source()]
}

// generation returns a source's current generation as name flags.
func (t *Tracker) generation(source int) nameFlags {
	return nameFlags(t.generations[source] << generationShift)
}

func nameKey(source int, hash uint64) uint64 {
	return hashtable.Hash(hash + uint64(source)*0x9e3779b97f4a7c15)
}

// name returns a source's own name; 0 if it has none.
func (t *Tracker) name(source int, hash uint64) uint32 {
	return t.byName.Find(nameKey(source, hash), func(id uint32) bool {
		n := t.names.at(id)
		return n.hash == hash && n.source() == source
	})
}

// resolve returns the block that a hash names for a source; 0 if no source has such a name.
func (t *Tracker) resolve(source int, hash uint64) uint32 {
	nameID := t.resolveName(source, hash)
	if nameID == 0 {
		return 0
	}
	return t.names.at(nameID).block
}

// resolveName returns the name that a hash is for a source: its own, or that of another source; 0 if there is none.
func (t *Tracker) resolveName(source int, hash uint64) uint32 {
	nameID := t.name(source, hash)
	for other := 0; nameID == 0 && other < t.sources; other++ {
		if other != source {
			nameID = t.name(other, hash)
		}
	}
	return nameID
}

// Resolves reports whether a hash names a block for a source.
func (t *Tracker) Resolves(source int, hash uint64) bool { return t.resolve(source, hash) != 0 }

// Has reports whether a source has a block by its own name.
func (t *Tracker) Has(source int, hash uint64) bool {
	nameID := t.name(source, hash)
	return nameID != 0 && t.names.at(nameID).live()
}

// Names returns the numbers of names, indexed by source.
func (t *Tracker) Names() []int { return slices.Clone(t.named) }

// Lookup returns the router hashes of the blocks that one of the hashes names for any source,
// each with the sorted indexes of the sources that have a block of that router hash.
func (t *Tracker) Lookup(hashes ...uint64) map[uint64][]int {
	found := make(map[uint64][]int)
	add := func(b *block) {
		sources := found[b.routerHash]
		for _, n := range t.ring(b.live) {
			sources = append(sources, n.source())
		}
		slices.Sort(sources)
		found[b.routerHash] = slices.Compact(sources)
	}
	for _, hash := range hashes {
		for b := range t.blocksNamed(hash) {
			add(b)
			for other := range t.blocksNamed(b.routerHash) {
				if other.routerHash == b.routerHash {
					add(other)
				}
			}
		}
	}
	return found
}

// blocksNamed yields the blocks that a hash names for some source, some of them repeatedly.
func (t *Tracker) blocksNamed(hash uint64) iter.Seq[*block] {
	return func(yield func(*block) bool) {
		for source := range t.sources {
			if nameID := t.name(source, hash); nameID != 0 && !yield(t.blocks.at(t.names.at(nameID).block)) {
				return
			}
		}
	}
}

// liveName returns the live name of a source for a block: that of the lowest hash if there are several, 0 if there is none.
func (t *Tracker) liveName(source int, block uint32) (lowest uint32) {
	for nameID, n := range t.ring(t.blocks.at(block).live) {
		if n.source() == source && (lowest == 0 || n.hash < t.names.at(lowest).hash) {
			lowest = nameID
		}
	}
	return lowest
}

// count returns the copies of a name beyond the first.
func (t *Tracker) count(nameID uint32) copies.Count {
	if n := t.names.at(nameID); n.flags&flagCopies != 0 && !t.stale(n) {
		return t.copies[nameID]
	}
	return copies.Count{}
}

// setCount sets the copies of a live name beyond the first. The name is no longer stale.
func (t *Tracker) setCount(nameID uint32, c copies.Count) {
	n := t.names.at(nameID)
	if n.flags&flagCopies != 0 {
		delete(t.copies, nameID)
	}
	n.flags = n.flags&(flagsSource|flagParent|flagNamed) | t.generation(n.source())
	if c != (copies.Count{}) {
		n.flags |= flagCopies
		t.copies[nameID] = c
	}
}

// addName adds an idle name, which is in none of its block's rings.
func (t *Tracker) addName(source int, hash uint64, block uint32) uint32 {
	nameID := t.names.allocate()
	*t.names.at(nameID) = name{hash: hash, block: block, flags: nameFlags(source) | flagIdle | t.generation(source)}
	t.byName.Add(nameKey(source, hash), nameID)
	t.named[source]++
	return nameID
}

// ring yields the names of a ring, beginning with the first; none if that is 0. The caller may change the name that it was given.
func (t *Tracker) ring(first uint32) iter.Seq2[uint32, *name] {
	return func(yield func(uint32, *name) bool) {
		for id := first; id != 0; {
			n := t.names.at(id)
			next := n.next
			if !yield(id, n) || next == first {
				return
			}
			id = next
		}
	}
}

// ringOf returns the head of the block's ring that a name belongs to.
func (b *block) ringOf(n *name) *uint32 {
	if n.live() {
		return &b.live
	}
	return &b.idle
}

// link adds a name at the head of a block's ring.
func (t *Tracker) link(nameID, block uint32) {
	n := t.names.at(nameID)
	head := t.blocks.at(block).ringOf(n)
	n.block, n.next, n.prev = block, nameID, nameID
	if *head != 0 {
		after := t.names.at(*head)
		n.next, n.prev = *head, after.prev
		t.names.at(after.prev).next = nameID
		after.prev = nameID
	}
	*head = nameID
}

// unlink removes a name from its block's ring.
func (t *Tracker) unlink(nameID uint32) {
	n := t.names.at(nameID)
	head := t.blocks.at(n.block).ringOf(n)
	if n.next == nameID {
		*head = 0
		return
	}
	t.names.at(n.prev).next, t.names.at(n.next).prev = n.next, n.prev
	if *head == nameID {
		*head = n.next
	}
}

// move makes a name refer to another block.
func (t *Tracker) move(nameID, block uint32) {
	t.unlink(nameID)
	t.link(nameID, block)
}

// eraseName removes a name. Its block stays.
func (t *Tracker) eraseName(nameID uint32) {
	t.unlink(nameID)
	n := t.names.at(nameID)
	if n.flags&flagCopies != 0 {
		delete(t.copies, nameID)
	}
	t.byName.Remove(nameKey(n.source(), n.hash), nameID)
	t.named[n.source()]--
	if n.live() {
		t.countChild(nameID, -1)
		t.live[n.source()]--
		t.liveNames--
	}
	n.block = 0
	t.names.release(nameID)
	t.reserved++
}

// makeIdle makes a live name idle. It then erases a name if the source has too many idle names for the block.
func (t *Tracker) makeIdle(nameID uint32) {
	n := t.names.at(nameID)
	block, source := n.block, n.source()
	t.countChild(nameID, -1)
	t.setCount(nameID, copies.Count{})
	t.unlink(nameID)
	n.flags |= flagIdle
	t.link(nameID, block)
	t.live[source]--
	t.liveNames--
	t.boundIdle(source, block)
}

// boundIdle erases an idle name of a source for a block, if there are more than maxIdleNames: of those that no store has named as a parent
// the one that became idle first, else of all. It never erases the router hash, since other sources' stores may name it as a parent.
func (t *Tracker) boundIdle(source int, block uint32) {
	b := t.blocks.at(block)
	idle, first, unnamed := 0, uint32(0), uint32(0)
	for nameID, n := range t.ring(b.idle) {
		if n.source() == source && n.hash != b.routerHash {
			idle, first = idle+1, nameID
			if n.flags&flagNamed == 0 {
				unnamed = nameID
			}
		}
	}
	switch {
	case idle <= maxIdleNames:
	case unnamed != 0:
		t.eraseName(unnamed)
	default:
		t.eraseName(first)
	}
}

// makeLive gives an idle name its first copy.
func (t *Tracker) makeLive(nameID uint32) {
	n := t.names.at(nameID)
	if n.next != 0 {
		t.unlink(nameID)
	}
	n.flags &^= flagIdle
	t.link(nameID, n.block)
	t.countChild(nameID, 1)
	t.live[n.source()]++
	t.liveNames++
}

// removeName makes a live name idle, and reports whether that removed its block.
func (t *Tracker) removeName(nameID uint32) (blockRemoved bool) {
	n := t.names.at(nameID)
	block := n.block
	if n.next == nameID { // the block's only live name
		t.removeBlock(block)
		return true
	}
	t.makeIdle(nameID)
	return t.removeIfStale(block)
}

// dropName erases a name, and removes its block if no live name that is not stale is left.
func (t *Tracker) dropName(nameID uint32) {
	n := t.names.at(nameID)
	block, live := n.block, n.live()
	t.eraseName(nameID)
	if live {
		t.removeIfStale(block)
	}
}

// clearBlock makes all of a source's names for a block idle.
func (t *Tracker) clearBlock(source int, block uint32) {
	names := t.scratch[:0]
	for nameID, n := range t.ring(t.blocks.at(block).live) {
		if n.source() == source {
			names = append(names, nameID)
		}
	}
	if len(names) > 1 { // the names that are dropped later must not depend on the ring's order
		slices.SortFunc(names, func(a, b uint32) int { return cmp.Compare(t.names.at(a).hash, t.names.at(b).hash) })
	}
	for _, nameID := range names {
		t.makeIdle(nameID)
	}
	if len(names) > 0 {
		t.removeIfStale(block)
	}
	t.scratch = names
}

package consolidate

// Change is a change that routers apply. If Removed is set, the hashes that Drain returns are removed from index I up to J. Otherwise the
// blocks of the stored event are stored from index I up to J, after Parent, or without a parent if Rooted is set.
type Change struct {
	Removed bool
	I, J    int
	Rooted  bool
	Parent  uint64
}

// Drain returns the changes since the last call, in order, and the router hashes of the blocks
// that they remove. Both are valid until the next call of a method.
func (t *Tracker) Drain() (changes []Change, removed []uint64) {
	changes, removed = t.changes, t.removed
	t.changes, t.removed = t.changes[:0], t.removed[:0]
	if cap(removed) > maxIdleRemoved {
		t.removed = nil
	}
	return changes, removed
}

// queueRemoved queues the removal of a block.
func (t *Tracker) queueRemoved(routerHash uint64) {
	t.removed = append(t.removed, routerHash)
	end := len(t.removed)
	if n := len(t.changes); n > 0 && t.changes[n-1].Removed {
		t.changes[n-1].J = end
		return
	}
	t.changes = append(t.changes, Change{Removed: true, I: end - 1, J: end})
}

// queueStored queues the store of block i of an event, whose first change has the index first.
func (t *Tracker) queueStored(first, i int, parent parentBlock) {
	if n := len(t.changes); n > first && !t.changes[n-1].Removed && t.changes[n-1].J == i {
		t.changes[n-1].J++
		return
	}
	t.changes = append(t.changes, Change{I: i, J: i + 1, Rooted: parent.rooted, Parent: parent.hash})
}

package radix

// orphans are the blocks of a rank whose parent has no place. Each waits for its parent's block hash.
type orphans struct {
	all   []orphan
	free  int32            // first unused element of all, linked by next; -1: none
	first map[uint64]int32 // first orphan, by the parent's block hash
}

// orphan is a block whose parent has no place.
type orphan struct {
	hash, tokens, parent uint64
	prev, next           int32 // orphans with the same parent; -1: none
}

// adoption is an orphan whose parent now has a place.
type adoption struct {
	hash, tokens uint64
	parent       position
}

// maxAdoptions is the capacity up to which Index.adoptions is kept.
const maxAdoptions = 1024

func newOrphans() orphans { return orphans{free: -1} }

// awaits reports whether orphans wait for a block.
func (o *orphans) awaits(hash uint64) bool {
	if len(o.first) == 0 {
		return false
	}
	_, ok := o.first[hash]
	return ok
}

// add adds an orphan and returns its number.
func (o *orphans) add(b orphan) uint32 {
	if o.first == nil {
		o.first = make(map[uint64]int32)
	}
	at := o.free
	if at >= 0 {
		o.free = o.all[at].next
	} else {
		at = int32(len(o.all))
		o.all = append(o.all, orphan{})
	}
	next, ok := o.first[b.parent]
	if ok {
		o.all[next].prev = at
	} else {
		next = -1
	}
	b.prev, b.next = -1, next
	o.all[at] = b
	o.first[b.parent] = at
	return uint32(at)
}

// remove removes an orphan by its number. It frees the memory when none is left.
func (o *orphans) remove(number uint32) {
	b := o.all[number]
	switch {
	case b.prev >= 0:
		o.all[b.prev].next = b.next
	case b.next >= 0:
		o.first[b.parent] = b.next
	default:
		delete(o.first, b.parent)
	}
	if b.next >= 0 {
		o.all[b.next].prev = b.prev
	}
	o.all[number] = orphan{next: o.free}
	o.free = int32(number)
	if len(o.first) == 0 {
		*o = newOrphans()
	}
}

// awaiting appends the orphans that wait for a block, which now has a place.
func (o *orphans) awaiting(hash uint64, at position, to []adoption) []adoption {
	if next, ok := o.first[hash]; ok {
		for ; next >= 0; next = o.all[next].next {
			to = append(to, adoption{o.all[next].hash, o.all[next].tokens, at})
		}
	}
	return to
}

// OnAdoption makes the index call a function with each block that gets a place after it was stored, because its parent has got one. It must
// be called before the first block is stored.
func (x *Index) OnAdoption(adopted func(r *Rank, hash uint64)) { x.adopted = adopted }

// adopt gives places to all orphans of a rank that descend from a block, which has a place.
func (x *Index) adopt(r *Rank, hash uint64, at position) {
	queue := r.orphans.awaiting(hash, at, x.adoptions[:0])
	for len(queue) > 0 {
		a := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		e := r.table.Find(a.hash)
		if !x.clean(r, e) {
			r.table.Delete(e)
			continue
		}
		t := &e.Value.tag
		r.orphans.remove(t.orphan())
		at := x.tree.place(a.parent, []uint64{a.tokens})
		*t = t.withPlace(at)
		if r.names != nil {
			r.nameBlocks(at, a.hash)
		}
		x.hold(r, at, *t)
		if x.adopted != nil {
			x.adopted(r, a.hash)
		}
		queue = r.orphans.awaiting(a.hash, at, queue)
	}
	if cap(queue) <= maxAdoptions {
		x.adoptions = queue
	}
}

package radix

import "math/bits"

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

func (o *orphans) any() bool { return len(o.first) > 0 }

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
	if !o.any() {
		*o = newOrphans()
	}
}

// adopt gives places to all orphans of a rank that descend from a block, which has a place.
func (x *Index) adopt(r *Rank, hash uint64, at position) {
	queue := x.adoptions[:0]
	for {
		if next, ok := r.orphans.first[hash]; ok {
			for ; next >= 0; next = r.orphans.all[next].next {
				o := &r.orphans.all[next]
				queue = append(queue, adoption{o.hash, o.tokens, at})
			}
		}
		n := len(queue)
		if n == 0 {
			if cap(queue) <= maxAdoptions {
				x.adoptions = queue
			}
			return
		}
		a := queue[n-1]
		queue = queue[:n-1]
		seg, i, _ := r.table.Find(a.hash)
		s, tag := &seg.Slots[i].Value, &seg.Tags[i]
		r.orphans.remove(s.at.offset)
		*tag &^= tagOrphan
		s.at = x.tree.place(a.parent, a.tokens, newHolder(r.number, bits.TrailingZeros32(uint32(*tag))))
		x.hold(r, s.at, *tag)
		hash, at = a.hash, s.at
	}
}

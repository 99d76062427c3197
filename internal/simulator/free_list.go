package simulator

// freeList is the order in which blocks that nobody uses make room: a ring of
// block numbers, linked both ways, with a sentinel behind the last block.
type freeList struct {
	prev, next []int
	len        int
}

// newFreeList returns a list of n blocks in their order.
func newFreeList(n int) freeList {
	l := freeList{prev: make([]int, n+1), next: make([]int, n+1)}
	l.prev[n], l.next[n] = n, n
	for i := range n {
		l.push(i)
	}
	return l
}

func (l *freeList) sentinel() int { return len(l.next) - 1 }

// push puts a block at the end.
func (l *freeList) push(id int) {
	s := l.sentinel()
	last := l.prev[s]
	l.next[last], l.prev[id] = id, last
	l.next[id], l.prev[s] = s, id
	l.len++
}

// pop takes the first block. There must be one.
func (l *freeList) pop() int {
	id := l.next[l.sentinel()]
	l.remove(id)
	return id
}

// remove takes a block out. It must be in the list.
func (l *freeList) remove(id int) {
	l.next[l.prev[id]], l.prev[l.next[id]] = l.next[id], l.prev[id]
	l.len--
}

package blockpool

// freeList is the list of unused blocks in eviction order: a doubly linked ring of block numbers,
// with a sentinel after the last block.
type freeList struct {
	prev, next []int
	len        int
}

// newFreeList returns a list of n blocks in ascending order.
func newFreeList(n int) freeList {
	l := freeList{prev: make([]int, n+1), next: make([]int, n+1)}
	l.prev[n], l.next[n] = n, n
	for i := range n {
		l.push(i)
	}
	return l
}

func (l *freeList) sentinel() int { return len(l.next) - 1 }

// push appends a block.
func (l *freeList) push(id int) {
	s := l.sentinel()
	last := l.prev[s]
	l.next[last], l.prev[id] = id, last
	l.next[id], l.prev[s] = s, id
	l.len++
}

// pop removes and returns the first block. The list must not be empty.
func (l *freeList) pop() int {
	id := l.next[l.sentinel()]
	l.remove(id)
	return id
}

// remove removes a block, which must be in the list.
func (l *freeList) remove(id int) {
	l.next[l.prev[id]], l.prev[l.next[id]] = l.next[id], l.prev[id]
	l.len--
}

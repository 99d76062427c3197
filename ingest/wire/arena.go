package wire

// arena hands out slices that live until its reset. It grows only, and when it
// must, the slices handed out before keep the memory that they have.
type arena[T any] struct {
	buf []T
}

func (a *arena[T]) reset() { a.buf = a.buf[:0] }

// reserve returns room for n, which take then hands out, or part of it.
func (a *arena[T]) reserve(n int) []T {
	used := len(a.buf)
	if cap(a.buf)-used < n {
		a.buf = make([]T, 0, max(n, 2*cap(a.buf)))
		used = 0
	}
	return a.buf[used : used+n : used+n]
}

// take hands out the first n of what was reserved last.
func (a *arena[T]) take(n int) []T {
	used := len(a.buf)
	a.buf = a.buf[:used+n]
	return a.buf[used : used+n : used+n]
}

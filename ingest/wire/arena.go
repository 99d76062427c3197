package wire

// reuse returns s without its elements, for the next ones; without its memory as
// well if that is for more than most.
func reuse[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	return s[:0]
}

// arena hands out slices that live until its reset. It grows only, and when it
// must, the slices handed out before keep the memory that they have.
type arena[T any] struct {
	buf []T
}

// reset takes back what was handed out.
func (a *arena[T]) reset() { a.buf = a.buf[:0] }

// release is a reset that keeps room for most at most.
func (a *arena[T]) release(most int) { a.buf = reuse(a.buf, most) }

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

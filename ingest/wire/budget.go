package wire

// Budget bounds the bytes that all Rules of a process may remember together.
// Package internal/budget has one.
type Budget interface {
	// Take reserves bytes and reports whether there was room.
	Take(bytes int64) bool
	// Release returns bytes that Take reserved.
	Release(bytes int64)
}

// memory is a Budget, or none, which grants everything.
type memory struct{ budget Budget }

func (m memory) take(bytes int) bool { return m.budget == nil || m.budget.Take(int64(bytes)) }

func (m memory) release(bytes int) {
	if m.budget != nil {
		m.budget.Release(int64(bytes))
	}
}

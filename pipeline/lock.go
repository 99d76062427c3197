package pipeline

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// turnLock is a mutex for work that is done in turns beside work that must not wait
// long. A plain one goes to whoever asks while it is free, which is the one who just
// let go of it: the others get it after a millisecond.
type turnLock struct {
	mu      sync.Mutex
	waiting atomic.Int32 // how many wait for it
}

// Lock locks it.
func (l *turnLock) Lock() {
	if l.mu.TryLock() {
		return
	}
	l.waiting.Add(1)
	l.mu.Lock()
	l.waiting.Add(-1)
}

// Unlock unlocks it.
func (l *turnLock) Unlock() { l.mu.Unlock() }

// giveWay lets those who wait have it first. The caller does not hold it.
func (l *turnLock) giveWay() {
	for l.waiting.Load() > 0 {
		runtime.Gosched()
	}
}

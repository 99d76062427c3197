package pipeline

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// turnLock is a mutex for work that is done in turns beside work that must not wait
// long. A plain one goes to whoever asks while it is free, which is the one who just
// let go of it: the others get it after a millisecond.
type turnLock struct {
	mu sync.Mutex
	// asked is how often somebody began to wait for it, and had how often one of them
	// got it.
	asked, had atomic.Uint64
}

// giveWayMost is how long one who does turns looks for others to have theirs. Then it
// waits for the lock as they do, who go first by now.
const giveWayMost = time.Millisecond

// Lock locks it.
func (l *turnLock) Lock() {
	if l.mu.TryLock() {
		return
	}
	l.asked.Add(1)
	l.mu.Lock()
	l.had.Add(1)
}

// Unlock unlocks it.
func (l *turnLock) Unlock() { l.mu.Unlock() }

// giveWay lets as many have it first as wait for it now, and not whoever comes
// meanwhile as well. The caller does not hold it.
func (l *turnLock) giveWay() {
	asked := l.asked.Load()
	if l.had.Load() >= asked {
		return
	}
	for began := time.Now(); l.had.Load() < asked && time.Since(began) < giveWayMost; {
		runtime.Gosched()
	}
}

package pipeline

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// laneMutex is a mutex for long work in many short critical sections that must not delay
// other goroutines. A sync.Mutex would usually be relocked by the goroutine that has just
// unlocked it, while the others wait for up to a millisecond.
type laneMutex struct {
	mu sync.Mutex
	// waited counts the goroutines that have waited for it, acquired those of them that have
	// locked it.
	waited, acquired atomic.Uint64
}

// maxYield bounds the wait of yield. A sync.Mutex prefers goroutines that have waited longer
// than this.
const maxYield = time.Millisecond

// Lock locks the mutex.
func (l *laneMutex) Lock() {
	if l.mu.TryLock() {
		return
	}
	l.waited.Add(1)
	l.mu.Lock()
	l.acquired.Add(1)
}

// Unlock unlocks the mutex.
func (l *laneMutex) Unlock() { l.mu.Unlock() }

// yield waits until as many goroutines have locked the mutex as are waiting now. The caller
// must not have locked it.
func (l *laneMutex) yield() {
	waited := l.waited.Load()
	if l.acquired.Load() >= waited {
		return
	}
	for start := time.Now(); l.acquired.Load() < waited && time.Since(start) < maxYield; {
		runtime.Gosched()
	}
}

// scanSegments is the number of segments visited under one lock, at most 512 KiB: it blocks
// the lane for some tenths of a millisecond.
const scanSegments = 8

// scanTable visits every segment of a table under the lane's lock, which it unlocks after
// each scanSegments. The table may change meanwhile; the scan ends early where the table
// has been cleared, of which there is an entry since the scan began. Before it locks the
// lane it calls prepare unless that is nil.
func (l *Lane) scanTable(ctx context.Context, at place, prepare func(), visit func(t *table, s *segment)) {
	var first *table
	from, done := uint64(0), false
	for !done && ctx.Err() == nil {
		if prepare != nil {
			prepare()
		}
		l.mu.Lock()
		t := l.table(at)
		if first == nil {
			first = t
		}
		if t == nil || t != first {
			l.mu.Unlock()
			return
		}
		for range scanSegments {
			s, next := t.blocks.table.SegmentAt(from)
			visit(t, s)
			if from = next; from == 0 {
				done = true
				break
			}
		}
		l.mu.Unlock()
		l.mu.yield()
	}
}

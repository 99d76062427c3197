package pipeline

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestYieldLetsWaitingGoroutinesLock locks again immediately after yield: a waiting
// goroutine must have locked before. Time stands still, so that yield has no deadline.
func TestYieldLetsWaitingGoroutinesLock(t *testing.T) {
	synctest.Test(t, yieldLetsWaitingGoroutinesLock)
}

func yieldLetsWaitingGoroutinesLock(t *testing.T) {
	var l laneMutex
	early := 0
	const rounds = 200
	for range rounds {
		locked := false
		var other sync.WaitGroup
		l.Lock()
		other.Go(func() {
			l.Lock()
			defer l.Unlock()
			locked = true
		})
		for l.waited.Load() == l.acquired.Load() {
			runtime.Gosched()
		}
		l.Unlock()
		l.yield()
		l.Lock()
		if !locked {
			early++
		}
		l.Unlock()
		other.Wait()
	}
	if early > 0 {
		t.Errorf("%d times of %d the waiting goroutine had not locked it", early, rounds)
	}
}

// TestYieldIsBounded runs so many goroutines that one always waits for the lock.
func TestYieldIsBounded(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var (
		l     laneMutex
		locks atomic.Uint64 // of the others
	)
	over := make(chan struct{})
	var others sync.WaitGroup
	for range 8 {
		others.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				l.Lock()
				locks.Add(1)
				for range 10 {
					runtime.Gosched() // like a lock holder that is not scheduled
				}
				l.Unlock()
			}
		})
	}
	most := uint64(0)
	for range 50 {
		for l.waited.Load() == l.acquired.Load() {
			runtime.Gosched() // until a goroutine waits
		}
		before := locks.Load()
		l.yield()
		most = max(most, locks.Load()-before)
		l.Lock()
		l.Unlock() //nolint:staticcheck // empty critical section
	}
	close(over)
	others.Wait()
	if most > 20_000 { // some hundreds, in a millisecond
		t.Errorf("yield let 8 goroutines lock %d times", most)
	}
}

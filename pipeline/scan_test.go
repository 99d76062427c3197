package pipeline

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestYieldLetsWaitingGoroutinesLock locks again at once: a goroutine that waits has locked
// the lock by then. Time stands still, so that yield waits as long as it takes.
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

// TestYieldIsBounded has so many goroutines lock that one always waits.
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
					runtime.Gosched() // as one who holds it and is not let run
				}
				l.Unlock()
			}
		})
	}
	most := uint64(0)
	for range 50 {
		for l.waited.Load() == l.acquired.Load() {
			runtime.Gosched() // until somebody waits
		}
		before := locks.Load()
		l.yield()
		most = max(most, locks.Load()-before)
		l.Lock()
		l.Unlock() //nolint:staticcheck // it is locked for nothing
	}
	close(over)
	others.Wait()
	if most > 20_000 { // some hundreds, in a millisecond
		t.Errorf("yield let 8 goroutines lock %d times", most)
	}
}

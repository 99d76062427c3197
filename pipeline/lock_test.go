package pipeline

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestTurnsGiveWay has one who takes the lock again at once: whoever waits has had it
// by then. Time stands still, so that others are waited for however long it takes.
func TestTurnsGiveWay(t *testing.T) {
	synctest.Test(t, turnsGiveWay)
}

func turnsGiveWay(t *testing.T) {
	var l turnLock
	early := 0
	const rounds = 200
	for range rounds {
		had := false
		var other sync.WaitGroup
		l.Lock()
		other.Go(func() {
			l.Lock()
			defer l.Unlock()
			had = true
		})
		for l.asked.Load() == l.had.Load() {
			runtime.Gosched()
		}
		l.Unlock()
		l.giveWay()
		l.Lock()
		if !had {
			early++
		}
		l.Unlock()
		other.Wait()
	}
	if early > 0 {
		t.Errorf("%d times of %d one who waited had not had it", early, rounds)
	}
}

// TestTurnsAreNotKeptAway has so many who wait that there is always one.
func TestTurnsAreNotKeptAway(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var (
		l     turnLock
		turns atomic.Uint64 // of the others
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
				turns.Add(1)
				for range 10 {
					runtime.Gosched() // as one who holds it and is not let run
				}
				l.Unlock()
			}
		})
	}
	most := uint64(0)
	for range 50 {
		for l.asked.Load() == l.had.Load() {
			runtime.Gosched() // until somebody waits
		}
		before := turns.Load()
		l.giveWay()
		most = max(most, turns.Load()-before)
		l.Lock()
		l.Unlock() //nolint:staticcheck // a turn in which nothing is done
	}
	close(over)
	others.Wait()
	if most > 20_000 { // some hundreds, in a millisecond
		t.Errorf("it gave way for %d turns of 8 others", most)
	}
}

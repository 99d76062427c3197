package pipeline

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestTurnsGiveWay has one who takes the lock again at once: whoever waits has had it
// by then, but where the machine kept it away for as long as others are waited for.
func TestTurnsGiveWay(t *testing.T) {
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
	if early > rounds/10 {
		t.Errorf("%d times of %d one who waited had not had it", early, rounds)
	}
}

// TestTurnsAreNotKeptAway has so many who wait that there is always one.
func TestTurnsAreNotKeptAway(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var l turnLock
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
				for began := time.Now(); time.Since(began) < 50*time.Microsecond; {
					runtime.Gosched() // as one who holds it and is not let run
				}
				l.Unlock()
			}
		})
	}
	longest := time.Duration(0)
	for range 50 {
		began := time.Now()
		l.giveWay()
		longest = max(longest, time.Since(began))
		l.Lock()
		l.Unlock() //nolint:staticcheck // a turn in which nothing is done
	}
	close(over)
	others.Wait()
	if longest > time.Second {
		t.Errorf("it gave way for %v", longest)
	}
}

package pipeline

import (
	"runtime"
	"sync"
	"testing"
)

// TestTurnsGiveWay has one who takes the lock again at once: whoever waits has had it
// by then.
func TestTurnsGiveWay(t *testing.T) {
	var l turnLock
	for round := range 200 {
		had := false
		var other sync.WaitGroup
		l.Lock()
		other.Go(func() {
			l.Lock()
			defer l.Unlock()
			had = true
		})
		for l.waiting.Load() == 0 {
			runtime.Gosched()
		}
		l.Unlock()
		l.giveWay()
		l.Lock()
		if !had {
			t.Errorf("round %d: one who waited has not had it", round)
		}
		l.Unlock()
		other.Wait()
	}
}

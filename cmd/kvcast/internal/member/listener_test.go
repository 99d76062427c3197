package member

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestDroppedWorkersOfListenersAreNotClaimedAtOnce drops workers whose engines were connected, had disconnected before, and never connected
// to a listener: what is left of the messages of an ended connection must not claim a worker that another instance has taken.
func TestDroppedWorkersOfListenersAreNotClaimedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		l := listened{connected: map[string]bool{"connected": true, "disconnected": false}, lost: make(map[string]time.Time)}
		for worker, want := range map[string]bool{"connected": true, "disconnected": true, "configured": false} {
			l.lose(worker)
			if got := l.wasLost(worker, ttl); got != want {
				t.Errorf("%s: lost %t, want %t", worker, got, want)
			}
		}
		time.Sleep(lostWait * ttl)
		l.forgetLost(ttl)
		if l.wasLost("connected", ttl) || len(l.lost) > 0 {
			t.Errorf("%v are lost for ever", l.lost)
		}
	})
}

package ingest

import (
	"testing"
	"testing/synctest"
	"time"
)

// A rank whose connection is gone for the grace time may have restarted unheard, and is
// reported once, while the worker's other rank goes on. One that comes back in time is
// not.
func TestRankGoneForTheGraceTimeIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = time.Minute
		s := newScript(t)
		w := s.p.worker
		w.shared.grace = grace
		other := newPublisher(w, 0, SourceStatus{Rank: 1})
		w.mu.Lock()
		other.connect(time.Now())
		s.connect()
		s.live("", 0, 0)
		s.finish(0, 0)
		s.want("batch 0 of 0")
		s.p.disconnect()
		w.mu.Unlock()
		<-time.After(grace - time.Second)
		w.mu.Lock()
		s.p.connect(time.Now()) // in time
		s.finish(0, 0)
		w.mu.Unlock()
		<-time.After(grace)
		s.want()
		w.mu.Lock()
		s.p.disconnect()
		w.mu.Unlock()
		<-time.After(grace + time.Second)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		s.want("gap possible_restart 0-0")
		other.stop()
	})
}

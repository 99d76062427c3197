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

// Where messages were dropped and can not be fetched, the next batch shows which they
// were. If none comes, that something may be lost is reported.
func TestDroppedMessagesAreReportedWhereNoBatchFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t)
		w := s.p.worker
		s.p.replay = ""
		w.mu.Lock()
		s.connect()
		s.live("", 0, 0)
		s.p.overrun(s.now)
		s.live("", 0, 3)
		w.mu.Unlock()
		<-time.After(2 * overrunPatience)
		w.mu.Lock()
		s.want("batch 0 of 0", "gap replay_unavailable 1-2", "batch 3 of 0")
		s.p.overrun(s.now)
		s.p.overrun(s.now)
		w.mu.Unlock()
		<-time.After(2 * overrunPatience)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		s.want("gap replay_unavailable 0-0")
	})
}

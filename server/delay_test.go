package server_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// TestDelaySinceTheEngineIsOfEntriesAfterTheStart covers entries without a time, entries of engines whose clock is ahead, and
// those that were there before the stream, which say nothing about the server.
func TestDelaySinceTheEngineIsOfEntriesAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		h.addWorker()
		store := func(engineTime time.Time, hash uint64) {
			b := feed.Batch{IngestTime: 1, Events: []wire.Event{{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{hash}, BlockSize: 16}}}
			if !engineTime.IsZero() {
				b.EngineTime = engineTime.UnixNano()
			}
			h.lane.Batch(&b)
		}
		store(time.Now().Add(-time.Hour), 1)
		s := h.subscribe(checker.New(checker.Options{}), earliest())
		s.until(t, 2)
		want := func(count uint64, sum float64) {
			t.Helper()
			synctest.Wait()
			families, err := h.registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range families {
				if f.GetName() != "kvcast_server_engine_delay_seconds" {
					continue
				}
				if got := f.GetMetric()[0].GetHistogram(); got.GetSampleCount() != count || got.GetSampleSum() != sum {
					t.Errorf("got %d observations of %v s in all, want %d of %v s", got.GetSampleCount(), got.GetSampleSum(), count, sum)
				}
				return
			}
			t.Error("the histogram is missing")
		}
		want(0, 0)
		store(time.Now().Add(-3*time.Second), 2)
		s.until(t, 3)
		want(1, 3)
		store(time.Now().Add(time.Second), 3)
		s.until(t, 4)
		want(2, 3)
		store(time.Time{}, 4)
		s.until(t, 5)
		want(2, 3)
		if got := harness.Gather(t, h.registry).Value(t, "kvcast_server_subscriber_lag_entries"); got != 0 {
			t.Errorf("the subscriber has read everything, and lags %v entries behind", got)
		}
	})
}

func TestSubscriberThatDoesNotReadLagsBehind(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	s := h.subscribe(checker.New(checker.Options{}), latest())
	if _, err := s.next(); err != nil {
		t.Fatal(err)
	}
	lag := func() float64 { return harness.Gather(t, h.registry).Value(t, "kvcast_server_subscriber_lag_entries") }
	h.load(50) // more than the transport buffers
	if got := lag(); got == 0 {
		t.Error("got a lag of 0, want more")
	}
	s.until(t, h.Journal.Bounds().Newest)
	harness.WaitFor(t, func() bool { return lag() == 0 })
}

package server_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// TestHerdSharesASweep lets many streams come at once, and others within a second, while there is one slot and no wait for it:
// those that do not share a sweep would be refused.
func TestHerdSharesASweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSnapshotWait: time.Millisecond}}, journal.Config{})
		h.addWorker()
		for hash := range uint64(1000) {
			h.append(hash)
		}
		var reading sync.WaitGroup
		for n := range 50 {
			reading.Go(func() {
				time.Sleep(time.Duration(n%2) * 900 * time.Millisecond)
				s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
				defer s.cancel()
				s.untilMessage(t, isSnapshotEnd)
				if got := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got < 1000 {
					t.Errorf("stream %d: got %d blocks, want 1000", n, got)
				}
			})
		}
		h.append(1000)
		reading.Wait()
	})
}

// TestSlowStreamDoesNotHoldUpItsSweep has a stream that reads nothing at first, in the same sweep as another. Both get the
// snapshot.
func TestSlowStreamDoesNotHoldUpItsSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{MaxSnapshots: 1}}, journal.Config{})
		h.addWorker()
		h.storeLargeBlocks() // more than a sweep keeps
		// A snapshot that is not read has the only slot until both streams wait for it.
		unread := h.withSmallWindow().subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{"w"}}))
		unread.untilMessage(t, isSnapshotBegin)
		slow := h.withSmallWindow().subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
		fast := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
		synctest.Wait()
		unread.cancel()
		slow.untilMessage(t, isSnapshotBegin)
		began := time.Now()
		fast.untilMessage(t, isSnapshotEnd)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the other stream had its snapshot after %v, want a second or two", took)
		}
		fast.cancel()
		slow.untilMessage(t, isSnapshotEnd)
		for _, s := range []*subscription{fast, slow} {
			if got := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != 400 {
				t.Errorf("got %d blocks, want 400", got)
			}
		}
	})
}

// TestFiltersDoNotShareASweep subscribes to all workers, and at once to one of them.
func TestFiltersDoNotShareASweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		h.addWorker()
		h.append(1, 2, 3)
		h.subscribeToSnapshotBegin(t)
		for _, filter := range []*kvcastv1.Filter{{Workers: []string{"x"}}, {Models: []string{"other"}}, {Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}}} {
			s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(filter))
			s.untilMessage(t, isSnapshotEnd)
			if got := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != 0 {
				t.Errorf("%v: got %d blocks, want none", filter, got)
			}
		}
	})
}

// TestAbandonedSweepGivesUpItsPlace ends streams that wait for a slot, each with a filter of its own, and then asks for a snapshot:
// the queue has room for as many as there may be subscribers.
func TestAbandonedSweepGivesUpItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSubscribers: 3, MaxSnapshotWait: time.Hour}}, journal.Config{})
		h.addWorker()
		h.storeLargeBlocks()
		first := h.withSmallWindow().subscribeToSnapshotBegin(t)
		for n := range 10 {
			s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{fmt.Sprint(n)}}))
			if _, err := s.next(); err != nil {
				t.Fatalf("stream %d: %v", n, err)
			}
			synctest.Wait()
			s.cancel()
			synctest.Wait()
		}
		waiting := h.subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{"w"}}))
		if _, err := waiting.next(); err != nil {
			t.Fatal(err)
		}
		first.cancel()
		waiting.untilMessage(t, isSnapshotEnd)
	})
}

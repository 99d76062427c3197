package server_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// subscribeToSnapshotBegin subscribes from a snapshot, and returns when SnapshotBegin is received.
func (h *fixture) subscribeToSnapshotBegin(t *testing.T) *subscription {
	t.Helper()
	s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
	s.untilMessage(t, isSnapshotBegin)
	return s
}

// TestQueuedSnapshotsComplete requests twenty snapshots while two use all slots. All streams are accepted at once, and
// all snapshots complete.
func TestQueuedSnapshotsComplete(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSnapshots: 2, MaxSnapshotWait: 10 * time.Minute}}, journal.Config{})
	h.addWorker()
	h.storeLargeBlocks()
	v := h.Pipeline.AddWorker(feed.Worker{Name: "v", Model: "m"})
	store := func(hash uint64) {
		h.batch(v, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{hash}})
	}
	store(1)
	unread := []*subscription{h.subscribeToSnapshotBegin(t), h.subscribeToSnapshotBegin(t)} // use the slots until they are read
	const blocks = 300
	subs := make([]*subscription, 10)
	for i := range subs {
		subs[i] = h.subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{"v"}}))
		if m, err := subs[i].next(); err != nil || m.GetAccepted().GetMode() != kvcastv1.Accepted_MODE_SNAPSHOT {
			t.Fatalf("subscriber %d: got %v, %v, want Accepted before the snapshot", i, m, err)
		}
	}
	for hash := range uint64(blocks) { // entries are appended while the snapshots wait
		store(hash)
	}
	newest := h.Journal.Bounds().Newest
	var reading sync.WaitGroup
	for i, s := range subs {
		reading.Go(func() {
			for s.checker.Position().GetSeq() < newest {
				if _, err := s.next(); err != nil {
					t.Errorf("subscriber %d: %v", i, err)
					return
				}
			}
			if got := s.checker.View().Count("v", 0, kvcastv1.Tier_TIER_DEVICE); got != blocks {
				t.Errorf("subscriber %d: got %d blocks, want %d", i, got, blocks)
			}
		})
	}
	for _, s := range unread {
		s.cancel()
	}
	reading.Wait()
}

// TestSlowlyReadSnapshotIsEnded reads a little of a snapshot before each stall timeout, while another snapshot
// waits.
func TestSlowlyReadSnapshotIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSnapshotWait: 5 * time.Minute}}, journal.Config{})
		h.addWorker()
		h.storeLargeBlocks()
		slow := h.subscribeToSnapshotBegin(t)
		waiting := make(chan error, 1)
		go func() {
			s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{"w"}}))
			defer s.cancel()
			for s.checker.Position() == nil {
				if _, err := s.next(); err != nil {
					waiting <- err
					return
				}
			}
			waiting <- nil
		}()
		began := time.Now()
		for {
			<-time.After(20 * time.Second)
			if _, err := slow.next(); err != nil {
				wantStatus(t, err, codes.ResourceExhausted, "SLOW_SUBSCRIBER")
				break
			}
			if time.Since(began) > 20*time.Minute {
				t.Fatal("the slowly read snapshot has not ended")
			}
		}
		if err := <-waiting; err != nil {
			t.Errorf("the waiting snapshot: %v", err)
		}
		if took := time.Since(began); took > 5*time.Minute {
			t.Errorf("the waiting snapshot took %v", took)
		}
	})
}

// TestShutdownEndsQueuedSnapshot shuts down while a snapshot waits for a slot.
func TestShutdownEndsQueuedSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSnapshotWait: time.Hour}}, journal.Config{})
		h.addWorker()
		h.storeLargeBlocks()
		first := h.subscribeToSnapshotBegin(t)
		waiting := h.subscribe(checker.New(checker.Options{}), fromSnapshot(&kvcastv1.Filter{Workers: []string{"w"}}))
		if _, err := waiting.next(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		down := make(chan struct{})
		go func() {
			defer close(down)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			h.Server.Shutdown(ctx)
		}()
		wantStatus(t, waiting.end(), codes.Unavailable, "SHUTTING_DOWN")
		wantStatus(t, first.end(), codes.Unavailable, "SHUTTING_DOWN")
		<-down
	})
}

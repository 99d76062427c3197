package server_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// TestPositionOfAnotherServerIsAwaited subscribes and replays from positions of a server that has read 10 entries, while
// this one has read one.
func TestPositionOfAnotherServerIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Newest: func(context.Context) (uint64, error) { return 10, nil }}, journal.Config{})
		h.AddWorker(feed.Worker{Name: "w", Model: "m"})
		seq := func(n uint64) *kvcastv1.Position { return &kvcastv1.Position{Epoch: h.Journal.Bounds().Epoch, Seq: n} }

		resumed := make(chan error, 1)
		go func() {
			stream, err := h.client.Subscribe(t.Context(), after(seq(2)))
			if err == nil {
				_, err = stream.Recv()
			}
			resumed <- err
		}()
		synctest.Wait()
		select {
		case err := <-resumed:
			t.Fatalf("not awaited: %v", err)
		default:
		}
		h.AddWorker(feed.Worker{Name: "v", Model: "m"})
		if err := <-resumed; err != nil {
			t.Error(err)
		}

		began := time.Now()
		stream, err := h.client.Subscribe(t.Context(), after(seq(10)))
		wantStatus(t, firstError(t, err, stream.Recv), codes.Unavailable, "BEHIND")
		replay, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{After: seq(1), Until: seq(3)})
		wantStatus(t, firstError(t, err, replay.Recv), codes.Unavailable, "BEHIND")
		if waited := time.Since(began); waited != 4*time.Second {
			t.Errorf("waited %v, want 2s for each", waited)
		}
		stream, err = h.client.Subscribe(t.Context(), after(seq(11)))
		wantStatus(t, firstError(t, err, stream.Recv), codes.OutOfRange, "POSITION_AHEAD")
	})
}

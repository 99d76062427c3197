package ingest

import (
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/sequence"
)

// additions is a Sink that counts how often a worker was added to the stream.
type additions struct {
	lane  feed.Lane
	added int
}

func (c *additions) AddWorker(feed.Worker) feed.Lane {
	c.added++
	return c.lane
}

func (c *additions) RemoveWorker(string, feed.RemoveReason) {}

// TestConnectionAddsTheWorkerAgain removes a worker, as the grace time does. Its next connection is
// established before the link replaces the previous connection.
func TestConnectionAddsTheWorkerAgain(t *testing.T) {
	w := newTestWorker(quietLane{}, slog.New(slog.DiscardHandler))
	back := &additions{lane: w.lane}
	w.shared.sink = back
	l := &link{worker: w}
	l.p = newPublisher(w, 0, SourceStatus{}, l.reconnect)
	l.p.connect(sequence.Connection{ID: 1})
	l.p.disconnect(1)
	w.remove(feed.RemovedDisconnected)
	if w.lane != nil || back.added != 0 {
		t.Fatalf("the worker is in the stream, it added %d times", back.added)
	}
	l.replacement = &attempt{id: 2, state: attemptEstablished}
	if !l.replace(t.Context()) || !l.p.machine.Connected() {
		t.Fatal("there is no connection")
	}
	if w.lane == nil || back.added != 1 {
		t.Errorf("the worker added back %d times, want once before anything is read", back.added)
	}
}

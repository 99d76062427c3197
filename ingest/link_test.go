package ingest

import (
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/transport"
)

// comings counts how often a worker came into the stream.
type comings struct {
	lane feed.Lane
	came int
}

func (c *comings) AddWorker(feed.Worker) feed.Lane {
	c.came++
	return c.lane
}

func (c *comings) RemoveWorker(string, feed.RemoveReason) {}

// TestAConnectionBringsTheWorkerBack has a worker that was gone for too long. The next
// connection is there before the link has put it in the place of the last one.
func TestAConnectionBringsTheWorkerBack(t *testing.T) {
	w := newTestWorker(quietLane{}, slog.New(slog.DiscardHandler))
	back := &comings{lane: w.lane}
	w.shared.sink = back
	l := &link{worker: w}
	l.p = newPublisher(w, 0, SourceStatus{}, l.renew)
	l.p.connect(new(intake), 1, "")
	l.p.disconnect(new(intake), 1)
	w.remove(feed.RemovedDisconnected)
	if w.lane != nil || back.came != 0 {
		t.Fatalf("the worker is in the stream, it came %d times", back.came)
	}
	l.beside = &attempt{id: 2, Conn: &transport.Conn{}, state: attemptEstablished}
	if !l.replace(t.Context()) || !l.p.machine.Connected() {
		t.Fatal("there is no connection")
	}
	if w.lane == nil || back.came != 1 {
		t.Errorf("the worker came back %d times, want once before anything is read", back.came)
	}
}

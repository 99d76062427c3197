package ingest

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
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
	t.Parallel()
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

// A call that must begin anew is not resumed because it ended for another reason before it was replaced, or because a call
// that was asked to resume before is connected.
func TestLossIsForgottenWhenACallBeginsAnew(t *testing.T) {
	t.Parallel()
	w := newTestWorker(quietLane{}, slog.New(slog.DiscardHandler))
	l := &link{worker: w}
	l.p = newPublisher(w, 0, SourceStatus{}, l.reconnect)
	connected := transport.Event{Kind: transport.Connected}
	resumed := transport.Event{Kind: transport.Connected, Resumed: true}
	ended := transport.Event{Kind: transport.Disconnected, Err: errors.New("the server ended the call")}
	broken := transport.Event{Kind: transport.Disconnected, Err: fmt.Errorf("%w: too slow", transport.ErrLost)}
	for _, tt := range []struct {
		name   string
		events []transport.Event
		before bool // whether the engine has restarted before the events
		want   bool
	}{
		{"nothing is lost", []transport.Event{ended}, false, false},
		{"lost", []transport.Event{broken}, false, true},
		{"restarted", nil, true, true},
		{"restarted, then the call ended", []transport.Event{ended}, true, true},
		{"lost, then begun anew", []transport.Event{broken, connected}, false, false},
		{"restarted, then a replacement resumed", []transport.Event{resumed}, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l.lost = tt.before
			a := &attempt{id: 1, state: attemptEstablished}
			for _, e := range tt.events {
				l.handleEvent(a, e)
			}
			if l.lost != tt.want {
				t.Errorf("lost is %v, want %v", l.lost, tt.want)
			}
		})
	}
}

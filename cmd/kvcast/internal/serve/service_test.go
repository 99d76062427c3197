package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/feed"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/journal"
)

// open opens a service at free ports.
func open(t *testing.T) *Service {
	t.Helper()
	cfg, _, err := config.Read(config.Sources{
		Flags: map[string]string{"listen": "127.0.0.1:0", "admin": ""}, Binds: []string{"tcp://127.0.0.1:*"},
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestRunEndsWhenAnAppendFails closes the journal of a running service.
func TestRunEndsWhenAnAppendFails(t *testing.T) {
	s := open(t)
	done := make(chan error, 1)
	go func() { done <- s.Run(t.Context()) }()
	if err := s.journal.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.pipeline.AddWorker(feed.Worker{Name: "w"})
	if err := <-done; !errors.Is(err, journal.ErrClosed) {
		t.Errorf("serve: got error %v, want the append that failed", err)
	}
}

// TestChangedWorkersAreInTheIndex reads the index at once after each change, while the follower is still behind in most
// cases if nothing waits for it.
func TestChangedWorkersAreInTheIndex(t *testing.T) {
	s := open(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w := workers{s}
	for i := range 50 {
		name := fmt.Sprintf("w%d", i)
		if err := w.AddWorker(ctx, ingestconfig.Worker{Name: name, Sources: []ingestconfig.Source{{Connect: "tcp://127.0.0.1:1"}}}); err != nil {
			t.Fatal(err)
		}
		if _, ok := s.follower.Index().Worker(name); !ok {
			t.Errorf("%s is added, but not in the index", name)
		}
		if err := w.RemoveWorker(ctx, name, feed.RemovedDeregistered); err != nil {
			t.Fatal(err)
		}
		if _, ok := s.follower.Index().Worker(name); ok {
			t.Errorf("%s is removed, but in the index", name)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

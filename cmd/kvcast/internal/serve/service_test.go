package serve

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/journal"
)

// TestRunEndsWhenAnAppendFails closes the journal of a running service.
func TestRunEndsWhenAnAppendFails(t *testing.T) {
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

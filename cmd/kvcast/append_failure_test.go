package main

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/journal"
)

// TestServeEndsWhenAnAppendFails closes the journal of a running service.
func TestServeEndsWhenAnAppendFails(t *testing.T) {
	cfg := defaultConfig()
	cfg.Listen, cfg.Admin = "127.0.0.1:0", ""
	s, err := cfg.open(t.Context(), credentials{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.run(t.Context()) }()
	if err := s.journal.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.pipeline.AddWorker(feed.Worker{Name: "w"})
	if err := <-done; !errors.Is(err, journal.ErrClosed) {
		t.Errorf("serve: got error %v, want the append that failed", err)
	}
}

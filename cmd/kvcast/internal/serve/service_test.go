package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
)

// open opens a service at free ports.
func open(t *testing.T) *Service {
	t.Helper()
	return openWith(t, "memory")
}

// openWith opens a service with a journal.
func openWith(t *testing.T, journal string) *Service {
	t.Helper()
	cfg, _, err := config.Read(config.Sources{
		Flags: map[string]string{"listen": "127.0.0.1:0", "admin": "", "journal": journal}, Binds: []string{"tcp://127.0.0.1:*"},
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
	t.Parallel()
	s := open(t)
	done := make(chan error, 1)
	go func() { done <- s.Run(t.Context()) }()
	if err := s.mode.Close(t.Context()); err != nil {
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
	t.Parallel()
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

// TestChangesDuringAStartAreMadeAfterTheRegisteredWorkersAreBack deregisters and registers workers before a service with
// a durable journal has recovered.
func TestChangesDuringAStartAreMadeAfterTheRegisteredWorkersAreBack(t *testing.T) {
	t.Parallel()
	store := "file:" + t.TempDir()
	worker := func(i int) ingestconfig.Worker {
		return ingestconfig.Worker{Name: fmt.Sprintf("w%d", i), Sources: []ingestconfig.Source{{Connect: fmt.Sprintf("tcp://127.0.0.1:%d", i+1)}}}
	}
	const registered = 8
	run := func(changes func(ctx context.Context, w workers)) {
		t.Helper()
		s := openWith(t, store)
		ctx, cancel := context.WithCancel(t.Context())
		changed := make(chan struct{})
		go func() { defer close(changed); changes(ctx, workers{s}) }()
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		<-changed
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	run(func(ctx context.Context, w workers) {
		for i := range registered {
			if err := w.AddWorker(ctx, worker(i)); err != nil {
				t.Error(err)
			}
		}
	})
	run(func(ctx context.Context, w workers) {
		for i := range registered {
			if err := w.AddWorker(ctx, worker(i)); !errors.Is(err, ingestconfig.ErrWorkerExists) {
				t.Errorf("register w%d again: got error %v, want ErrWorkerExists", i, err)
			}
		}
	})
	run(func(ctx context.Context, w workers) {
		for i := range registered {
			if err := w.RemoveWorker(ctx, worker(i).Name, feed.RemovedDeregistered); err != nil {
				t.Error(err)
			}
		}
	})
	run(func(ctx context.Context, w workers) {
		if err := w.awaitRegistered(ctx); err != nil {
			t.Error(err)
		}
		if all, _ := w.follower.Index().Workers(nil); len(all) != 0 {
			t.Errorf("workers that were deregistered are back: %v", all)
		}
	})
}

// lineChannel is a writer whose lines a test receives.
type lineChannel chan string

func (c lineChannel) Write(line []byte) (int, error) {
	c <- string(line)
	return len(line), nil
}

func TestOpeningIsLoggedWhileItTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := make(lineChannel)
		stop := logOpening(slog.New(slog.NewTextHandler(lines, nil)), "file:/journal")
		began := time.Now()
		for _, want := range []string{"journal=file:/journal for=5s", "journal=file:/journal for=10s"} {
			if got := <-lines; !strings.Contains(got, want) {
				t.Errorf("got %q, want %q in it", got, want)
			}
		}
		stop()
		if took := time.Since(began); took != 2*openLogInterval {
			t.Errorf("two lines took %v, want %v", took, 2*openLogInterval)
		}
	})
}

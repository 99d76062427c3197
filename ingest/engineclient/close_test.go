package engineclient_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// wantClosed checks that a closed Client has stopped all work.
func wantClosed(t *testing.T, c *engineclient.Client) {
	t.Helper()
	for name, call := range map[string]func(context.Context) error{
		"Start": c.Start, "Connect": c.Connect, "WaitConnected": c.WaitConnected, "Reconnect": c.Reconnect,
		"ReplayFrom": func(ctx context.Context) error { return c.ReplayFrom(ctx, 0, discard) },
		"SetHandler": func(context.Context) error { return c.SetHandler(discard) },
	} {
		if err := call(t.Context()); !errors.Is(err, engineclient.ErrClosed) {
			t.Errorf("%s after Close: %v, want %v", name, err, engineclient.ErrClosed)
		}
	}
	if c.Connected() {
		t.Error("connected after Close")
	}
	if err := errors.Join(c.Stop(), c.Close()); err != nil {
		t.Errorf("Stop and Close after Close: %v", err)
	}
}

func TestClientCloseBeforeStart(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := newClient(t, clientOf(p), discard)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	wantClosed(t, c)
}

func TestClientCloseAfterStop(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := connectClient(t, p, clientOf(p), discard)
	stopClient(t, c)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	wantClosed(t, c)
}

// TestClientCloseWaits closes a Client during a handler call: every Close waits for the
// call, no other call follows, and the metrics are unregistered while the stats remain.
func TestClientCloseWaits(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	registry := prometheus.NewRegistry()
	cfg := clientOf(p)
	cfg.Metrics = registry
	inside, out := make(chan struct{}), make(chan struct{})
	calls := 0
	c := connectClient(t, p, cfg, engineclient.HandlerFunc(func(ctx context.Context, _ *engineclient.Event) error {
		calls++
		close(inside)
		<-ctx.Done()
		<-out
		return nil
	}))
	enginetest.Remove(t, p.Publish, 1)
	enginetest.Remove(t, p.Publish, 2)
	<-inside
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == 1 })
	const closers = 3
	closed := make(chan error, closers)
	for range closers {
		go func() { closed <- c.Close() }()
	}
	harness.WaitFor(t, func() bool { return errors.Is(c.Start(t.Context()), engineclient.ErrClosed) })
	select {
	case <-closed:
		t.Error("Close returned while the handler was called")
	default:
	}
	close(out)
	for range closers {
		if err := <-closed; err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if s := c.Stats(); calls != 1 || s.Handled != 1 || s.Discarded != 1 || s.Batches != 2 || s.Connections != 1 {
		t.Errorf("%d calls, stats %+v", calls, s)
	}
	if left := harness.Gather(t, registry); len(left) != 0 {
		t.Errorf("metrics are left: %v", left)
	}
	wantClosed(t, c)
}

// TestClientCloseEndsReplayFrom closes a Client while ReplayFrom is in progress.
func TestClientCloseEndsReplayFrom(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]bool{"started": true, "never started": false} {
		t.Run(name, func(t *testing.T) {
			p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
			enginetest.Remove(t, p.Drop, 1)
			enginetest.Remove(t, p.Drop, 2)
			c := newClient(t, clientOf(p), discard)
			if start {
				if err := c.Connect(harness.Context(t)); err != nil {
					t.Fatal(err)
				}
			}
			inside, ended := make(chan struct{}), false
			replayed := make(chan error, 1)
			go func() {
				replayed <- c.ReplayFrom(harness.Context(t), 0, engineclient.HandlerFunc(func(ctx context.Context, _ *engineclient.Event) error {
					close(inside)
					<-ctx.Done()
					ended = true
					return nil
				}))
			}()
			<-inside
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if !ended {
				t.Error("Close did not wait for ReplayFrom")
			}
			if err := <-replayed; !errors.Is(err, engineclient.ErrClosed) {
				t.Errorf("ReplayFrom: %v, want %v", err, engineclient.ErrClosed)
			}
			if d := cmp.Diff(uint64(1), c.Stats().ReplayFromFailed); d != "" {
				t.Errorf("failed (-want +got):\n%s", d)
			}
			wantClosed(t, c)
		})
	}
}

// TestClientCloseWhileWaiting closes a Client while a goroutine waits for it.
func TestClientCloseWhileWaiting(t *testing.T) {
	t.Parallel()
	c := newClient(t, engineclient.Config{Connect: "ipc://" + t.TempDir() + "/nobody"}, discard)
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- c.WaitConnected(harness.Context(t)) }()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waited; !errors.Is(err, engineclient.ErrClosed) {
		t.Errorf("WaitConnected: %v, want %v", err, engineclient.ErrClosed)
	}
}

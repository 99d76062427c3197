package engineclient_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvcast/kvcast/ingest/engineclient"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// TestClientHandlerSetLater starts a Client without a handler. The Client and the engine buffer
// events, and none is lost.
func TestClientHandlerSetLater(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	cfg := clientOf(p)
	cfg.Buffer = 2
	c := connectClient(t, p, cfg, nil)
	if err := c.SetHandler(nil); err == nil {
		t.Error("nil is taken for a handler")
	}
	var want []string
	for i := range uint64(50) {
		enginetest.Remove(t, p.Publish, i)
		want = append(want, fmt.Sprintf("0/%d removed [%d]", i, i))
	}
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == cfg.Buffer })
	if s := c.Stats(); s.Handled != 0 || s.Batches > 3 {
		t.Errorf("read ahead of the handler: %+v", s)
	}
	got := newLines()
	if err := c.SetHandler(got); err != nil {
		t.Fatal(err)
	}
	got.want(t, want...)

	other := newLines()
	if err := c.SetHandler(other); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Publish, 50)
	other.want(t, "0/50 removed [50]")
	stopClient(t, c)
	got.wantNone(t)
	if err := c.SetHandler(got); err != nil {
		t.Errorf("SetHandler after Stop: %v", err)
	}
}

// TestClientHandlerSetBeforeStart sets the handler between New and Start.
func TestClientHandlerSetBeforeStart(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := newClient(t, clientOf(p), nil)
	got := newLines()
	if err := c.SetHandler(got); err != nil {
		t.Fatal(err)
	}
	enginetest.Remove(t, p.Drop, 1)
	if err := c.Connect(harness.Context(t)); err != nil {
		t.Fatal(err)
	}
	got.want(t, "0/0 removed [1]")
}

// TestClientWithoutHandlerStops checks that events that waited for a handler are counted.
func TestClientWithoutHandlerStops(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := connectClient(t, p, clientOf(p), nil)
	enginetest.Remove(t, p.Publish, 1)
	enginetest.Remove(t, p.Publish, 2)
	harness.WaitFor(t, func() bool { return c.Stats().Waiting == 2 })
	stopClient(t, c)
	if s := c.Stats(); s.Handled != 0 || s.Discarded != 2 || s.Waiting != 0 {
		t.Errorf("stats %+v", s)
	}
}

// TestClientHandlersChange sets handlers from several goroutines while events arrive: each
// event is handled once.
func TestClientHandlersChange(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	c := connectClient(t, p, clientOf(p), nil)
	const setters, batches = 4, 200
	var (
		calls [setters]atomic.Uint64
		group sync.WaitGroup
		stop  = make(chan struct{})
	)
	for i := range setters {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := c.SetHandler(engineclient.HandlerFunc(func(context.Context, *engineclient.Event) error {
					calls[i].Add(1)
					return nil
				}))
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range uint64(batches) {
		enginetest.Remove(t, p.Publish, i)
	}
	harness.WaitFor(t, func() bool { return c.Stats().Handled == batches })
	close(stop)
	group.Wait()
	sum := uint64(0)
	for i := range calls {
		sum += calls[i].Load()
	}
	if sum != batches {
		t.Errorf("%d calls for %d events", sum, batches)
	}
}

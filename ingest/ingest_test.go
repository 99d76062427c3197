package ingest_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// TestRunEndsSoon checks that Run, when it ends, does not wait for the silence timeout, the grace
// time or a reply.
func TestRunEndsSoon(t *testing.T) {
	t.Parallel()
	idle := newEngine(t)
	c := worker(config.Source{Connect: idle.mustBind("tcp://127.0.0.1:*"), Replay: newMute(t)})
	c.Silence, c.Grace, c.ReplayTimeout = time.Hour, time.Hour, time.Hour
	c.Workers = append(c.Workers, config.Worker{
		Name:    "nobody-there",
		Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}},
	})
	c.Listeners = []config.Listener{{Bind: "tcp://127.0.0.1:*"}}
	_, stop := start(t, c, newRecorder(t))
	idle.awaitSubscriber("")
	stop()
}

func TestNoCallFollowsRun(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	r := newRecorder(t)
	_, stop := start(t, worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")}), r)
	e.awaitSubscriber("")
	const before = 500 // messages sent before Run ends; most have not been read then
	for seq := range uint64(before) {
		e.publish(seq, stored(seq))
	}
	r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[0]")
	stop() // the recorder fails the test at later calls
}

func TestRunWithNothingToRead(t *testing.T) {
	t.Parallel()
	_, stop := start(t, config.Config{}, newRecorder(t))
	stop()
}

func TestRunOnce(t *testing.T) {
	t.Parallel()
	in, stop := start(t, config.Config{}, newRecorder(t))
	stop()
	if err := in.Run(context.Background()); !errors.Is(err, ingest.ErrStarted) {
		t.Errorf("second Run: %v, want ErrStarted", err)
	}
	if err := in.Close(); err != nil {
		t.Errorf("Close after Run: %v", err)
	}
}

func TestCloseReleasesWhatNewAllocated(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	c := config.Config{
		Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
		Metrics:   registry,
	}
	for range 2 { // the second uses the same address and registers the same metrics
		in, err := ingest.New(c, newRecorder(t))
		if err != nil {
			t.Fatalf("New: %v", err)
		}
		c.Listeners[0].Bind = in.Endpoints()[0]
		if err := in.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if err := in.Run(t.Context()); !errors.Is(err, ingest.ErrStarted) {
			t.Errorf("Run after Close: %v, want ErrStarted", err)
		}
	}
}

func TestNewFails(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	taken, _ := start(t, config.Config{
		Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
		Metrics:   registry,
	}, newRecorder(t))
	address := taken.Endpoints()[0]
	tests := []struct {
		name   string
		config config.Config
		want   []string
	}{
		{
			"address in use",
			config.Config{Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}, {Bind: address}}},
			[]string{address, "address already in use"},
		},
		{
			"host name",
			config.Config{Listeners: []config.Listener{{Bind: "tcp://localhost:*"}}},
			[]string{"bind tcp://localhost:*: want * or an IP address of this machine"},
		},
		{
			"another machine's address",
			config.Config{Listeners: []config.Listener{{Bind: "tcp://192.0.2.1:*"}}},
			[]string{"bind tcp://192.0.2.1:*: want * or an IP address of this machine"},
		},
		{
			"directory missing",
			config.Config{Listeners: []config.Listener{{Bind: "ipc:///nonexistent/socket"}}},
			[]string{"ipc:///nonexistent/socket", "no such file or directory"},
		},
		{
			"metrics registered before",
			config.Config{Metrics: registry},
			[]string{"register metrics", "duplicate"},
		},
		{
			"bad config",
			config.Config{MaxWorkers: -1},
			[]string{"check config: MaxWorkers is -1"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in, err := ingest.New(tt.config, newRecorder(t))
			if err == nil {
				t.Fatalf("no error; Close: %v", in.Close())
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
}

// accountant is a Sink whose lane blocks until it is released, and then checks that each seq is in
// a batch or a gap.
type accountant struct {
	t       *testing.T
	release chan struct{}
	next    uint64
	gaps    int
	seen    chan uint64 // seq of the last batch; has capacity 1
}

func (a *accountant) AddWorker(feed.Worker) feed.Lane               { return a }
func (a *accountant) RemoveWorker(name string, _ feed.RemoveReason) { a.t.Errorf("%s removed", name) }
func (a *accountant) Restarted(r feed.Restart)                      { a.t.Errorf("restart: %+v", r) }

func (a *accountant) Batch(b *feed.Batch) {
	<-a.release
	if b.Seq != a.next {
		a.t.Errorf("batch %d, want %d", b.Seq, a.next)
	}
	a.next = b.Seq + 1
	select {
	case <-a.seen:
	default:
	}
	a.seen <- b.Seq
}

func (a *accountant) Gap(g feed.Gap) {
	a.gaps++
	if g.FirstSeq != a.next || g.Missed != g.LastSeq-g.FirstSeq+1 {
		a.t.Errorf("gap %+v, want one from %d", g, a.next)
	}
	a.next = g.LastSeq + 1
}

func TestOverloadIsAGap(t *testing.T) {
	t.Parallel()
	e := newEngineOf(t, enginetest.Config{HighWaterMark: 100})
	a := &accountant{t: t, release: make(chan struct{}), seen: make(chan uint64, 1)}
	_, stop := start(t, worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")}), a)
	e.awaitSubscriber("")
	// More messages than fit into the buffers of both ends and the kernel.
	const messages = 40_000
	hashes := make([]uint64, 150)
	for i := range hashes {
		hashes[i] = uint64(i)
	}
	event := removed(hashes...)
	seq := uint64(0)
	for ; seq < messages; seq++ {
		e.publish(seq, event)
	}
	close(a.release)
	// ZeroMQ may also drop the next messages, until its buffers have room.
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	timeout := time.After(harness.Timeout)
	for done := false; !done; {
		select {
		case <-again.C:
			e.publish(seq)
			seq++
		case last := <-a.seen:
			done = last >= messages
		case <-timeout:
			t.Fatal("batches stopped coming")
		}
	}
	stop()
	if a.gaps == 0 {
		t.Error("no gap")
	}
}

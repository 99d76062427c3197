package ingest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// awaitState waits until a source is in a state.
func awaitState(t *testing.T, in *ingest.Ingest, source int, want ingest.SourceState) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for ctx := harness.Context(t); ; {
		all := in.Sources()
		if source < len(all) && all[source].State == want {
			return
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatalf("state %v of source %d does not come: %+v", want, source, all)
		}
	}
}

// metricsOf returns the metrics that name a worker.
func metricsOf(t *testing.T, g prometheus.Gatherer, worker string) harness.Metrics {
	t.Helper()
	return harness.Gather(t, g).Select("", "worker", worker)
}

// wantNoMetricsOf checks that no metric names a worker.
func wantNoMetricsOf(t *testing.T, g prometheus.Gatherer, worker string) {
	t.Helper()
	if left := metricsOf(t, g, worker); len(left) > 0 {
		t.Errorf("metrics of %s are left: %v", worker, left)
	}
}

// A worker without connections is removed after the grace time, and added again with its next
// connection, in its initial state.
func TestWorkerIsRemovedAfterTheGraceTimeAndAddedAgain(t *testing.T) {
	tests := []struct {
		name  string
		bound bool
		read  func(*testing.T, *ingest.Ingest, config.Worker) // nil if the worker is configured
		added string
	}{
		{name: "configured", added: "add w model m block_size 0 ranks [0]"},
		{name: "added", added: "add w model m block_size 0 ranks [0]", read: func(t *testing.T, in *ingest.Ingest, c config.Worker) {
			if err := in.AddWorker(harness.Context(t), c); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "bound", bound: true, added: "add w model m block_size 0 ranks []"},
	}
	for _, tt := range tests {
		for _, grace := range []time.Duration{-1, 20 * time.Millisecond} {
			t.Run(fmt.Sprint(tt.name, " ", grace), func(t *testing.T) {
				t.Parallel()
				e := newEngine(t)
				registry := prometheus.NewRegistry()
				c := config.Config{Grace: grace, Metrics: registry}
				var endpoint, topic string
				var w config.Worker
				if tt.bound {
					topic = "kv@w@m"
					c.Listeners = []config.Listener{{Bind: "tcp://127.0.0.1:*"}}
				} else {
					endpoint = e.mustBind("tcp://127.0.0.1:*")
					w = worker(config.Source{Connect: endpoint}).Workers[0]
				}
				if !tt.bound && tt.read == nil {
					c.Workers = []config.Worker{w}
				}
				r := newRecorder(t)
				in, _ := start(t, c, r)
				if tt.read != nil {
					tt.read(t, in, w)
				}
				for removals := range 3 {
					if removals > 0 {
						e = newEngine(t)
						if !tt.bound {
							bindAgain(t, e, endpoint)
						}
					}
					if tt.bound {
						e.connect(in.Endpoints()[0])
					}
					e.awaitSubscriber("")
					first := uint64(removals % 2) // the first batch after the worker is added again is neither a gap, a restart nor a duplicate
					e.send(topic, seqFrame(first), payload(first, stored(1)))
					r.want(tt.added)
					if first > 0 {
						r.want("w 0/0: joined late, after 0-0")
					}
					r.want(fmt.Sprintf("w 0/0: batch %d +[1]", first))
					e.Close()
					r.want("remove w")
					if tt.bound {
						harness.WaitFor(t, func() bool { return len(in.Sources()) == 0 && len(metricsOf(t, registry, "w")) == 0 })
					}
				}
				r.wantNone()
			})
		}
	}
}

// bindAgain binds an engine to the port of another engine that ended. It retries, because libzmq
// may still be closing the port.
func bindAgain(t *testing.T, e *engine, endpoint string) {
	t.Helper()
	harness.WaitFor(t, func() bool { _, err := e.Bind(endpoint); return err == nil })
}

// A worker stays as long as one of its ranks is connected.
func TestOneConnectedRankKeepsTheWorker(t *testing.T) {
	t.Parallel()
	engines, first := newEngines(t, 2)
	c := worker(config.Source{Connect: first, DPSize: 2})
	c.Grace = -1
	r := newRecorder(t)
	in, _ := start(t, c, r)
	for rank, e := range engines {
		e.awaitSubscriber("")
		e.publish(0, stored(uint64(rank)))
		if rank == 0 {
			r.want("add w model m block_size 0 ranks [0 1]")
		}
		r.want(fmt.Sprintf("w 0/%d: batch 0 +[%d]", rank, rank))
	}
	engines[0].Close()
	awaitState(t, in, 0, ingest.SourceConnecting)
	r.want("w 0/0: gap possible_restart 0-0, 0 missed")
	engines[1].publish(1, stored(5))
	r.want("w 0/1: batch 1 +[5]")
	engines[1].Close()
	r.want("remove w")
	r.wantNone()
}

// A worker that reconnects within the grace time is not removed.
func TestWorkerThatReconnectsInTimeStays(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	v := newView()
	c := worker(config.Source{Connect: p.Endpoint(), Replay: p.ReplayEndpoint()})
	c.Grace, c.ReplayTimeout = time.Hour, harness.Timeout
	in, _ := start(t, c, v)
	for seq := range uint64(3) {
		if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Publish(enginetest.Stored(1)); err != nil {
			t.Fatal(err)
		}
		// A replay that the end of the connection interrupts again and again is no proof that the engine did not restart.
		v.await(t, "the batch", func() bool { return v.lastSeq == seq && v.blocks[1] > 0 })
		if err := p.Disconnect(); err != nil {
			t.Fatal(err)
		}
		awaitState(t, in, 0, ingest.SourceConnecting)
		if err := p.Reconnect(); err != nil {
			t.Fatal(err)
		}
	}
	awaitState(t, in, 0, ingest.SourceLive)
	v.await(t, "the last batch", func() bool { return v.lastSeq == 2 })
	v.mu.Lock()
	defer v.mu.Unlock()
	if d := cmp.Diff(map[string]int{"added": 1}, v.reported); d != "" {
		t.Errorf("reported (-want +got):\n%s", d)
	}
}

func TestAddAndRemoveWorkers(t *testing.T) {
	t.Parallel()
	p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	enginetest.Remove(t, p.Publish, 1)
	named := func(name string) config.Worker {
		source := config.Source{Connect: p.Endpoint(), Replay: p.ReplayEndpoint()}
		if name != "configured" { // names of hosts are not resolved to find workers with the same sockets
			source.Connect = strings.Replace(source.Connect, "127.0.0.1", "localhost", 1)
			source.Replay = strings.Replace(source.Replay, "127.0.0.1", "localhost", 1)
		}
		return config.Worker{Name: name, Sources: []config.Source{source}}
	}
	registry := prometheus.NewRegistry()
	lines := newRecorder(t)
	r := &plain{lines}
	in, stop := start(t, config.Config{
		MaxWorkers: 2, Metrics: registry, Workers: []config.Worker{named("configured")},
	}, r)
	add := func(name string, want error) {
		t.Helper()
		if err := in.AddWorker(harness.Context(t), named(name)); !errors.Is(err, want) {
			t.Errorf("AddWorker of %s: %v, want %v", name, err, want)
		}
	}
	drop := func(name string, want error) {
		t.Helper()
		if err := in.RemoveWorker(harness.Context(t), name, feed.RemovedDeregistered); !errors.Is(err, want) {
			t.Errorf("RemoveWorker of %s: %v, want %v", name, err, want)
		}
	}
	lines.want("add configured model  block_size 0 ranks [0]", "batch 0 -[1]")
	for range 3 { // under the same name, each time in its initial state
		add("added", nil)
		lines.want("add added model  block_size 0 ranks [0]", "batch 0 -[1]")
		add("added", config.ErrWorkerExists)
		add("configured", config.ErrWorkerExists)
		add("one more", config.ErrTooManyWorkers)
		drop("one more", config.ErrNoWorker)
		drop("added", nil)
		lines.want("remove added")
		wantNoMetricsOf(t, registry, "added")
		drop("added", config.ErrNoWorker)
		if got := slices.IndexFunc(in.Sources(), func(s ingest.SourceStatus) bool { return s.Worker == "added" }); got >= 0 {
			t.Errorf("sources of a worker that was removed: %+v", in.Sources())
		}
	}
	drop("configured", nil)
	lines.want("remove configured")
	add("configured", nil)
	lines.want("add configured model  block_size 0 ranks [0]", "batch 0 -[1]")
	if err := in.AddWorker(harness.Context(t), config.Worker{Name: "no sources"}); err == nil {
		t.Error("AddWorker without sources: no error")
	}
	stop()
	add("late", config.ErrEnded)
	drop("configured", config.ErrEnded)
	lines.wantNone()
}

// AddWorker waits for Run until its context is done.
func TestAddWorkerBeforeRun(t *testing.T) {
	t.Parallel()
	in, err := ingest.New(config.Config{}, newRecorder(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := in.AddWorker(ctx, worker(config.Source{Connect: "tcp://127.0.0.1:1"}).Workers[0]); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("AddWorker before Run: %v, want that its context is done", err)
	}
}

// A worker can be removed while a replay is in progress, or while its endpoints refuse connections.
func TestRemoveWorkerWhileItWaits(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		state ingest.SourceState
		read  func(*testing.T, *simulator.Publisher) config.Source
	}{
		{"for a replay", ingest.SourceCatchingUp, func(t *testing.T, p *simulator.Publisher) config.Source {
			if err := p.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}); err != nil {
				t.Fatal(err)
			}
			return config.Source{Connect: p.Endpoint(), Replay: p.ReplayEndpoint()}
		}},
		{"for a connection", ingest.SourceConnecting, func(*testing.T, *simulator.Publisher) config.Source {
			return config.Source{Connect: "tcp://127.0.0.1:1", Replay: "tcp://127.0.0.1:2"}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := enginetest.NewSimulated(t, simulator.PublisherConfig{})
			c := worker(tt.read(t, p))
			registry := prometheus.NewRegistry()
			c.Metrics, c.ReplayTimeout = registry, time.Hour
			r := newRecorder(t)
			in, _ := start(t, c, r)
			if tt.state == ingest.SourceCatchingUp {
				if err := p.WaitReplayRequests(harness.Context(t), 1); err != nil {
					t.Fatal(err)
				}
				enginetest.Remove(t, p.Publish, 1) // in the reorder buffer
			}
			awaitState(t, in, 0, tt.state)
			if err := in.RemoveWorker(harness.Context(t), "w", feed.RemovedDiscovery); err != nil {
				t.Fatal(err)
			}
			r.want("add w model m block_size 0 ranks [0]", "remove w")
			wantNoMetricsOf(t, registry, "w")
			if held := ingest.ReorderBytes(in); held != 0 || len(in.Sources()) != 0 {
				t.Errorf("%d bytes held, sources %+v", held, in.Sources())
			}
			r.wantNone()
		})
	}
}

// plain is a recorder without the names of workers.
type plain struct{ *recorder }

func (r *plain) AddWorker(w feed.Worker) feed.Lane {
	r.recorder.AddWorker(w)
	return plainLane{r.recorder}
}

type plainLane struct{ *recorder }

func (l plainLane) Batch(b *feed.Batch) {
	if b.Proved {
		return // when it comes depends on the replay socket
	}
	l.write("batch %d%s", b.Seq, eventsLine(b))
}

func (l plainLane) Gap(g feed.Gap) {
	l.write("gap %v %d-%d, %d missed", g.Reason, g.FirstSeq, g.LastSeq, g.Missed)
}

func (l plainLane) Restarted(feed.Restart) { l.write("restarted") }

package ingest_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// all keeps all calls.
func all(n int) int { return n }

// oneLife runs an Ingest that reads some batches, and returns what is recovered.
func (d *deployment) oneLife(t *testing.T, sink *durableSink) []feed.Recovered {
	t.Helper()
	_, stop := d.run(t, config.ZMQNative, sink, nil)
	for _, c := range d.caches {
		c.publish(rand.New(rand.NewPCG(1, 1)), 3)
	}
	d.awaitLast(t, sink)
	stop()
	for _, c := range d.caches {
		c.must(c.WaitUnsubscribed(harness.Context(t)))
	}
	return sink.recovered(all)
}

// recovering returns the deployment's config with what is recovered.
func (d *deployment) recovering(recovered []feed.Recovered) config.Config {
	c := d.config
	c.Durable, c.Recovered, c.Grace, c.Silence = true, recovered, time.Hour, -1
	return c
}

// wantRemoved checks which workers were removed from the stream.
func (s *durableSink) wantRemoved(t *testing.T, names ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.removed, names) {
		t.Errorf("removed %v, want %v", s.removed, names)
	}
}

// A pod that does not connect again is removed after the grace time.
func TestRecoveredPodThatDoesNotReturnIsRemoved(t *testing.T) {
	t.Parallel()
	d, sink := bound(t, true), newDurableSink()
	recovered := d.oneLife(t, sink)
	for _, c := range d.caches {
		c.must(c.Disconnect())
	}
	c := d.recovering(recovered)
	c.Grace = 20 * time.Millisecond
	in, _ := start(t, c, sink)
	sink.await(t, "the removal", func() bool { return len(sink.removed) > 0 })
	harness.WaitFor(t, func() bool { return len(in.Sources()) == 0 })
	sink.wantRemoved(t, d.worker)
}

// A configured worker that does not connect again is removed after the grace time, and added when it connects.
func TestRecoveredWorkerThatDoesNotReturnIsRemoved(t *testing.T) {
	t.Parallel()
	d, sink := connected(t, true, 1, feed.EngineVLLM), newDurableSink()
	recovered := d.oneLife(t, sink)
	for _, c := range d.caches {
		c.must(c.Disconnect())
	}
	c := d.recovering(recovered)
	c.Grace = 20 * time.Millisecond
	start(t, c, sink)
	sink.await(t, "the removal", func() bool { return len(sink.removed) > 0 })
	for _, c := range d.caches {
		c.must(c.Reconnect())
	}
	d.awaitSubscribers()
	d.awaitLast(t, sink)
	key := feed.Publisher{}
	if diff := cmp.Diff(texts(d.uninterrupted(t, key)), texts(sink.of("w", key))); diff != "" {
		t.Errorf("calls after the removal (-want +got):\n%s", diff)
	}
}

// Until it connects again, a recovered pod counts as if it had just disconnected.
func TestRecoveredPodsCountTowardsLimits(t *testing.T) {
	t.Parallel()
	d, sink := bound(t, true), newDurableSink()
	recovered := d.oneLife(t, sink)
	for _, c := range d.caches {
		c.must(c.Disconnect())
	}
	c := d.recovering(recovered)
	c.MaxWorkers, c.MaxSources = 1, 2
	in, _ := start(t, c, sink)
	sink.await(t, "the pod", func() bool { return sink.workers[d.worker].added == 1 })
	var got []string
	for _, s := range in.Sources() {
		if s.Worker != d.worker || s.State != ingest.SourceConnecting || !s.Started || s.LastSeq != 3 || s.DownSince.IsZero() {
			t.Errorf("source %+v, want one that is down and has read batch 3", s)
		}
		got = append(got, s.Endpoint)
	}
	if len(got) != 2 {
		t.Errorf("sources at %v, want two", got)
	}
	if err := in.AddWorker(harness.Context(t), config.Worker{Name: "x", Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}}}); err == nil {
		t.Error("one worker too many is added")
	}
	if err := in.AddWorker(harness.Context(t), config.Worker{Name: d.worker, Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}}}); err == nil {
		t.Error("a second worker of the name is added")
	}
	sink.wantRemoved(t)
}

// Workers that are neither configured nor of a listener are removed on request, unless AddWorker has added them.
func TestRecoveredWorkersThatNothingClaimsAreRemoved(t *testing.T) {
	t.Parallel()
	d, sink := connected(t, true, 1, feed.EngineVLLM), newDurableSink()
	gone := connected(t, true, 1, feed.EngineVLLM)
	gone.worker, gone.config.Workers[0].Name = "gone", "gone"
	gone.oneLife(t, sink)
	recovered := d.oneLife(t, sink) // of both
	in, _ := start(t, config.Config{Durable: true, MaxWorkers: 2, Recovered: recovered}, sink)
	if err := in.AddWorker(harness.Context(t), d.config.Workers[0]); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is none
		if err := in.RemoveUnclaimed(harness.Context(t)); err != nil {
			t.Fatal(err)
		}
		sink.wantRemoved(t, "gone")
	}
	d.awaitSubscribers()
	d.awaitLast(t, sink)
	key := feed.Publisher{}
	if diff := cmp.Diff(texts(d.uninterrupted(t, key)), texts(sink.of("w", key))); diff != "" {
		t.Errorf("calls (-uninterrupted +recovered):\n%s", diff)
	}
	// Its name is free.
	if err := in.AddWorker(harness.Context(t), gone.config.Workers[0]); err != nil {
		t.Error(err)
	}
}

// A worker whose state cannot be used is removed and starts anew: all its batches are read again.
func TestWorkerWhoseStateCannotBeUsedStartsAnew(t *testing.T) {
	encoded := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	cursors := func(cursor []byte) func(*feed.Recovered) {
		return func(r *feed.Recovered) { r.Cursors = map[feed.Publisher][]byte{{}: cursor} }
	}
	for _, tt := range []struct {
		name   string
		change func(r *feed.Recovered)
		says   string
	}{
		{"state of a later version", func(r *feed.Recovered) { r.Checkpoint = encoded(&statev1.IngestWorker{Version: 2}) },
			"version 2 is unknown, want at most 1: a later kvcast has written it"},
		{"cursor of a later version", cursors(encoded(&statev1.IngestCursor{Version: 2})), "version 2 is unknown"},
		{"corrupt checkpoint", func(r *feed.Recovered) { r.Checkpoint = []byte{0xff} }, "decode state"},
		{"corrupt change", func(r *feed.Recovered) { r.Learned = [][]byte{{0xff}} }, "decode state"},
		{"corrupt cursor", cursors([]byte{0xff}), "decode cursor"},
		{"cursor without seq", cursors(encoded(&statev1.IngestCursor{Version: 1, BatchAge: proto.Uint64(1)})), "the last batch has no seq"},
		{"salt missing", func(r *feed.Recovered) {
			r.Learned = [][]byte{encoded(&statev1.IngestWorker{Version: 1, Sources: []*statev1.IngestSource{{
				Ranks: []*statev1.IngestRank{{SaltedBlocks: []uint64{1}, BlockSalts: []uint32{7}, BlockCopies: []uint32{1}}},
			}}})}
		}, "a block's salt is missing"},
		{"another configuration", func(r *feed.Recovered) { r.Worker.Model = "other" }, "configuration has changed"},
		{"a rank that is gone", func(r *feed.Recovered) {
			r.Cursors[feed.Publisher{Rank: 7}] = encoded(&statev1.IngestCursor{Version: 1, Seq: proto.Uint64(1)})
		}, "source 0 has no dp rank 7"},
	} {
		for name, d := range map[string]*deployment{"connected": connected(t, true, 1, feed.EngineVLLM), "bound": bound(t, true)} {
			if name == "bound" && tt.says == "source 0 has no dp rank 7" {
				continue // see TestRecoveredPodOfAnotherListenerStartsAnew
			}
			t.Run(tt.name+", "+name, func(t *testing.T) {
				t.Parallel()
				sink := newDurableSink()
				recovered := d.oneLife(t, sink)
				tt.change(&recovered[0])
				var log harness.Log
				c := d.recovering(recovered)
				c.Logger = log.Logger()
				_, stop := start(t, c, sink)
				d.awaitSubscribers()
				d.awaitLast(t, sink)
				stop()
				sink.wantRemoved(t, d.worker)
				for _, p := range d.publishers() {
					if diff := cmp.Diff(texts(d.uninterrupted(t, p)), texts(sink.of(d.worker, p))); diff != "" {
						t.Errorf("calls for %+v (-all +anew):\n%s", p, diff)
					}
				}
				if !strings.Contains(log.String(), "starts anew") || !strings.Contains(log.String(), tt.says) || !strings.Contains(log.String(), "worker="+d.worker) {
					t.Errorf("no warning that %q of worker %s:\n%s", tt.says, d.worker, log.String())
				}
			})
		}
	}
}

// A recovered pod whose listener has another address, or no longer accepts its topic, is not resumed.
func TestRecoveredPodOfAnotherListenerStartsAnew(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*config.Listener){
		"address": func(l *config.Listener) { l.Bind = "tcp://127.0.0.1:*" },
		"topics":  func(l *config.Listener) { l.Topics = []string{"other@*"} },
		"worker":  func(l *config.Listener) { l.Worker = "one for all" },
	} {
		t.Run(name, func(t *testing.T) {
			d, sink := bound(t, true), newDurableSink()
			recovered := d.oneLife(t, sink)
			c := d.recovering(recovered)
			c.Listeners = slices.Clone(c.Listeners)
			change(&c.Listeners[0])
			in, _ := start(t, c, sink)
			if err := in.RemoveUnclaimed(harness.Context(t)); err != nil {
				t.Fatal(err)
			}
			sink.wantRemoved(t, d.worker)
			if slices.ContainsFunc(in.Sources(), func(s ingest.SourceStatus) bool { return s.Worker == d.worker }) {
				t.Errorf("sources %+v, want none of %s", in.Sources(), d.worker)
			}
		})
	}
}

func TestCheckpointOfAWorkerThatIsNotInTheStream(t *testing.T) {
	t.Parallel()
	e := newCache(t, simulator.PublisherConfig{})
	c := worker(config.Source{Connect: e.Endpoint(), Replay: e.ReplayEndpoint()})
	for _, durable := range []bool{true, false} {
		c.Durable = durable
		sink := newDurableSink()
		in, _ := start(t, c, sink)
		sink.await(t, "the worker", func() bool { return sink.workers["w"] != nil })
		never := func([]byte) { t.Error("a state") }
		if in.Checkpoint("other", never) {
			t.Error("a checkpoint of an unknown worker")
		}
		if got := in.Checkpoint("w", func([]byte) {}); got != durable {
			t.Errorf("durable %v: a checkpoint %v", durable, got)
		}
		if err := in.RemoveWorker(harness.Context(t), "w", feed.RemovedDeregistered); err != nil {
			t.Fatal(err)
		}
		if in.Checkpoint("w", never) {
			t.Error("a checkpoint of a worker that was removed")
		}
	}
}

package ingest_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
)

// newBoundCache returns an engine that connects to a listener. Its replay socket is at the given
// host and the port of its rank.
func newBoundCache(t *testing.T, in *ingest.Ingest, host string, replayPort int, rank uint32) *cache {
	t.Helper()
	c := newCache(t, simulator.PublisherConfig{
		SocketConfig: simulator.SocketConfig{
			Endpoint: in.Endpoints()[0], Mode: simulator.ModeConnect, Topic: "kv@" + host + "@m",
			Replay: fmt.Sprintf("tcp://%s:%d", host, replayPort+int(rank)),
		},
		BatchConfig: simulator.BatchConfig{Rank: rank},
	})
	c.connects = true
	c.must(c.WaitSubscribed(harness.Context(t), 1))
	return c
}

// views has a view for each worker.
type views map[string]*view

func (vs views) AddWorker(w feed.Worker) feed.Lane { return vs[w.Name].AddWorker(w) }

func (vs views) RemoveWorker(name string, why feed.RemoveReason) { vs[name].RemoveWorker(name, why) }

// Several pods share a listener, and the ranks of a pod share a topic. Each rank has its own seqs
// and its own replay port.
func TestBoundRanksAreRepairedEachAtItsReplayPort(t *testing.T) {
	t.Parallel()
	const ranks = 3
	hosts := []string{"127.0.0.1", "127.0.0.2"}
	port := harness.FreePorts(t, ranks)
	vs := make(views)
	for _, h := range hosts {
		vs[h] = newView()
	}
	registry := prometheus.NewRegistry()
	in, _ := start(t, config.Config{
		Metrics: registry, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*", ReplayPort: port}},
	}, vs)
	for i, h := range hosts {
		all := make(map[uint64]bool)
		var pod []*cache
		for rank := range uint32(ranks) {
			c := newBoundCache(t, in, h, port, rank)
			c.next = uint64(1000*i) + uint64(100*rank) // unique over all engines
			c.store(c.Publish, 2)
			c.store(c.Drop, int(rank)+1)
			c.store(c.Publish, 1)
			pod = append(pod, c)
		}
		for _, c := range pod {
			for b := range c.blocks {
				all[b] = true
			}
		}
		vs[h].awaitBlocks(t, all)
	}
	for _, h := range hosts {
		vs[h].mu.Lock()
		if d := cmp.Diff(map[string]int{"added": 1}, vs[h].reported); d != "" {
			t.Errorf("reported of %s (-want +got):\n%s", h, d)
		}
		vs[h].mu.Unlock()
	}
	got := make(map[string]int)
	for _, s := range in.Sources() {
		got[fmt.Sprintf("%s %d %s", s.Worker, s.Rank, s.Replay)]++
	}
	want := make(map[string]int)
	for _, h := range hosts {
		for rank := range ranks {
			want[fmt.Sprintf("%s %d tcp://%s:%d", h, rank, h, port+rank)] = 1
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("sources (-want +got):\n%s", d)
	}
}

// After a pod reconnects, the batches that it published in between are requested.
func TestBoundPodThatReconnectsIsVerified(t *testing.T) {
	t.Parallel()
	v := newView()
	registry := prometheus.NewRegistry()
	port := harness.FreePort(t)
	in, _ := start(t, config.Config{
		Metrics: registry, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*", ReplayPort: port}},
	}, v)
	c := newBoundCache(t, in, "127.0.0.1", port, 0)
	c.store(c.Publish, 3)
	v.awaitBlocks(t, c.blocks)
	awaitState(t, in, 0, ingest.SourceLive)
	c.must(c.Disconnect())
	awaitState(t, in, 0, ingest.SourceConnecting)
	c.must(c.Reconnect())
	c.must(c.WaitSubscribed(harness.Context(t), 1))
	c.store(c.Publish, 1) // its seq does not show the restart
	v.awaitBlocks(t, c.blocks)
	awaitState(t, in, 0, ingest.SourceLive)
	wantMetrics(t, registry, map[string]float64{
		`replays_total{cause="reconnect",worker="127.0.0.1"}`: 1,
		`gaps_total{worker="127.0.0.1"}`:                      0,
		`restarts_total{worker="127.0.0.1"}`:                  0,
	})
}

// Two publishers that use the same topic and rank at the same time are reported as a conflict, and
// neither clears the blocks of the other.
func TestTwoPublishersOfOneTopicAreAmbiguous(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		// ends is the index of the publisher that ends, and last the index of the publisher that
		// published last before.
		ends, last int
	}{
		{"the first ends", 0, 1},
		{"the second ends", 1, 0},
		{"the first ends after its next batch", 0, 0},
		{"the second ends after its next batch", 1, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			registry := prometheus.NewRegistry()
			r := newRecorder(t)
			in, _ := start(t, config.Config{
				Metrics: registry, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
			}, &plain{r})
			engines := []*engine{newEngine(t), newEngine(t)}
			for _, e := range engines {
				e.connect(in.Endpoints()[0])
				e.awaitSubscriber("")
			}
			send := func(i int, seq, hash uint64) {
				engines[i].send("kv@p@m", seqFrame(seq), payload(seq, stored(hash)))
			}
			for seq := range uint64(5) {
				send(0, seq, 100+seq)
			}
			r.want("add p model m block_size 0 ranks []")
			for seq := range uint64(5) {
				r.want(fmt.Sprintf("batch %d +[%d]", seq, 100+seq))
			}
			// The second publisher starts, and both publish.
			send(1, 0, 200)
			r.want("gap possible_restart 0-0, 0 missed", "gap ambiguous_publisher 0-0, 0 missed", "batch 0 +[200]")
			next := []uint64{5, 1}
			for range 5 {
				for _, i := range []int{1 - tt.last, tt.last} {
					send(i, next[i], next[i])
					r.want(fmt.Sprintf("batch %d +[%d]", next[i], next[i]))
					next[i]++
				}
			}
			wantMetrics(t, registry, map[string]float64{
				`publisher_conflicts_total{worker="p"}`: 1, `restarts_total{worker="p"}`: 0,
			})
			// Losses of the remaining publisher are reported again.
			engines[tt.ends].Close()
			harness.WaitFor(t, func() bool { return harness.Gather(t, registry).Sum("kvcast_ingest_disconnections_total") == 1 })
			left := 1 - tt.ends
			due := next[left]
			send(left, due, 300)
			r.want(fmt.Sprintf("batch %d +[300]", due))
			send(left, due+2, 301)
			r.want(fmt.Sprintf("gap replay_unavailable %d-%d, 1 missed", due+1, due+1), fmt.Sprintf("batch %d +[301]", due+2))
			r.wantNone()
		})
	}
}

// Only one of two publishers has a replay socket. Its blocks must be complete after the other
// publisher has ended.
func TestTwoPublishersOfOneTopicWithReplay(t *testing.T) {
	for _, ends := range []string{"the one that answers", "the other one"} {
		t.Run(ends, func(t *testing.T) {
			t.Parallel()
			v := newView()
			port := harness.FreePort(t)
			registry := prometheus.NewRegistry()
			in, _ := start(t, config.Config{
				Metrics: registry, ReplayTimeout: harness.Timeout,
				Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*", ReplayPort: port}},
			}, v)
			answers := newBoundCache(t, in, "127.0.0.1", port, 0)
			answers.store(answers.Publish, 5)
			v.awaitBlocks(t, answers.blocks)
			awaitState(t, in, 0, ingest.SourceLive)
			other := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
				Endpoint: in.Endpoints()[0], Mode: simulator.ModeConnect, Topic: "kv@127.0.0.1@m",
			}})
			other.must(other.WaitSubscribed(harness.Context(t), 1))
			other.next = 1000
			harness.WaitFor(t, func() bool {
				other.store(other.Publish, 1)
				answers.store(answers.Publish, 1)
				v.mu.Lock()
				defer v.mu.Unlock()
				return v.reported[feed.GapAmbiguousPublisher.String()] > 0
			})
			v.mu.Lock()
			restarts := v.reported["restarted"]
			v.mu.Unlock()
			if restarts > 0 {
				t.Errorf("reported %d restarts", restarts)
			}
			gone, left := answers, other
			if ends == "the other one" {
				gone, left = other, answers
			}
			gone.must(gone.Disconnect())
			harness.WaitFor(t, func() bool { return harness.Gather(t, registry).Sum("kvcast_ingest_disconnections_total") >= 1 })
			left.store(left.Publish, 1)
			last := left.next
			v.await(t, "the last block", func() bool { return v.blocks[last] > 0 })
			if left == answers {
				v.awaitBlocks(t, left.blocks)
			}
		})
	}
}

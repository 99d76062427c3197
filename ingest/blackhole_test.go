package ingest_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/harness"
)

// proxy is a proxy in front of an endpoint of an engine.
type proxy struct{ *harness.Proxy }

func newProxy(t *testing.T, endpoint string) *proxy {
	t.Helper()
	return &proxy{harness.NewProxy(t, strings.TrimPrefix(endpoint, "tcp://"))}
}

// Endpoint returns the endpoint of the proxy.
func (p *proxy) Endpoint() string { return "tcp://" + p.Addr() }

// replaced reports whether there are connections, and all of them carry data.
func (p *proxy) replaced() bool {
	s := p.Stats()
	return s.Alive > 0 && s.Frozen == 0
}

// holed is an engine behind proxies that can drop all data silently.
type holed struct {
	*cache
	*view
	t           *testing.T
	in          *ingest.Ingest
	registry    *prometheus.Registry
	pub, replay *proxy // between ingest and the sockets of the engine
}

// newHoled returns an engine with a few blocks, and starts an Ingest that reads it.
func newHoled(t *testing.T, replays bool, c config.Config) *holed {
	t.Helper()
	if c.Grace == 0 {
		c.Grace = time.Hour
	}
	h := &holed{t: t, cache: newCache(t, simulator.PublisherConfig{}), view: newView(), registry: prometheus.NewRegistry()}
	h.pub = newProxy(t, h.Endpoint())
	source := config.Source{Connect: h.pub.Endpoint()}
	if replays {
		h.replay = newProxy(t, h.ReplayEndpoint())
		source.Replay = h.replay.Endpoint()
	}
	c.Metrics = h.registry
	c.Workers = []config.Worker{{Name: "w", Sources: []config.Source{source}}}
	h.in, _ = start(t, c, h.view)
	h.must(h.WaitSubscribed(harness.Context(t), 1))
	h.store(h.Publish, 3)
	h.awaitBlocks(t, h.cache.blocks)
	return h
}

// wantReported compares the gaps and restarts that were reported, and checks that no block was
// stored twice.
func (h *holed) wantReported(want map[string]int) {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	got := maps.Clone(h.reported)
	delete(got, "added")
	if d := cmp.Diff(want, got); d != "" {
		h.t.Errorf("reported (-want +got):\n%s", d)
	}
	for b, n := range h.view.blocks {
		if n > 1 {
			h.t.Errorf("block %d came %d times", b, n)
		}
	}
}

// If a replay has batches that did not arrive on the connection, the connection is dead, and is
// replaced.
func TestDeadConnectionIsRenewedWhenReplayHasMore(t *testing.T) {
	t.Parallel()
	h := newHoled(t, true, config.Config{Silence: 100 * time.Millisecond, ReplayTimeout: harness.Timeout})
	before := h.pub.Stats().Accepted
	h.pub.Partition()
	h.store(h.Publish, 3)
	h.evict(h.Publish)
	h.awaitBlocks(t, h.cache.blocks)
	harness.WaitFor(t, func() bool { return h.pub.Stats().Accepted > before })
	h.pub.Heal()
	harness.WaitFor(t, h.pub.replaced)
	awaitState(t, h.in, 0, ingest.SourceLive)
	// The new connection carries live batches, which need no replay.
	h.must(h.WaitSubscribed(harness.Context(t), 1))
	h.store(h.Publish, 2)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantReported(map[string]int{})
}

// While the replay socket does not reply either, the source is suspect: no loss is reported, and
// the worker is not removed.
func TestDeadConnectionIsSuspectWhileReplayDoesNotAnswer(t *testing.T) {
	t.Parallel()
	h := newHoled(t, true, config.Config{Silence: 100 * time.Millisecond, ReplayTimeout: time.Second})
	awaitState(t, h.in, 0, ingest.SourceLive)
	h.pub.Partition()
	h.replay.Partition()
	h.store(h.Publish, 3)
	h.evict(h.Publish)
	awaitState(t, h.in, 0, ingest.SourceSuspect)
	if h.in.Sources()[0].DownSince.IsZero() { // else its blocks would pass for the engine's
		t.Error("a source that is suspect is not down")
	}
	h.wantReported(map[string]int{})
	h.pub.Heal()
	h.replay.Heal()
	h.awaitBlocks(t, h.cache.blocks)
	awaitState(t, h.in, 0, ingest.SourceLive)
	if since := h.in.Sources()[0].DownSince; !since.IsZero() {
		t.Errorf("a live source is down since %v", since)
	}
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantReported(map[string]int{})
}

// The connection of an idle engine without a replay socket is replaced at intervals, and no loss is
// reported.
func TestIdleEngineWithoutReplayReportsNoLoss(t *testing.T) {
	t.Parallel()
	h := newHoled(t, false, config.Config{Silence: 20 * time.Millisecond, Grace: -1})
	before := h.pub.Stats().Accepted
	// Each new connection replaces the previous connection once it is established.
	harness.WaitFor(t, func() bool { return h.pub.Stats().Accepted >= before+3 })
	h.wantReported(map[string]int{})
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantReported(map[string]int{})
	wantMetrics(t, h.registry, map[string]float64{`gaps_total{worker="w"}`: 0, `restarts_total{worker="w"}`: 0})
	awaitState(t, h.in, 0, ingest.SourceLive)
}

// The replay socket of an idle engine is asked, and no loss is reported.
func TestIdleEngineWithReplayReportsNoLoss(t *testing.T) {
	t.Parallel()
	h := newHoled(t, true, config.Config{Silence: 20 * time.Millisecond, Grace: -1})
	before := h.pub.Stats().Accepted
	h.must(h.WaitReplays(harness.Context(t), h.Replays()+10))
	h.wantReported(map[string]int{})
	if n := h.pub.Stats().Accepted; n != before {
		t.Errorf("%d connections, want %d: none was dead", n, before)
	}
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantReported(map[string]int{})
}

// Each batch is delivered once while new connections replace silent connections.
func TestReplacedConnectionsDeliverEachBatchOnce(t *testing.T) {
	t.Parallel()
	h := newHoled(t, false, config.Config{Silence: 10 * time.Millisecond})
	before := h.pub.Stats().Accepted
	publish := time.NewTicker(15 * time.Millisecond)
	defer publish.Stop()
	for ctx := harness.Context(t); ; {
		n := h.pub.Stats().Accepted
		if n >= before+3 {
			break
		}
		select {
		case <-publish.C:
			h.store(h.Publish, 1)
		case <-ctx.Done():
			t.Fatal("there are no fresh connections")
		}
	}
	h.awaitBlocks(t, h.cache.blocks)
	h.wantReported(map[string]int{})
}

// Without a replay socket a dead connection is replaced, and the batches published in between are
// reported as lost.
func TestDeadConnectionWithoutReplayIsReplaced(t *testing.T) {
	tests := []struct {
		name string
		// early reports whether the network recovers before the silence is detected, so that a
		// replacement is established at once. Otherwise connecting fails for a while.
		early    bool
		missed   int
		reported map[string]int
	}{
		{name: "idle", early: true, reported: map[string]int{}},
		{name: "batches missed", early: true, missed: 3, reported: map[string]int{"replay_unavailable": 1}},
		{name: "temporarily unreachable", missed: 3, reported: map[string]int{"replay_unavailable": 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHoled(t, false, config.Config{Silence: 100 * time.Millisecond})
			want := maps.Clone(h.cache.blocks)
			h.pub.Partition()
			h.store(h.Publish, tt.missed)
			if tt.early {
				h.pub.Heal()
			} else {
				awaitState(t, h.in, 0, ingest.SourceSuspect)
				h.pub.Heal()
			}
			// The replacement is established, and then the dead connection is closed.
			harness.WaitFor(t, h.pub.replaced)
			h.store(h.Publish, 1)
			want[h.next] = true
			h.awaitBlocks(t, want)
			h.wantReported(tt.reported)
		})
	}
}

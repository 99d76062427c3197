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

// replaced reports whether there are connections, all of which carry data.
func (p *proxy) replaced() bool {
	s := p.Stats()
	return s.Alive > 0 && s.Frozen == 0
}

// holed is an engine behind a network that can drop everything silently.
type holed struct {
	*cache
	*view
	t           *testing.T
	in          *ingest.Ingest
	registry    *prometheus.Registry
	pub, replay *proxy // between ingest and the sockets of the engine
}

// newHoled returns an engine with a few blocks, which is being read.
func newHoled(t *testing.T, replays bool, c config.Config) *holed {
	t.Helper()
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

// wantTold compares gaps and restarts, and checks that no block was stored twice.
func (h *holed) wantTold(want map[string]int) {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	got := maps.Clone(h.told)
	delete(got, "added")
	if d := cmp.Diff(want, got); d != "" {
		h.t.Errorf("told (-want +got):\n%s", d)
	}
	for b, n := range h.view.blocks {
		if n > 1 {
			h.t.Errorf("block %d came %d times", b, n)
		}
	}
}

// A dead connection is detected by the replay socket, which also has what was published
// meanwhile, and is renewed.
func TestDeadConnectionIsRenewedWhenReplayHasMore(t *testing.T) {
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
	// The new connection carries live batches, without a replay for each.
	h.must(h.WaitSubscribed(harness.Context(t), 1))
	h.store(h.Publish, 2)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantTold(map[string]int{})
}

// While the replay socket does not answer either, the source is suspect: nothing is reported
// as lost, and the worker stays.
func TestDeadConnectionIsSuspectWhileReplayDoesNotAnswer(t *testing.T) {
	h := newHoled(t, true, config.Config{Silence: 100 * time.Millisecond, ReplayTimeout: time.Second})
	awaitState(t, h.in, 0, ingest.SourceLive)
	h.pub.Partition()
	h.replay.Partition()
	h.store(h.Publish, 3)
	h.evict(h.Publish)
	awaitState(t, h.in, 0, ingest.SourceSuspect)
	h.wantTold(map[string]int{})
	h.pub.Heal()
	h.replay.Heal()
	h.awaitBlocks(t, h.cache.blocks)
	awaitState(t, h.in, 0, ingest.SourceLive)
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantTold(map[string]int{})
}

// An idle engine without a replay socket gets a second connection at intervals, and nothing
// is reported.
func TestIdleEngineWithoutReplayIsLeftAlone(t *testing.T) {
	t.Parallel()
	h := newHoled(t, false, config.Config{Silence: 20 * time.Millisecond, Grace: -1})
	before := h.pub.Stats().Accepted
	// Each new connection replaces the one before once it is established.
	harness.WaitFor(t, func() bool { return h.pub.Stats().Accepted >= before+3 })
	h.wantTold(map[string]int{})
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantTold(map[string]int{})
	wantMetrics(t, h.registry, map[string]float64{
		`gaps_total{worker="w"}`: 0, `restarts_total{worker="w"}`: 0, `publishers{state="live"}`: 1,
	})
}

// An idle engine with a replay socket is asked, and nothing is reported.
func TestIdleEngineWithReplayIsLeftAlone(t *testing.T) {
	h := newHoled(t, true, config.Config{Silence: 20 * time.Millisecond, Grace: -1})
	before := h.pub.Stats().Accepted
	h.must(h.WaitReplays(harness.Context(t), h.Replays()+10))
	h.wantTold(map[string]int{})
	if n := h.pub.Stats().Accepted; n != before {
		t.Errorf("%d connections, want %d: none was dead", n, before)
	}
	h.store(h.Publish, 1)
	h.awaitBlocks(t, h.cache.blocks)
	h.wantTold(map[string]int{})
}

// Batches are delivered once while new connections replace silent ones.
func TestFreshConnectionsBesideCarryNothingTwice(t *testing.T) {
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
	h.wantTold(map[string]int{})
}

// Without a replay socket a dead connection is replaced by a second one, and what was
// published meanwhile is reported as lost.
func TestDeadConnectionWithoutReplayIsReplaced(t *testing.T) {
	tests := []struct {
		name string
		// early: the network heals before the silence is noticed, so that a new connection is made
		// at once. Otherwise connecting fails for a while.
		early  bool
		missed int
		told   map[string]int
	}{
		{name: "idle", early: true, told: map[string]int{}},
		{name: "batches missed", early: true, missed: 3, told: map[string]int{"replay_unavailable": 1}},
		{name: "unreachable for a while", missed: 3, told: map[string]int{"replay_unavailable": 1}},
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
			// One beside the dead connection, which is closed then.
			harness.WaitFor(t, h.pub.replaced)
			h.store(h.Publish, 1)
			want[h.next] = true
			h.awaitBlocks(t, want)
			h.wantTold(tt.told)
		})
	}
}

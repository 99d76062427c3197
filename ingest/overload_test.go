package ingest_test

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// gate is a view whose lane blocks until it is opened.
type gate struct {
	*view
	opened chan struct{}
	waits  chan struct{} // closed when a batch is blocked
}

func newGate() *gate {
	return &gate{view: newView(), opened: make(chan struct{}), waits: make(chan struct{})}
}

func (g *gate) AddWorker(w feed.Worker) feed.Lane {
	g.view.AddWorker(w)
	return g
}

func (g *gate) Batch(b *feed.Batch) {
	select {
	case <-g.waits:
	default:
		close(g.waits)
	}
	<-g.opened
	g.view.Batch(b)
}

// blockOfOne returns the store of a block that cache.store publishes.
func blockOfOne(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, BlockSize: 1, Tokens: []uint32{uint32(hash)}}
}

// While a lane blocks, the buffers between the lane and the engine fill up, and further messages
// are dropped. After the lane returns, all dropped batches are replayed.
func TestMessagesDroppedDuringAStallAreRepaired(t *testing.T) {
	t.Parallel()
	const batches = 20_000
	registry := prometheus.NewRegistry()
	g := newGate()
	c := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		HWM: 100, ReplayLimit: 2 * batches, ReplayHWM: 2 * batches,
	}})
	cfg := worker(config.Source{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()})
	// If no later batch shows the last gap, the next verification does.
	cfg.Metrics, cfg.Silence, cfg.ReplayTimeout = registry, 200*time.Millisecond, harness.Timeout
	in, _ := start(t, cfg, g)
	open := sync.OnceFunc(func() { close(g.opened) })
	t.Cleanup(open) // before the Ingest is stopped, which waits for the lane
	c.must(c.WaitSubscribed(harness.Context(t), 1))
	c.store(c.Publish, 1)
	select {
	case <-g.waits:
	case <-time.After(harness.Timeout):
		t.Fatal("nothing is read")
	}
	wide := slices.Repeat([]uint64{math.MaxUint64}, 300) // large batches, so that the kernel's buffers fill up, too
	for range batches {
		c.next++
		c.blocks[c.next] = true
		c.do(c.Publish, blockOfOne(c.next), wire.Event{Kind: wire.KindRemoved, BlockHashes: wide})
	}
	if held := ingest.ReorderBytes(in); held > 16<<20 {
		t.Errorf("%d bytes held back", held)
	}
	open()
	g.awaitBlocks(t, c.blocks)
	// Replayed batches also arrive live, later, and may be buffered.
	harness.WaitFor(t, func() bool { return ingest.ReorderBytes(in) == 0 && in.Sources()[0].State == ingest.SourceLive })
	if n := harness.Gather(t, registry).Sum("kvcast_ingest_replayed_batches_total"); n == 0 {
		t.Error("nothing was dropped: the buffers were not full")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if d := cmp.Diff(map[string]int{"added": 1}, g.reported); d != "" {
		t.Errorf("reported (-want +got):\n%s", d)
	}
}

// replaysIn returns the number of requests to replay sockets in a state.
func replaysIn(t *testing.T, g prometheus.Gatherer, state string) int {
	t.Helper()
	return int(harness.Gather(t, g).Sum("kvcast_ingest_replays_in_progress", "state", state))
}

// gates is a Sink whose lanes block until all are opened together.
type gates struct {
	views
	opened chan struct{}
}

type gatedLane struct {
	*view
	opened chan struct{}
}

func (l gatedLane) Batch(b *feed.Batch) {
	<-l.opened
	l.view.Batch(b)
}

func (gs gates) AddWorker(w feed.Worker) feed.Lane {
	gs.views[w.Name].AddWorker(w)
	return gatedLane{gs.views[w.Name], gs.opened}
}

// If many engines need a replay, a limited number of replays is in progress at a time. All engines
// are replayed in the end.
func TestReplaysInProgressAreBounded(t *testing.T) {
	t.Parallel()
	const engines, batches, most = 32, 100, 8
	gs := gates{make(views), make(chan struct{})}
	registry := prometheus.NewRegistry()
	var caches []*cache
	cfg := config.Config{ReplayTimeout: time.Hour, Metrics: registry}
	for i := range engines {
		c := newCache(t, simulator.PublisherConfig{})
		c.next = uint64(1000 * i)
		c.store(c.Drop, batches)
		caches = append(caches, c)
		name := fmt.Sprint(i)
		gs.views[name] = newView()
		cfg.Workers = append(cfg.Workers, config.Worker{
			Name: name, Sources: []config.Source{{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()}},
		})
	}
	start(t, cfg, gs)
	open := sync.OnceFunc(func() { close(gs.opened) })
	t.Cleanup(open) // before the Ingest is stopped, which waits for the lanes
	for _, c := range caches {
		c.must(c.WaitSubscribed(harness.Context(t), 1))
		c.store(c.Publish, 1) // in the reorder buffer
	}
	harness.WaitFor(t, func() bool {
		return replaysIn(t, registry, "waiting") == engines-most && replaysIn(t, registry, "transferring") == most
	})
	open()
	for i, c := range caches {
		v := gs.views[fmt.Sprint(i)]
		v.awaitBlocks(t, c.blocks)
		v.mu.Lock()
		if d := cmp.Diff(map[string]int{"added": 1}, v.reported); d != "" {
			t.Errorf("reported of %d (-want +got):\n%s", i, d)
		}
		v.mu.Unlock()
	}
}

// Replay sockets that never reply do not delay the repairs of other engines. If such sockets have
// all slots, a new engine is read without a replay after FirstPatience.
func TestSilentReplaySocketsDelayNoOtherRepair(t *testing.T) {
	t.Parallel()
	const silent = 48 // more than there are slots
	registry := prometheus.NewRegistry()
	healthy, late := newCache(t, simulator.PublisherConfig{}), newCache(t, simulator.PublisherConfig{})
	vs := views{"healthy": newView(), "late": newView()}
	in, _ := start(t, config.Config{
		ReplayTimeout: time.Hour, Metrics: registry,
		Workers: []config.Worker{{
			Name: "healthy", Sources: []config.Source{{Connect: healthy.Endpoint(), Replay: healthy.ReplayEndpoint()}},
		}},
	}, vs, func(in *ingest.Ingest) { ingest.SetFirstRequests(in, time.Hour, 50*time.Millisecond) })
	healthy.must(healthy.WaitSubscribed(harness.Context(t), 1))
	healthy.caughtUp(vs["healthy"])
	for i := range silent {
		c := newCache(t, simulator.PublisherConfig{})
		healthy.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true})) // it completes the handshake, which has a time limit
		name := fmt.Sprint("silent-", i)
		vs[name] = newView()
		healthy.must(in.AddWorker(t.Context(), config.Worker{
			Name: name, Sources: []config.Source{{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()}},
		}))
	}
	harness.WaitFor(t, func() bool { return replaysIn(t, registry, "asking") == 32 })

	healthy.store(healthy.Drop, 3)
	healthy.store(healthy.Publish, 1)
	vs["healthy"].awaitBlocks(t, healthy.blocks)

	late.store(late.Drop, 3)
	before := len(late.blocks)
	healthy.must(in.AddWorker(t.Context(), config.Worker{
		Name: "late", Sources: []config.Source{{Connect: late.Endpoint(), Replay: late.ReplayEndpoint()}},
	}))
	late.must(late.WaitSubscribed(harness.Context(t), 1))
	late.store(late.Publish, 1)
	v := vs["late"]
	v.await(t, "the live batch", func() bool { return len(v.blocks) == len(late.blocks)-before })
	v.mu.Lock()
	defer v.mu.Unlock()
	if d := cmp.Diff(map[string]int{"added": 1, "joined_late": 1}, v.reported); d != "" {
		t.Errorf("reported (-want +got):\n%s", d)
	}
}

// Live batches that do not fit into the reorder buffer are requested after the buffered batches.
func TestBatchesBeyondTheReorderBufferAreRequested(t *testing.T) {
	tests := []struct {
		name    string
		batches int
		tokens  int
		most    int64 // limit of the reorder buffer, in bytes
		dropped float64
	}{
		{name: "batches", batches: 10_250, most: 16 << 20, dropped: 250},
		{name: "bytes", batches: 400, tokens: 10_000, most: 16 << 20},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			registry := prometheus.NewRegistry()
			v := newView()
			c := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{ReplayLimit: 20_000}})
			replay := newProxy(t, c.ReplayEndpoint())
			cfg := worker(config.Source{Connect: c.Endpoint(), Replay: replay.Endpoint()})
			cfg.Metrics, cfg.ReplayTimeout = registry, time.Hour
			in, _ := start(t, cfg, v)
			c.must(c.WaitSubscribed(harness.Context(t), 1))
			c.caughtUp(v)
			awaitState(t, in, 0, ingest.SourceLive)
			received := func() float64 { return harness.Gather(t, registry).Sum("kvcast_ingest_messages_total") }
			replay.Partition()
			c.store(c.Drop, 1)
			before := received()
			for i := range tt.batches {
				c.next++
				c.blocks[c.next] = true
				e := blockOfOne(c.next)
				for i := range tt.tokens {
					e.Tokens = append(e.Tokens, uint32(100_000+i)) // 5 bytes each
				}
				c.do(c.Publish, e)
				if (i+1)%250 == 0 { // so many fit into the publisher's queue
					harness.WaitFor(t, func() bool { return received() >= before+float64(i+1) })
				}
			}
			dropped := func() float64 { return harness.Gather(t, registry).Sum("kvcast_ingest_reorder_buffer_dropped_total") }
			if tt.dropped > 0 {
				harness.WaitFor(t, func() bool { return dropped() == tt.dropped })
			} else {
				harness.WaitFor(t, func() bool { return dropped() > 0 })
			}
			if held := ingest.ReorderBytes(in); held > tt.most {
				t.Errorf("%d bytes held back, want %d at most", held, tt.most)
			}
			replay.Heal()
			v.awaitBlocks(t, c.blocks)
			awaitState(t, in, 0, ingest.SourceLive)
			if held := ingest.ReorderBytes(in); held != 0 {
				t.Errorf("%d bytes held back after all", held)
			}
			v.mu.Lock()
			defer v.mu.Unlock()
			if d := cmp.Diff(map[string]int{"added": 1}, v.reported); d != "" {
				t.Errorf("reported (-want +got):\n%s", d)
			}
		})
	}
}

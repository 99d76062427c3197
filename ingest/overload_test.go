package ingest_test

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

// gate is a view whose lane takes no batch before it is opened.
type gate struct {
	*view
	opened chan struct{}
	waits  chan struct{} // closed when a batch waits
}

func newGate() *gate {
	return &gate{view: newView(), opened: make(chan struct{}), waits: make(chan struct{})}
}

func (g *gate) AddWorker(w ingest.Worker) ingest.Lane {
	g.view.AddWorker(w)
	return g
}

func (g *gate) Batch(b *ingest.Batch) {
	select {
	case <-g.waits:
	default:
		close(g.waits)
	}
	<-g.opened
	g.view.Batch(b)
}

// blockOfOne stores a block as cache.store does.
func blockOfOne(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, BlockSize: 1, Tokens: []uint32{uint32(hash)}}
}

// A lane that stands still makes the buffers between it and the engine run full,
// and ZeroMQ drop the rest. Once it moves, all of it is fetched.
func TestWhatALongStallDroppedIsFetched(t *testing.T) {
	t.Parallel()
	const batches = 20_000
	registry := prometheus.NewRegistry()
	g := newGate()
	c := newCache(t, simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		HWM: 100, ReplayLimit: 2 * batches, ReplayHWM: 2 * batches,
	}})
	config := worker(ingest.SourceConfig{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()})
	// What is dropped last shows at the end of a silence, if no later batch shows it.
	config.Metrics, config.Silence = registry, 200*time.Millisecond
	in, _ := start(t, config, g)
	c.must(c.Subscribed(patient(t), 1))
	c.store(c.Publish, 1)
	select {
	case <-g.waits:
	case <-time.After(patience):
		t.Fatal("nothing is read")
	}
	wide := slices.Repeat([]uint64{math.MaxUint64}, 300) // so that the kernel's buffers run full as well
	for range batches {
		c.next++
		c.blocks[c.next] = true
		c.do(c.Publish, blockOfOne(c.next), wire.Event{Kind: wire.KindRemoved, BlockHashes: wide})
	}
	if held := ingest.HeldBytes(in); held > 16<<20 {
		t.Errorf("%d bytes held back", held)
	}
	close(g.opened)
	g.awaitBlocks(t, c.blocks)
	// What was fetched comes live as well, late, and may be held back for a while.
	waitFor(t, func() bool { return ingest.HeldBytes(in) == 0 && in.Sources()[0].State == ingest.SourceLive })
	if n := counterOf(t, registry, "kvcast_ingest_replayed_batches_total"); n == 0 {
		t.Error("nothing was dropped: the buffers were not full")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if d := cmp.Diff(map[string]int{"added": 1}, g.told); d != "" {
		t.Errorf("told (-want +got):\n%s", d)
	}
}

// However many engines have to be asked at once, some are at a time, and all in
// the end.
func TestReplaysTakeTurns(t *testing.T) {
	t.Parallel()
	const engines, batches, most = 32, 100, 8
	vs := make(views)
	var caches []*cache
	config := ingest.Config{ReplayTimeout: 10 * time.Second}
	var proxies []*proxy
	for i := range engines {
		c := newCache(t, simulator.PublisherConfig{})
		c.next = uint64(1000 * i)
		c.store(c.Drop, batches)
		replay := newProxy(t, c.ReplayEndpoint())
		replay.hole()
		proxies = append(proxies, replay)
		caches = append(caches, c)
		name := fmt.Sprint(i)
		vs[name] = newView()
		config.Workers = append(config.Workers, ingest.WorkerConfig{
			Name: name, Sources: []ingest.SourceConfig{{Connect: c.Endpoint(), Replay: replay.Endpoint()}},
		})
	}
	open := func() (n int) {
		for _, p := range proxies {
			alive, _ := p.paths()
			n += alive
		}
		return n
	}
	in, _ := start(t, config, vs)
	for i, c := range caches {
		c.must(c.Subscribed(patient(t), 1))
		c.store(c.Publish, 1) // held back
		awaitState(t, in, i, ingest.SourceCatchingUp)
	}
	waitFor(t, func() bool { return open() == most })
	for _, p := range proxies {
		if n := open(); n > most {
			t.Errorf("%d replays at a time, want %d", n, most)
		}
		p.heal()
	}
	for i, c := range caches {
		v := vs[fmt.Sprint(i)]
		v.awaitBlocks(t, c.blocks)
		v.mu.Lock()
		if d := cmp.Diff(map[string]int{"added": 1}, v.told); d != "" {
			t.Errorf("told of %d (-want +got):\n%s", i, d)
		}
		v.mu.Unlock()
	}
}

// Live batches that there is no room to hold back are fetched when the others have
// been.
func TestWhatCanNotBeHeldIsFetched(t *testing.T) {
	tests := []struct {
		name    string
		batches int
		tokens  int
		most    int64 // bytes held back
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
			replay.hole()
			config := worker(ingest.SourceConfig{Connect: c.Endpoint(), Replay: replay.Endpoint()})
			config.Metrics, config.ReplayTimeout = registry, time.Hour
			in, _ := start(t, config, v)
			c.must(c.Subscribed(patient(t), 1))
			for range tt.batches {
				c.next++
				c.blocks[c.next] = true
				e := store(c.next)
				for i := range tt.tokens {
					e.Tokens = append(e.Tokens, uint32(100_000+i)) // 5 bytes each
				}
				c.do(c.Publish, e)
			}
			dropped := func() float64 { return counterOf(t, registry, "kvcast_ingest_held_dropped_total") }
			if tt.dropped > 0 {
				waitFor(t, func() bool { return dropped() == tt.dropped })
			} else {
				waitFor(t, func() bool { return dropped() > 0 })
			}
			if held := ingest.HeldBytes(in); held > tt.most {
				t.Errorf("%d bytes held back, want %d at most", held, tt.most)
			}
			replay.heal()
			v.awaitBlocks(t, c.blocks)
			awaitState(t, in, 0, ingest.SourceLive)
			if held := ingest.HeldBytes(in); held != 0 {
				t.Errorf("%d bytes held back after all", held)
			}
			v.mu.Lock()
			defer v.mu.Unlock()
			if d := cmp.Diff(map[string]int{"added": 1}, v.told); d != "" {
				t.Errorf("told (-want +got):\n%s", d)
			}
		})
	}
}

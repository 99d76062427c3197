package ingest_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// rememberedBatches is the size of a publisher's history.
const rememberedBatches = 1024

// view is a Sink that keeps the blocks of one worker, as a router does, and whether a loss
// was reported.
type view struct {
	mu      sync.Mutex // guards all below
	changed chan struct{}
	// blocks counts copies: engines store a block more than once.
	blocks map[uint64]int
	told   map[string]int
	// incomplete reports whether a loss was reported.
	incomplete bool
	workers    int
	lastSeq    uint64
}

func newView() *view {
	return &view{changed: make(chan struct{}), blocks: make(map[uint64]int), told: make(map[string]int)}
}

func (v *view) change(what string, f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if what != "" {
		v.told[what]++
	}
	f()
	close(v.changed)
	v.changed = make(chan struct{})
}

func (v *view) AddWorker(feed.Worker) feed.Lane {
	v.change("added", func() { v.workers++ })
	return v
}

func (v *view) RemoveWorker(string, feed.RemoveReason) {
	v.change("removed", func() { v.workers--; clear(v.blocks); v.incomplete = false })
}

func (v *view) Batch(b *feed.Batch) {
	v.change("", func() {
		v.lastSeq = b.Seq
		for _, e := range b.Events {
			for _, h := range e.BlockHashes {
				switch {
				case e.Kind == wire.KindStored:
					v.blocks[h]++
				case v.blocks[h] > 1:
					v.blocks[h]--
				default:
					delete(v.blocks, h)
				}
			}
			if e.Kind == wire.KindCleared {
				clear(v.blocks)
			}
		}
	})
}

func (v *view) Gap(g feed.Gap) {
	v.change(g.Reason.String(), func() {
		v.incomplete = true
		for h := range v.blocks {
			v.blocks[h] = 1 // a lost remove must not pin a block
		}
	})
}

func (v *view) Restarted(feed.Restart) {
	v.change("restarted", func() { clear(v.blocks); v.incomplete = false })
}

// await waits until a condition holds.
func (v *view) await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	limit := time.After(harness.Timeout)
	for {
		v.mu.Lock()
		ok, changed := holds(), v.changed
		v.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-limit:
			v.mu.Lock()
			defer v.mu.Unlock()
			t.Fatalf("%s does not come: %d blocks, told %v", what, len(v.blocks), v.told)
		}
	}
}

// awaitBlocks waits until the view has these blocks.
func (v *view) awaitBlocks(t *testing.T, want map[uint64]bool) {
	t.Helper()
	what := fmt.Sprintf("a view of %d blocks", len(want))
	if len(want) <= 32 {
		what = fmt.Sprintf("a view of %v", slices.Sorted(maps.Keys(want)))
	}
	v.await(t, what, func() bool { return v.is(want) })
}

// is reports whether the view has these blocks. The caller holds its lock.
func (v *view) is(want map[uint64]bool) bool {
	if len(v.blocks) != len(want) {
		return false
	}
	for h := range want {
		if v.blocks[h] == 0 {
			return false
		}
	}
	return true
}

// cache is an engine whose blocks are known.
type cache struct {
	*simulator.Publisher
	t      *testing.T
	blocks map[uint64]bool
	next   uint64 // block, no two of which are equal
	// connects reports whether the engine connects to a listener.
	connects bool
}

func newCache(t *testing.T, c simulator.PublisherConfig) *cache {
	return &cache{Publisher: enginetest.NewSimulated(t, c), t: t, blocks: make(map[uint64]bool)}
}

// store stores some blocks, a batch for each.
func (c *cache) store(how enginetest.Method, n int) {
	c.t.Helper()
	for range n {
		c.next++
		c.blocks[c.next] = true
		c.do(how, blockOfOne(c.next))
	}
}

// evict removes the block stored first.
func (c *cache) evict(how enginetest.Method) {
	c.t.Helper()
	first := slices.Min(slices.Collect(maps.Keys(c.blocks)))
	delete(c.blocks, first)
	c.do(how, enginetest.Removed(first))
}

func (c *cache) do(how enginetest.Method, events ...wire.Event) {
	c.t.Helper()
	if _, err := how(events...); err != nil {
		c.t.Fatal(err)
	}
}

// must fails the test on an error.
func (c *cache) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// caughtUp publishes, and waits until no replay is in progress.
func (c *cache) caughtUp(v *view) {
	c.t.Helper()
	c.store(c.Publish, 1)
	c.must(c.WaitReplays(c.t.Context(), 1))
	c.store(c.Publish, 1) // after what was replayed
	v.awaitBlocks(c.t, c.blocks)
}

// restart restarts the engine.
func (c *cache) restart() { clear(c.blocks) }

func (c *cache) truncated(events ...wire.Event) (uint64, error) { return c.Truncate(7, events...) }

// faults are faults between an engine and ingest. After each the view equals the engine's
// cache, or the loss was reported, and nothing else was.
var faults = []struct {
	name  string
	first uint64 // the seq before which nothing was ever published
	fault func(c *cache, v *view)
	told  map[string]int
	// lost reports whether the view cannot equal the engine's cache again.
	lost bool
	// mute reports whether a replay has to time out. In all others none may.
	mute bool
}{
	{name: "none", fault: func(c *cache, _ *view) { c.store(c.Publish, 10); c.evict(c.Publish) }},
	{name: "live batches dropped", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 3)
		c.store(c.Drop, 2)
		c.evict(c.Drop)
		c.store(c.Publish, 1)
	}},
	{name: "batches lost for good", lost: true, told: map[string]int{"replay_incomplete": 1}, fault: func(c *cache, _ *view) {
		c.store(c.Publish, 3)
		c.store(c.Lose, 2)
		c.store(c.Publish, 1)
	}},
	{name: "a batch twice", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.evict(c.Publish)
		c.must(c.Resend(0))
		c.store(c.Publish, 1)
	}},
	{name: "batches out of order", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 2)
		c.store(c.PublishDelayed, 2)
		c.store(c.Publish, 2)
		c.must(c.SendDelayed())
		c.store(c.Publish, 2)
	}},
	{name: "a batch cut short", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 2)
		c.store(c.truncated, 1)
		c.store(c.Publish, 1)
	}},
	{name: "the last batch cut short", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 2)
		c.store(c.truncated, 1)
	}},
	{name: "restart", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 2)
	}},
	{name: "restart behind the same connection", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.Restart(0))
		c.store(c.Publish, 2)
	}},
	{name: "restart whose first batches were dropped", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 3)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart whose first batches are forgotten", lost: true,
		told: map[string]int{"restarted": 1, "replay_forgotten": 1}, fault: func(c *cache, v *view) {
			c.store(c.Publish, 5)
			v.awaitBlocks(c.t, c.blocks)
			c.restart()
			c.must(c.RestartProcess(0))
			c.store(c.Lose, 3)
			c.must(c.WaitSubscribed(c.t.Context(), 1))
			c.store(c.Publish, 1)
		}},
	{name: "restart at a seq above 0", told: map[string]int{"restarted": 1, "replay_forgotten": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(3))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart that has passed our seq", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 9)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart that goes on where the old one ended", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 3)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart after more batches than are remembered", told: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, rememberedBatches+100)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 100)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		if c.connects { // who binds learns of it with the next batch
			c.store(c.Publish, 1)
		}
	}},
	{name: "restart of an engine that stays idle for a while", told: map[string]int{"possible_restart": 1, "restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		if !c.connects { // who binds can not tell by a connection whose it is
			v.await(c.t, "that it may have restarted", func() bool { return v.told["possible_restart"] > 0 })
		}
		c.store(c.Publish, 1)
	}},
	{name: "replay memory forgotten", told: map[string]int{"replay_forgotten": 1}, lost: true, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.store(c.Drop, 3)
		c.must(c.ClearReplay())
		c.store(c.Publish, 3)
	}},
	{name: "replay with holes, twice", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{Skip: func(seq uint64) bool { return seq == 4 || seq == 7 }, Requests: 2}))
		c.store(c.Drop, 9)
		c.store(c.Publish, 1)
	}},
	{name: "replay with a hole for ever", told: map[string]int{"replay_incomplete": 1}, lost: true, fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{Skip: func(seq uint64) bool { return seq == 4 }}))
		c.store(c.Drop, 9)
		c.store(c.Publish, 1)
	}},
	{name: "replay without an end", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoEnd: true}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "replay that does not answer", told: map[string]int{"replay_unavailable": 1}, lost: true, mute: true, fault: func(c *cache, v *view) {
		c.caughtUp(v)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "replay that does not answer at once", mute: true, fault: func(c *cache, v *view) {
		c.caughtUp(v)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true, Requests: 2}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "silent live stream", fault: func(c *cache, v *view) {
		c.store(c.Publish, 1)
		c.must(c.SetSilent(true))
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks) // by the probe
		c.must(c.SetSilent(false))
		c.store(c.Publish, 1)
	}},
	{name: "connection lost and made again", fault: func(c *cache, v *view) {
		c.store(c.Publish, 2)
		v.awaitBlocks(c.t, c.blocks)
		c.must(c.Disconnect())
		c.store(c.Publish, 3)
		c.evict(c.Publish)
		c.must(c.Reconnect())
		if c.connects { // who binds learns of it with the next batch
			c.must(c.WaitSubscribed(c.t.Context(), 1))
			c.store(c.Publish, 1)
		}
	}},
	{name: "more than a replay's high-water mark dropped", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.store(c.Drop, 5000)
		c.store(c.Publish, 1)
	}},
}

func TestFaults(t *testing.T) {
	for _, mode := range []string{"connect", "bind"} {
		t.Run(mode, func(t *testing.T) {
			for _, tt := range faults {
				t.Run(tt.name, func(t *testing.T) {
					t.Parallel()
					v := newView()
					timeout := harness.Timeout
					if tt.mute {
						timeout = time.Second
					}
					c := faultyCache(t, mode, v, timeout)
					// Batches published before the first connection count as well.
					tt.fault(c, v)
					told := maps.Clone(tt.told)
					if c.connects {
						delete(told, "possible_restart")
					}
					want := maps.Clone(c.blocks)
					if !tt.lost {
						v.awaitBlocks(t, want)
					}
					v.await(t, "what is to be told", func() bool {
						for what := range told {
							if v.told[what] == 0 {
								return false
							}
						}
						return true
					})
					// Nothing else is reported or changes.
					c.store(c.Publish, 1)
					last := c.next
					v.await(t, "the last block", func() bool { return v.blocks[last] > 0 })
					v.mu.Lock()
					defer v.mu.Unlock()
					delete(v.told, "added")
					if told["restarted"] > 0 && told["possible_restart"] == 0 {
						// The engine may be asked before it publishes again.
						delete(v.told, "possible_restart")
					}
					if d := cmp.Diff(told, v.told, cmp.Transformer("empty", func(m map[string]int) map[string]int {
						if m == nil {
							return map[string]int{}
						}
						return m
					})); d != "" {
						t.Errorf("told (-want +got):\n%s", d)
					}
					want[last] = true
					if !tt.lost && !v.is(want) {
						t.Errorf("view %v, want %v", v.blocks, want)
					}
					if lost := v.incomplete; tt.lost && !lost {
						t.Errorf("the view is wrong, and it was not told")
					}
				})
			}
		})
	}
}

// faultyCache returns an engine that is being read into the view.
func faultyCache(t *testing.T, mode string, v *view, timeout time.Duration) *cache {
	t.Helper()
	cfg := config.Config{ReplayTimeout: timeout, Silence: 500 * time.Millisecond, Grace: time.Hour}
	if mode == "connect" {
		c := newCache(t, simulator.PublisherConfig{})
		cfg.Workers = []config.Worker{{Name: "w", Sources: []config.Source{
			{Connect: c.Endpoint(), Replay: c.ReplayEndpoint()},
		}}}
		start(t, cfg, v)
		c.must(c.WaitSubscribed(t.Context(), 1))
		return c
	}
	// The listener needs the replay port.
	port := freePorts(t, 1)
	cfg.Listeners = []config.Listener{{Bind: "tcp://127.0.0.1:*", ReplayPort: port}}
	in, _ := start(t, cfg, v)
	socket := simulator.SocketConfig{
		Endpoint: in.Endpoints()[0], Mode: simulator.ModeConnect, Topic: "kv@127.0.0.1@m",
		Replay: fmt.Sprintf("tcp://127.0.0.1:%d", port),
	}
	c := newCache(t, simulator.PublisherConfig{SocketConfig: socket})
	c.connects = true
	ctx, cancel := context.WithTimeout(t.Context(), harness.Timeout)
	defer cancel()
	c.must(c.WaitSubscribed(ctx, 1))
	return c
}

var seeds = flag.Uint64("faults.seeds", 16, "how many engines TestRandomFaults lets misbehave")

// TestRandomFaults combines faults at random. Once the engines are quiet each view equals the
// engine's cache, or a loss was reported.
func TestRandomFaults(t *testing.T) {
	for seed := range *seeds {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 1))
			plan := simulator.Faults{Seed: seed, Span: 1 + random.Uint64N(20), Delay: 1 + random.Uint64N(6), Rates: make(map[simulator.Fault]float64)}
			for _, f := range simulator.AllFaults() {
				odds := 3
				if f == simulator.FaultLose || f == simulator.FaultClearReplay {
					odds = 12 // after which nearly anything may be missing
				}
				if random.IntN(odds) == 0 {
					plan.Rates[f] = 0.02 * random.Float64()
				}
			}
			e, err := simulator.New(simulator.Config{
				SocketConfig: simulator.SocketConfig{Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*", ReplayLimit: 1 + random.IntN(300)},
				Seed:         seed, Faults: plan, Batches: 1000, Rate: 1000, Subscribers: 1, Linger: true,
				Pool: blockpool.Config{Capacity: 64},
			})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- e.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}()
			v := newView()
			in, stop := start(t, config.Config{
				ReplayTimeout: 100 * time.Millisecond, Silence: 300 * time.Millisecond, Grace: time.Hour,
				Workers: []config.Worker{{Name: "w", Sources: []config.Source{{Connect: e.Endpoint(), Replay: e.ReplayEndpoint()}}}},
			}, v)
			defer stop()
			select {
			case <-e.Finished():
			case <-time.After(harness.Timeout):
				t.Fatalf("the engine does not come to its end: %+v, sources %+v", e.Summary(), in.Sources())
			}
			want := make(map[uint64]bool)
			for h := range e.Snapshot().Blocks {
				want[h] = true
			}
			last := e.Summary().NextSeq - 1
			v.await(t, "the engine's view", func() bool { return v.lastSeq == last && (v.incomplete || v.is(want)) })
			v.mu.Lock()
			defer v.mu.Unlock()
			t.Logf("%v: told %v, incomplete %v", e.Summary().Faults, v.told, v.incomplete)
		})
	}
}

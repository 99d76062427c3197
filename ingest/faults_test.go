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

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// rememberedBatches is the size of a publisher's history.
const rememberedBatches = 1024

// view is a Sink that has the blocks of one worker, as a router does, and whether a loss was
// reported.
type view struct {
	mu      sync.Mutex // guards the fields below
	changed chan struct{}
	// blocks has the number of copies of each block: an engine may store a block more than once.
	blocks   map[uint64]int
	reported map[string]int
	// incomplete reports whether a loss was reported.
	incomplete bool
	workers    int
	lastSeq    uint64
}

func newView() *view {
	return &view{changed: make(chan struct{}), blocks: make(map[uint64]int), reported: make(map[string]int)}
}

func (v *view) change(what string, f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if what != "" {
		v.reported[what]++
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
				v.incomplete = false
			}
		}
	})
}

func (v *view) Gap(g feed.Gap) {
	v.change(g.Reason.String(), func() {
		v.incomplete = true
		for h := range v.blocks {
			v.blocks[h] = 1 // otherwise a lost remove would keep the block for ever
		}
	})
}

func (v *view) Restarted(feed.Restart) {
	v.change("restarted", func() { clear(v.blocks); v.incomplete = false })
}

// await waits until a condition is true.
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
			t.Fatalf("%s does not come: %d blocks, reported %v", what, len(v.blocks), v.reported)
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

// cache is a simulated engine, and the blocks that it has.
type cache struct {
	*simulator.Publisher
	t      *testing.T
	blocks map[uint64]bool
	next   uint64 // hash of the next block
	// connects reports whether the engine connects to a listener.
	connects bool
}

func newCache(t *testing.T, c simulator.PublisherConfig) *cache {
	return &cache{Publisher: enginetest.NewSimulated(t, c), t: t, blocks: make(map[uint64]bool)}
}

// store stores n blocks, each in its own batch.
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
	c.store(c.Publish, 1) // after the replayed batches
	v.awaitBlocks(c.t, c.blocks)
}

// restart restarts the engine.
func (c *cache) restart() { clear(c.blocks) }

func (c *cache) truncated(events ...wire.Event) (uint64, error) { return c.Truncate(7, events...) }

// faults are faults between an engine and ingest. After each fault the view equals the engine's
// cache or the loss was reported, and nothing else was reported.
var faults = []struct {
	name     string
	first    uint64 // first seq of the engine
	fault    func(c *cache, v *view)
	reported map[string]int
	// lost reports whether the view cannot equal the engine's cache again.
	lost bool
	// mute reports whether a replay times out. In the other cases no replay may time out.
	mute bool
}{
	{name: "none", fault: func(c *cache, _ *view) { c.store(c.Publish, 10); c.evict(c.Publish) }},
	{name: "live batches lost", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 3)
		c.store(c.Drop, 2)
		c.evict(c.Drop)
		c.store(c.Publish, 1)
	}},
	{name: "batches lost live and in replays", lost: true, reported: map[string]int{"replay_incomplete": 1}, fault: func(c *cache, _ *view) {
		c.store(c.Publish, 3)
		c.store(c.Lose, 2)
		c.store(c.Publish, 1)
	}},
	{name: "duplicate batch", fault: func(c *cache, _ *view) {
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
	{name: "truncated batch", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 2)
		c.store(c.truncated, 1)
		c.store(c.Publish, 1)
	}},
	{name: "truncated last batch", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 2)
		c.store(c.truncated, 1)
	}},
	{name: "restart", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 2)
	}},
	{name: "restart on the same connection", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.Restart(0))
		c.store(c.Publish, 2)
	}},
	{name: "restart whose first batches were dropped", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 3)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart whose first batches are evicted from the replay buffer", lost: true,
		reported: map[string]int{"restarted": 1, "replay_forgotten": 1}, fault: func(c *cache, v *view) {
			c.store(c.Publish, 5)
			v.awaitBlocks(c.t, c.blocks)
			c.restart()
			c.must(c.RestartProcess(0))
			c.store(c.Lose, 3)
			c.must(c.WaitSubscribed(c.t.Context(), 1))
			c.store(c.Publish, 1)
		}},
	{name: "restart at a seq above 0", reported: map[string]int{"restarted": 1, "replay_forgotten": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 5)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(3))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart that has passed the last seq", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 9)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart that continues the seqs", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 3)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		c.store(c.Publish, 1)
	}},
	{name: "restart after more batches than the history has", reported: map[string]int{"restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, rememberedBatches+100)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.store(c.Drop, 100)
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		if c.connects { // a listener detects the restart only with the next batch
			c.store(c.Publish, 1)
		}
	}},
	{name: "restart of an engine that stays idle for a while", reported: map[string]int{"possible_restart": 1, "restarted": 1}, fault: func(c *cache, v *view) {
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks)
		c.restart()
		c.must(c.RestartProcess(0))
		c.must(c.WaitSubscribed(c.t.Context(), 1))
		if !c.connects { // a listener cannot identify the publisher of a new connection
			v.await(c.t, "that it may have restarted", func() bool { return v.reported["possible_restart"] > 0 })
		}
		c.store(c.Publish, 1)
	}},
	{name: "replay buffer cleared", reported: map[string]int{"replay_forgotten": 1}, lost: true, fault: func(c *cache, v *view) {
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
	{name: "replay with a permanent hole", reported: map[string]int{"replay_incomplete": 1}, lost: true, fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{Skip: func(seq uint64) bool { return seq == 4 }}))
		c.store(c.Drop, 9)
		c.store(c.Publish, 1)
	}},
	{name: "replay without an end marker", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoEnd: true}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "silent replay socket", reported: map[string]int{"replay_unavailable": 1}, lost: true, mute: true, fault: func(c *cache, v *view) {
		c.caughtUp(v)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "slow replay socket", mute: true, fault: func(c *cache, v *view) {
		c.caughtUp(v)
		c.must(c.SetReplayFaults(simulator.ReplayFaults{NoAnswer: true, Requests: 2}))
		c.store(c.Drop, 3)
		c.store(c.Publish, 1)
	}},
	{name: "silent live stream", fault: func(c *cache, v *view) {
		c.store(c.Publish, 1)
		c.must(c.SetSilent(true))
		c.store(c.Publish, 3)
		v.awaitBlocks(c.t, c.blocks) // by the verification of the silent connection
		c.must(c.SetSilent(false))
		c.store(c.Publish, 1)
	}},
	{name: "reconnect", fault: func(c *cache, v *view) {
		c.store(c.Publish, 2)
		v.awaitBlocks(c.t, c.blocks)
		c.must(c.Disconnect())
		c.store(c.Publish, 3)
		c.evict(c.Publish)
		c.must(c.Reconnect())
		if c.connects { // a listener detects the restart only with the next batch
			c.must(c.WaitSubscribed(c.t.Context(), 1))
			c.store(c.Publish, 1)
		}
	}},
	{name: "more batches lost than a replay's high-water mark", fault: func(c *cache, _ *view) {
		c.store(c.Publish, 1)
		c.store(c.Drop, 5000)
		c.store(c.Publish, 1)
	}},
}

func TestFaults(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		t.Parallel()
		for _, mode := range []string{"connect", "bind"} {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				testFaults(t, zmq, mode)
			})
		}
	})
}

func testFaults(t *testing.T, zmq config.ZMQ, mode string) {
	for _, tt := range faults {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := newView()
			timeout := harness.Timeout
			if tt.mute {
				timeout = time.Second
			}
			c := faultyCache(t, zmq, mode, v, timeout)
			// The fault may also affect batches published before the first connection.
			tt.fault(c, v)
			reported := maps.Clone(tt.reported)
			if c.connects {
				delete(reported, "possible_restart")
			}
			want := maps.Clone(c.blocks)
			if !tt.lost {
				v.awaitBlocks(t, want)
			}
			v.await(t, "what is to be reported", func() bool {
				for what := range reported {
					if v.reported[what] == 0 {
						return false
					}
				}
				return true
			})
			// Nothing else is reported, and the blocks do not change.
			c.store(c.Publish, 1)
			last := c.next
			v.await(t, "the last block", func() bool { return v.blocks[last] > 0 })
			v.mu.Lock()
			defer v.mu.Unlock()
			delete(v.reported, "added")
			if reported["restarted"] > 0 && reported["possible_restart"] == 0 {
				// Verification may precede the engine's next batch.
				delete(v.reported, "possible_restart")
			}
			if d := cmp.Diff(reported, v.reported, cmp.Transformer("empty", func(m map[string]int) map[string]int {
				if m == nil {
					return map[string]int{}
				}
				return m
			})); d != "" {
				t.Errorf("reported (-want +got):\n%s", d)
			}
			want[last] = true
			if !tt.lost && !v.is(want) {
				t.Errorf("view %v, want %v", v.blocks, want)
			}
			if lost := v.incomplete; tt.lost && !lost {
				t.Errorf("the view is wrong, and it was not reported")
			}
		})
	}
}

// faultyCache returns an engine, and starts an Ingest that reads it into the view.
func faultyCache(t *testing.T, zmq config.ZMQ, mode string, v *view, timeout time.Duration) *cache {
	t.Helper()
	cfg := config.Config{
		ConnectZMQ: zmq, ListenZMQ: zmq, ReplayTimeout: timeout, Silence: 500 * time.Millisecond, Grace: time.Hour,
	}
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
	port := harness.FreePort(t)
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

// TestRandomFaults combines faults at random, over both transports. After the last fault each view equals the engine's
// cache, or a loss was reported.
func TestRandomFaults(t *testing.T) {
	for seed := range *seeds {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 1))
			plan := simulator.Faults{Seed: seed, Span: 1 + random.Uint64N(20), Delay: 1 + random.Uint64N(6), Rates: make(map[simulator.Fault]float64)}
			for _, f := range simulator.AllFaults() {
				odds := 3
				if f == simulator.FaultLose || f == simulator.FaultClearReplay {
					odds = 12 // a fault after which almost any batch may be missing
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
			zmq := config.ZMQNative
			if seed%2 == 1 && config.ZMQLib.Available() {
				zmq = config.ZMQLib
			}
			in, stop := start(t, config.Config{
				ConnectZMQ:    zmq,
				ReplayTimeout: time.Second, Silence: 300 * time.Millisecond, Grace: time.Hour,
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
			defer func() {
				if t.Failed() {
					t.Logf("last seq %d, sources %+v, engine %+v", last, in.Sources(), e.Summary())
				}
			}()
			v.await(t, "the engine's view", func() bool { return v.lastSeq == last && (v.incomplete || v.is(want)) })
			v.mu.Lock()
			defer v.mu.Unlock()
			t.Logf("%v: reported %v, incomplete %v", e.Summary().Faults, v.reported, v.incomplete)
		})
	}
}

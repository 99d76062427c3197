// Package fleet has what tests of kvcast serve under faults have in common: a Fleet of engines that lose messages, a Server
// that is killed and started again at the same address, and Routers that check each entry and compare their views with the
// engines.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/truth"
)

// Model is the model of all engines.
const Model = "m"

// Fleet is engines that lose messages in transit and restart, and whose replay has every batch.
type Fleet struct {
	// Rate is the rate of each engine that is added, in batches a second, and Faults are the rates of its faults.
	Rate   float64
	Faults map[simulator.Fault]float64
	// Pool is the size of the cache of each engine that is added, in blocks, and Prompts the least length of a prompt; 0: the
	// simulator's default.
	Pool, Prompts int
	// Seed is the seed of the engines and their faults.
	Seed uint64
	// Truth knows what the engines held. It needs the entries that routers receive: see Router.Tell.
	Truth *truth.Checker

	t       *testing.T
	engines []Engine
}

// Engine is the only engine of a worker.
type Engine struct {
	*simulator.Engine
	Worker string
}

// New returns a fleet without engines.
func New(t *testing.T, seed uint64) *Fleet {
	t.Helper()
	return &Fleet{t: t, Rate: 60, Pool: 512, Seed: seed, Truth: truth.New(truthBatches), Faults: map[simulator.Fault]float64{
		simulator.FaultDrop: 0.01, simulator.FaultDuplicate: 0.01, simulator.FaultDelay: 0.01, simulator.FaultTruncate: 0.005,
		simulator.FaultRestartInPlace: 0.0005,
	}}
}

// truthBatches is the number of batches of each engine that answers are compared with.
const truthBatches = 4000

// askInterval is the time between two requests of Ask.
const askInterval = 100 * time.Millisecond

// answerAge is the age beyond which what routers have received must be in an answer that is not degraded: the default of
// cluster.ttl, and a second.
const answerAge = 4 * time.Second

// Ask asks the server at an address for prompts until the test ends, and compares each answer that says EXACT with what the engines
// held at its position. A server may be away.
func (f *Fleet) Ask(addr string) {
	f.t.Helper()
	conn := harness.Dial(f.t, addr)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	prober := truth.Prober{
		Checker: f.Truth, Client: kvcastv1.NewRouterEventServiceClient(conn), Seed: f.Seed, Interval: askInterval,
		Bounds: func() truth.Bounds { return truth.Bounds{MaxAge: answerAge} },
	}
	go func() { ended <- prober.Run(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.t.Errorf("the answers of %s: %v", addr, err)
		}
	})
}

// Bound returns sockets that servers connect to.
func Bound() simulator.SocketConfig {
	return simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"}
}

// Add starts an engine for a number of servers. It ends with the test.
func (f *Fleet) Add(worker string, servers int, sockets simulator.SocketConfig) Engine {
	f.t.Helper()
	i := len(f.engines)
	pool := blockpool.Config{Capacity: f.Pool, HashSeed: f.Seed + uint64(i)}
	pool.Groups, pool.VLLMHashes = truth.GroupsOf(i)
	e, err := simulator.New(simulator.Config{
		SocketConfig: sockets,
		Pool:         pool,
		Observe:      f.Truth.AddEngine(truth.Rank{Worker: worker}, pool),
		Workload:     workload.Config{ResetEvery: 700 + 100*i, MinPrompt: f.Prompts, MaxPrompt: 3 * f.Prompts},
		Seed:         f.Seed + uint64(i), Rate: f.Rate, Subscribers: servers,
		Faults: simulator.Faults{Seed: f.Seed + uint64(i), Rates: f.Faults},
	})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.t.Errorf("%s: %v", worker, err)
		}
	})
	f.engines = append(f.engines, Engine{e, worker})
	return f.engines[i]
}

// Flag returns the value of --worker for a server that connects to the engine.
func (e Engine) Flag() string { return e.FlagAt(e.Endpoint(), e.ReplayEndpoint()) }

// FlagAt returns the value of --worker for a server that connects to the engine at other endpoints, such as those of proxies.
func (e Engine) FlagAt(connect, replay string) string {
	return fmt.Sprintf("name=%s,model=%s,connect=%s,replay=%s", e.Worker, Model, connect, replay)
}

// WantViews pauses the engines, waits until the views of routers equal their contents, and ends the pause.
func (f *Fleet) WantViews(routers ...*Router) {
	f.t.Helper()
	f.PauseAndWantViews(routers...)
	f.Resume()
}

// PauseAndWantViews pauses the engines, and waits until the views of routers equal their contents.
func (f *Fleet) PauseAndWantViews(routers ...*Router) {
	f.t.Helper()
	states := f.Pause()
	for i, r := range routers {
		if err := r.Converge(f.t.Context(), states); err != nil {
			f.t.Errorf("the view of router %d: %v", i, err)
		}
	}
}

// Publish makes each engine publish some batches, and returns what they hold then. They are paused before and after it.
func (f *Fleet) Publish(batches uint64) map[string]client.BlocksDigest {
	f.t.Helper()
	return f.pause(func(ctx context.Context, e Engine) (simulator.Snapshot, error) { return e.Publish(ctx, batches) })
}

// Pause pauses the engines, and returns what they hold.
func (f *Fleet) Pause() map[string]client.BlocksDigest {
	f.t.Helper()
	return f.pause(func(ctx context.Context, e Engine) (simulator.Snapshot, error) { return e.Pause(ctx) })
}

// pause calls a function that pauses an engine for all engines at a time, and returns what they hold.
func (f *Fleet) pause(call func(context.Context, Engine) (simulator.Snapshot, error)) map[string]client.BlocksDigest {
	f.t.Helper()
	ctx := harness.Context(f.t)
	snapshots, errs := make([]simulator.Snapshot, len(f.engines)), make([]error, len(f.engines))
	var wg sync.WaitGroup
	for i, e := range f.engines {
		wg.Go(func() { snapshots[i], errs[i] = call(ctx, e) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		f.t.Fatal(err)
	}
	states := make(map[string]client.BlocksDigest)
	for i, e := range f.engines {
		states[e.Worker] = client.BlocksDigest{Blocks: uint64(len(snapshots[i].Blocks)), XOR: snapshots[i].Digest}
	}
	return states
}

// Resume ends a pause.
func (f *Fleet) Resume() {
	for _, e := range f.engines {
		e.Resume()
	}
}

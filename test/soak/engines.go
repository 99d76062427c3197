package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/truth"
)

// engine is a dp rank of a worker.
type engine struct {
	*simulator.Engine
	worker string
	rank   uint32
	// lossless reports whether the engine's faults leave every batch available for replay.
	lossless bool
	seed     uint64
	pool     blockpool.Config
	ended    chan error
}

// name identifies the engine in logs.
func (e *engine) name() string { return fmt.Sprintf("%s, rank %d, seed %d", e.worker, e.rank, e.seed) }

// Probabilities per batch. Faults that last or close a connection are rarer.
const (
	batchOdds  = 0.002
	engineOdds = 0.0005
)

// faultsOf returns the faults of an engine. A lossless engine has only faults after which every batch remains available
// for replay.
func faultsOf(seed uint64, lossless bool) simulator.Faults {
	f := simulator.Faults{Seed: seed, Rates: make(map[simulator.Fault]float64)}
	for _, fault := range simulator.AllFaults() {
		switch fault {
		case simulator.FaultLose, simulator.FaultClearReplay, simulator.FaultRestartLate, simulator.FaultRestartAhead,
			simulator.FaultPartialReplay, simulator.FaultReplayWithoutEnd, simulator.FaultNoReplay, simulator.FaultUnresponsive,
			simulator.FaultRestartPassed:
			// Four of these may outlast the server's replay retries. The last one may outlast the
			// grace time, so that the worker is added again and has joined late.
			if !lossless {
				f.Rates[fault] = engineOdds
			}
		case simulator.FaultDrop, simulator.FaultDuplicate, simulator.FaultDelay, simulator.FaultTruncate:
			f.Rates[fault] = batchOdds
		default:
			f.Rates[fault] = engineOdds
		}
	}
	return f
}

// fleet contains the engines, and the server flags for reading them.
type fleet struct {
	engines []*engine
	truth   *truth.Checker
	flags   []string
	cancel  context.CancelFunc
}

// truthBatches is the number of batches of each engine that answers are compared with.
const truthBatches = 400

// ranksOf returns the number of ranks of the next worker: every fourth worker has three.
func ranksOf(worker, left int) int {
	if worker%4 == 3 {
		return min(3, left)
	}
	return 1
}

// newFleet starts the engines. The server connects to three of four workers; the fourth connects to
// the server.
func newFleet(ctx context.Context, c config) (_ *fleet, err error) {
	ctx, cancel := context.WithCancel(ctx)
	f := &fleet{truth: truth.New(truthBatches), cancel: cancel}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.stop())
		}
	}()
	listener, err := harness.AllocatePorts(1)
	if err != nil {
		return f, err
	}
	const mostRanks = 3
	replay, err := harness.AllocatePorts(mostRanks)
	if err != nil {
		return f, err
	}
	f.flags = []string{"--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=%d", listener, replay)}
	for w := 0; len(f.engines) < c.engines; w++ {
		ranks := ranksOf(w, c.engines-len(f.engines))
		connects := w%8 == 2 || w%8 == 5 || w%16 == 7
		name, base := fmt.Sprintf("worker-%d", w), 0
		if connects {
			name = fmt.Sprintf("127.0.1.%d", w+1)
		} else if base, err = harness.AllocatePorts(2 * ranks); err != nil {
			return f, err
		}
		for rank := range ranks {
			sockets := simulator.SocketConfig{
				Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base+rank), Mode: simulator.ModeBind,
				Replay: fmt.Sprintf("tcp://127.0.0.1:%d", base+ranks+rank),
			}
			if connects {
				sockets = simulator.SocketConfig{
					Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", listener), Mode: simulator.ModeConnect,
					Topic: "kv@" + name + "@m", Replay: fmt.Sprintf("tcp://%s:%d", name, replay+rank),
				}
			}
			if w%2 == 1 {
				sockets.ReplayForm = simulator.ReplayPlain
			}
			e := engine{worker: name, rank: uint32(rank), lossless: !connects && w%2 == 0}
			e.pool.Groups, e.pool.VLLMHashes = truth.GroupsOf(w) // all ranks of a worker have its model
			if err := f.start(ctx, c, sockets, e); err != nil {
				return f, err
			}
		}
		if !connects {
			f.flags = append(f.flags, "--worker", fmt.Sprintf("name=%s,model=m,dp_size=%d,connect=tcp://127.0.0.1:%d,replay=tcp://127.0.0.1:%d",
				name, ranks, base, base+ranks))
		}
	}
	return f, nil
}

// start adds an engine that waits for a subscriber.
func (f *fleet) start(ctx context.Context, c config, sockets simulator.SocketConfig, e engine) error {
	e.seed = c.seed + uint64(len(f.engines))
	e.pool.Capacity, e.pool.HashSeed = 512, e.seed
	var err error
	e.Engine, err = simulator.New(simulator.Config{
		SocketConfig: sockets,
		BatchConfig:  simulator.BatchConfig{Rank: e.rank},
		Pool:         e.pool,
		Workload:     workload.Config{ResetEvery: 600 + 100*len(f.engines)%700},
		Seed:         e.seed, Faults: faultsOf(e.seed, e.lossless), Rate: c.rate, Subscribers: 1,
		Observe: f.truth.AddEngine(truth.Rank{Worker: e.worker, DPRank: e.rank}, e.pool),
	})
	if err != nil {
		return err
	}
	e.ended = make(chan error, 1)
	f.engines = append(f.engines, &e)
	go func() { e.ended <- e.Run(ctx) }()
	return nil
}

// stop ends all engines.
func (f *fleet) stop() error {
	f.cancel()
	var errs []error
	for _, e := range f.engines {
		errs = append(errs, <-e.ended)
	}
	return errors.Join(errs...)
}

// state is the state of a paused engine.
type state struct {
	*engine
	blocks map[uint64]struct{}
}

// pause pauses all engines, and returns their contents.
func (f *fleet) pause(ctx context.Context, timeout time.Duration) ([]state, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errors.New("the engine reaches no quiet point"))
	defer cancel()
	states, errs := make([]state, len(f.engines)), make([]error, len(f.engines))
	var all sync.WaitGroup
	for i, e := range f.engines {
		all.Go(func() {
			snapshot, err := e.Pause(ctx)
			if err != nil {
				errs[i] = fmt.Errorf("%s: %w", e.name(), err)
			}
			states[i] = state{e, snapshot.Blocks}
		})
	}
	all.Wait()
	return states, errors.Join(errs...)
}

func (f *fleet) resume() {
	for _, e := range f.engines {
		e.Resume()
	}
}

// summary returns the sum of all engines' summaries.
func (f *fleet) summary() (sum simulator.Summary) {
	for _, e := range f.engines {
		sum.Add(e.Summary())
	}
	return sum
}

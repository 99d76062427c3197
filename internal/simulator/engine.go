package simulator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// finishLinger bounds the time for sending the last batches when Run finishes.
	finishLinger = time.Second
	// cancelLinger bounds the time for sending the last batches when the context ends Run.
	cancelLinger = 50 * time.Millisecond
	// maxLag is the delay above which an engine shifts its schedule instead of catching up. This
	// avoids a burst after the machine was suspended.
	maxLag = time.Second
)

// Config configures an Engine. The zero value publishes as fast as possible until its context ends.
type Config struct {
	SocketConfig
	BatchConfig
	Pool     blockpool.Config
	Workload workload.Config
	// Trace are the requests to run instead of the generated workload; nil means none.
	Trace *workload.Trace
	// Speed is the speed of the trace relative to real time; 0 means as fast as possible.
	Speed float64
	// Seed is the seed of the generated workload. Equal seeds produce equal events.
	Seed uint64
	// Faults is the plan of faults.
	Faults Faults
	// Batches is the number of batches to publish; 0 means no limit except the trace's end.
	Batches uint64
	// Rate is the rate of the generated workload, in batches per second; 0 means as fast as possible.
	Rate float64
	// Subscribers is the number of subscriptions to wait for before the first batch. A real engine
	// does not wait.
	Subscribers int
	// Linger makes Run serve replay after the last batch until its context ends.
	Linger bool
	// Observe is called with each change of the cache before any of it is sent, one after the other; nil means not. It must
	// not call the engine.
	Observe func(Change)
}

// Change is a batch, or a restart of the engine, which empties the cache.
type Change struct {
	// Time is the time of the batch, in whole microseconds; zero for a restart.
	Time time.Time
	// Events are the events of the batch; they must not be modified.
	Events []wire.Event
}

// Engine publishes the events of its pool under its workload.
type Engine struct {
	cfg      Config
	feed     *feed
	endpoint string
	replay   string
	snapshot string
	faults   faultState
	finished chan struct{}
	started  atomic.Bool

	// mu is locked while a batch is built and published.
	mu      sync.Mutex
	pool    *blockpool.Pool   // guarded by mu
	load    workload.Workload // guarded by mu
	summary Summary           // guarded by mu
	pause   *pause            // nil unless requested
}

// New returns an Engine with its sockets bound. The caller runs or closes it.
func New(cfg Config) (*Engine, error) {
	e, err := newEngine(cfg)
	if err != nil {
		return nil, fmt.Errorf("new engine: %w", err)
	}
	return e, nil
}

func newEngine(cfg Config) (*Engine, error) {
	pool, err := blockpool.New(cfg.Pool)
	if err != nil {
		return nil, err
	}
	if !(cfg.Rate >= 0) || !(cfg.Speed >= 0) {
		return nil, errors.New("rate and speed must not be negative")
	}
	if cfg.Snapshot != "" && len(cfg.Pool.Groups) > 0 {
		return nil, errors.New("snapshots of a pool with several attention groups are not simulated")
	}
	if cfg.Faults, err = cfg.Faults.withDefaults(); err != nil {
		return nil, err
	}
	var l workload.Workload
	if cfg.Trace != nil {
		l, err = workload.NewTraceRun(cfg.Trace, pool, cfg.Speed)
	} else {
		l, err = workload.NewConversations(cfg.Workload, pool, cfg.Seed, cfg.Rate)
	}
	if err != nil {
		return nil, err
	}
	enc, err := newEncoder(cfg.BatchConfig)
	if err != nil {
		return nil, err
	}
	s, err := openSockets(cfg.SocketConfig)
	if err != nil {
		return nil, err
	}
	return &Engine{
		cfg: cfg, pool: pool, load: l,
		feed:     newFeed(s, enc),
		endpoint: s.endpoint, replay: s.replay, snapshot: s.snapshot,
		faults:   faultState{lastSentLive: true},
		summary:  Summary{NextSeq: cfg.FirstSeq},
		finished: make(chan struct{}),
	}, nil
}

// Endpoint returns the endpoint that the PUB socket is bound to, with its actual port, or connects
// to.
func (e *Engine) Endpoint() string { return e.endpoint }

// ReplayEndpoint returns the endpoint that the ROUTER socket is bound to, with its actual port; it
// is empty without replay.
func (e *Engine) ReplayEndpoint() string { return e.replay }

// SnapshotEndpoint returns the endpoint that the socket for snapshots is bound to, with its actual port; it is empty
// without snapshots.
func (e *Engine) SnapshotEndpoint() string { return e.snapshot }

// Finished is closed when the last batch has been published, or when Run ends earlier.
func (e *Engine) Finished() <-chan struct{} { return e.finished }

// Summary returns the summary at the end of a batch.
func (e *Engine) Summary() Summary {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.summary
	s.Blocks, s.Digest, s.Stats = e.pool.Len(), e.pool.Digest(), e.pool.Stats()
	s.Rejected, s.CutShort = e.load.Lost()
	s.Faults = maps.Clone(s.Faults)
	return s
}

// Close closes the sockets of an engine that has not been run.
func (e *Engine) Close() error {
	if e.started.Swap(true) {
		return errors.New("close engine: Run closes it")
	}
	close(e.finished)
	e.feed.closePorts(0)
	return nil
}

// Run publishes all batches, and then closes the sockets. It waits up to a second for messages in
// flight. When the context ends, which is no error, Run returns within 200 ms, and messages in
// flight may be lost. Run must be called at most once.
//
// Faults end with the last batch: delayed messages are sent, closed sockets are opened, replay is
// answered again, and the last batch is sent live, regardless of its faults. A subscriber therefore
// receives the last batch, and can request all buffered batches.
func (e *Engine) Run(ctx context.Context) error {
	if e.started.Swap(true) {
		return errors.New("run engine: it has been run or closed")
	}
	stop := context.AfterFunc(ctx, e.feed.wake)
	defer stop()
	err := e.publishAll(ctx)
	close(e.finished)
	if e.cfg.Linger {
		e.serveUntil(ctx, func() bool { return err != nil })
	}
	linger := finishLinger
	if ctx.Err() != nil {
		linger = cancelLinger
	}
	e.feed.closePorts(linger)
	if err != nil {
		return fmt.Errorf("run engine: %w", err)
	}
	return nil
}

// publishAll publishes batches until all are published or the context ends.
func (e *Engine) publishAll(ctx context.Context) error {
	e.serveUntil(ctx, e.subscribed)
	start := time.Now()
	for e.cfg.Batches == 0 || e.summary.Batches < e.cfg.Batches {
		at, more := e.load.Due()
		if !more {
			break
		}
		due := start.Add(at)
		if lag := time.Since(due); lag > maxLag {
			start = start.Add(lag)
		}
		if !e.await(ctx, due) {
			return nil
		}
		if err := e.step(); err != nil {
			return err
		}
	}
	return e.endFaults(ctx)
}

// subscribed reports whether there are at least Config.Subscribers subscriptions.
func (e *Engine) subscribed() bool { return e.feed.counters.subscriptions() >= e.cfg.Subscribers }

// await serves the sockets until the next batch is due, and at least once: like vLLM's publisher,
// which polls its replay socket before each batch. No batch is due while the engine is paused. It
// reports false if the context has ended.
func (e *Engine) await(ctx context.Context, due time.Time) bool {
	for {
		e.serveWhilePaused(ctx)
		e.feed.serve(max(0, time.Until(due)))
		if ctx.Err() != nil || !time.Now().Before(due) {
			return ctx.Err() == nil
		}
	}
}

// serveUntil serves the sockets until enough returns true or the context ends.
func (e *Engine) serveUntil(ctx context.Context, enough func() bool) {
	for !enough() && ctx.Err() == nil {
		e.feed.serve(-1)
	}
}

// step runs a step of the workload, with the faults of its batch.
func (e *Engine) step() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.applyFaults(); err != nil {
		return err
	}
	events := e.load.Step()
	if len(events) == 0 {
		return nil
	}
	err := e.deliver(events)
	e.summary.count(events)
	return err
}

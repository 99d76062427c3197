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
)

const (
	// finishLinger bounds the time that the last batches may take to go out when
	// Run ends by itself.
	finishLinger = time.Second
	// cancelLinger bounds it when the context ends Run.
	cancelLinger = 50 * time.Millisecond
	// maxLag is how far an engine may be behind its time before it gives up on the
	// rest: a machine that slept is not to be followed by a burst.
	maxLag = time.Second
)

// Config is an engine. The zero value publishes as fast as it can until its context
// ends.
type Config struct {
	SocketConfig
	BatchConfig
	Pool     blockpool.Config
	Workload workload.Config
	// Trace are the requests to run, in the place of the workload; nil means none.
	Trace *workload.Trace
	// Speed is how much faster than the trace's the time goes; 0 means as fast as
	// possible.
	Speed float64
	// Seed chooses the workload; the same seed gives the same events.
	Seed uint64
	// Faults is what goes wrong.
	Faults Faults
	// Batches is the number to publish; 0 means no end but the trace's.
	Batches uint64
	// Rate is in batches a second, of the workload; 0 means as fast as possible.
	Rate float64
	// Subscribers is the number of subscriptions to wait for before the first
	// batch. A real engine does not wait.
	Subscribers int
	// Linger makes Run serve replay after the last batch until its context ends.
	Linger bool
}

// Engine publishes what its pool does under its workload.
type Engine struct {
	cfg      Config
	feed     *feed
	endpoint string
	replay   string
	faults   faultState
	finished chan struct{}
	started  atomic.Bool

	// mu is held while a batch is made and published: who else holds it is between
	// two batches.
	mu      sync.Mutex
	pool    *blockpool.Pool   // guarded by mu
	load    workload.Workload // guarded by mu
	summary Summary           // guarded by mu
	pause   *pause            // guarded by mu; nil where none is asked for
}

// New returns an Engine with its sockets bound. It must be run or closed.
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
		feed:     &feed{sockets: s, encoder: enc, next: cfg.FirstSeq},
		endpoint: s.endpoint, replay: s.replay,
		faults:   faultState{lastSent: true},
		summary:  Summary{NextSeq: cfg.FirstSeq},
		finished: make(chan struct{}),
	}, nil
}

// Endpoint returns where the PUB socket is bound, with its real port, or connects to.
func (e *Engine) Endpoint() string { return e.endpoint }

// ReplayEndpoint returns where the ROUTER socket is bound, with its real port; empty
// where there is none.
func (e *Engine) ReplayEndpoint() string { return e.replay }

// Finished is closed when the last batch has been published, or when Run ends before.
func (e *Engine) Finished() <-chan struct{} { return e.finished }

// Summary returns what the engine has done so far, as of the end of a batch.
func (e *Engine) Summary() Summary {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.summary
	s.Blocks, s.Digest, s.Stats = e.pool.Len(), e.pool.Digest(), e.pool.Stats()
	s.Refused, s.Cut = e.load.Lost()
	s.Faults = maps.Clone(s.Faults)
	return s
}

// Blocks returns the block hashes that the pool holds, as of the end of a batch.
func (e *Engine) Blocks() map[uint64]struct{} { return e.Snapshot().Blocks }

// Close closes the sockets of an engine that has not been run.
func (e *Engine) Close() error {
	if e.started.Swap(true) {
		return errors.New("close engine: Run closes it")
	}
	close(e.finished)
	return e.feed.close(0)
}

// Run publishes until all batches are out, then closes the sockets; what is on its
// way to a subscriber has a second. When the context ends, which is no error, Run
// returns within 200 ms, and what is on its way may be lost. Run is for once.
//
// Faults end with the last batch: what is held back goes out, sockets that are
// closed open, replay is answered again, and the last batch goes out live, whatever
// was to become of it. So whoever asks for replay can have all that the engine
// remembers, and knows that there is something to ask for.
func (e *Engine) Run(ctx context.Context) error {
	if e.started.Swap(true) {
		return errors.New("run engine: it has been run or closed")
	}
	stop := context.AfterFunc(ctx, e.feed.wakeup.wake)
	defer stop()
	err := e.publishAll(ctx)
	close(e.finished)
	if e.cfg.Linger {
		err = errors.Join(err, e.serveUntil(ctx, func() bool { return err != nil }))
	}
	linger := finishLinger
	if ctx.Err() != nil {
		linger = cancelLinger
	}
	if err := errors.Join(err, e.feed.close(linger)); err != nil {
		return fmt.Errorf("run engine: %w", err)
	}
	return nil
}

// publishAll returns when all batches are out, or the context ends.
func (e *Engine) publishAll(ctx context.Context) error {
	if err := e.serveUntil(ctx, e.subscribed); err != nil {
		return err
	}
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
		if err := e.await(ctx, due); err != nil || ctx.Err() != nil {
			return err
		}
		if err := e.step(); err != nil {
			return err
		}
	}
	return e.endFaults(ctx)
}

// subscribed reports whether there are as many subscriptions as configured.
func (e *Engine) subscribed() bool { return e.feed.counters.subscriptions() >= e.cfg.Subscribers }

// await serves the sockets until it is time, and at least once: like vLLM's
// publisher, which looks at its replay socket before each batch. While the engine is
// paused it is not time.
func (e *Engine) await(ctx context.Context, due time.Time) error {
	for {
		if err := e.serveWhilePaused(ctx); err != nil {
			return err
		}
		// Polls are of whole milliseconds: the last fraction is slept.
		wait := time.Until(due)
		if err := e.feed.serve(max(0, wait)); err != nil || ctx.Err() != nil {
			return err
		}
		wait = time.Until(due)
		if wait < time.Millisecond {
			time.Sleep(wait)
			return nil
		}
	}
}

// serveUntil serves the sockets until enough holds or the context ends.
func (e *Engine) serveUntil(ctx context.Context, enough func() bool) error {
	for !enough() && ctx.Err() == nil {
		if err := e.feed.serve(-1); err != nil {
			return err
		}
	}
	return nil
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

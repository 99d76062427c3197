package simulator

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

const (
	// finishLinger bounds the time that the last batches may take to go out when
	// Run ends by itself.
	finishLinger = time.Second
	// cancelLinger bounds it when the context ends Run.
	cancelLinger = 50 * time.Millisecond
	// maxLag is how far an engine may be behind its rate before it gives up on the
	// rest: a machine that slept is not to be followed by a burst.
	maxLag = time.Second
)

// Config is an engine. The zero value publishes as fast as it can until its context
// ends.
type Config struct {
	SocketConfig
	BatchConfig
	Pool     PoolConfig
	Workload WorkloadConfig
	// Seed chooses the workload; the same seed gives the same events.
	Seed uint64
	// Batches is the number to publish; 0 means no end.
	Batches uint64
	// Rate is in batches a second; 0 means as fast as possible.
	Rate float64
	// Subscribers is the number of subscriptions to wait for before the first
	// batch. A real engine does not wait.
	Subscribers int
	// Linger makes Run serve replay after the last batch until its context ends.
	Linger bool
}

// Summary is what an engine has done, and what it holds.
type Summary struct {
	// Batches and Events were published.
	Batches, Events uint64
	// Stored and Removed are blocks that they named.
	Stored, Removed uint64
	// Cleared is the number of resets.
	Cleared uint64
	// Blocks is the number of distinct block hashes that the pool holds.
	Blocks int
	// Digest is the XOR of splitmix64 over them.
	Digest uint64
	// NextSeq is the seq that the next batch would have.
	NextSeq uint64
}

// Engine publishes what its pool does under its workload.
type Engine struct {
	cfg      Config
	sockets  *sockets
	pool     *Pool
	workload *Workload
	encoder  encoder
	summary  Summary
	finished chan struct{}
	started  atomic.Bool
}

// New returns an Engine with its sockets bound. It must be run or closed.
func New(cfg Config) (*Engine, error) {
	pool, err := NewPool(cfg.Pool)
	if err != nil {
		return nil, fmt.Errorf("new engine: %w", err)
	}
	workload, err := NewWorkload(cfg.Workload, pool, cfg.Seed)
	if err != nil {
		return nil, fmt.Errorf("new engine: %w", err)
	}
	if cfg.Rate < 0 {
		return nil, errors.New("new engine: rate must not be negative")
	}
	s, err := openSockets(cfg.SocketConfig)
	if err != nil {
		return nil, fmt.Errorf("new engine: %w", err)
	}
	return &Engine{
		cfg: cfg, sockets: s, pool: pool, workload: workload,
		encoder:  newEncoder(cfg.BatchConfig),
		summary:  Summary{NextSeq: cfg.FirstSeq},
		finished: make(chan struct{}),
	}, nil
}

// Endpoint returns where the PUB socket is bound, with its real port, or connects to.
func (e *Engine) Endpoint() string { return e.sockets.endpoint }

// ReplayEndpoint returns where the ROUTER socket is bound, with its real port; empty
// where there is none.
func (e *Engine) ReplayEndpoint() string { return e.sockets.replay }

// Finished is closed when the last batch has been published, or when Run ends before.
func (e *Engine) Finished() <-chan struct{} { return e.finished }

// Summary returns what the engine has done. It is for after Finished.
func (e *Engine) Summary() Summary { return e.summary }

// Blocks returns the block hashes that the pool holds. It is for after Finished.
func (e *Engine) Blocks() map[uint64]struct{} { return e.pool.Blocks() }

// Close closes the sockets of an engine that has not been run.
func (e *Engine) Close() error {
	if e.started.Swap(true) {
		return errors.New("close engine: Run closes it")
	}
	close(e.finished)
	return e.sockets.close(0)
}

// Run publishes until all batches are out, then closes the sockets; what is on its
// way to a subscriber has a second. When the context ends, which is no error, Run
// returns within 200 ms, and what is on its way may be lost. Run is for once.
func (e *Engine) Run(ctx context.Context) error {
	if e.started.Swap(true) {
		return errors.New("run engine: it has been run or closed")
	}
	stop := context.AfterFunc(ctx, e.sockets.waker.wake)
	defer stop()
	err := e.publishAll(ctx)
	e.summary.Blocks, e.summary.Digest = e.pool.Len(), e.pool.Digest()
	close(e.finished)
	if e.cfg.Linger {
		err = errors.Join(err, e.serveUntil(ctx, func() bool { return err != nil }))
	}
	linger := finishLinger
	if ctx.Err() != nil {
		linger = cancelLinger
	}
	if err := errors.Join(err, e.sockets.close(linger)); err != nil {
		return fmt.Errorf("run engine: %w", err)
	}
	return nil
}

// publishAll returns when all batches are out, or the context ends.
func (e *Engine) publishAll(ctx context.Context) error {
	err := e.serveUntil(ctx, func() bool {
		subscriptions, _, _ := e.sockets.tally.counts()
		return subscriptions >= e.cfg.Subscribers
	})
	if err != nil {
		return err
	}
	due := time.Now()
	for e.cfg.Batches == 0 || e.summary.Batches < e.cfg.Batches {
		if err := e.pause(ctx, due); err != nil || ctx.Err() != nil {
			return err
		}
		if err := e.publish(e.workload.Step()); err != nil {
			return err
		}
		if e.cfg.Rate > 0 {
			due = due.Add(time.Duration(float64(time.Second) / e.cfg.Rate))
			if lag := time.Since(due); lag > maxLag {
				due = due.Add(lag)
			}
		}
	}
	return nil
}

// pause serves the sockets until it is time, and at least once: like vLLM's
// publisher, which looks at its replay socket before each batch.
func (e *Engine) pause(ctx context.Context, due time.Time) error {
	for {
		// Polls are of whole milliseconds: the last fraction is slept.
		wait := time.Until(due)
		if err := e.sockets.serve(max(0, wait)); err != nil || ctx.Err() != nil {
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
		if err := e.sockets.serve(-1); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) publish(events []wire.Event) error {
	seq, payload := e.summary.NextSeq, e.encoder.encode(events)
	if e.sockets.router != nil {
		e.sockets.memory.add(seq, payload)
	}
	if err := e.sockets.publish(seq, payload); err != nil {
		return err
	}
	s := &e.summary
	s.NextSeq++
	s.Batches++
	s.Events += uint64(len(events))
	for i := range events {
		switch n := uint64(len(events[i].BlockHashes)); events[i].Kind {
		case wire.KindStored:
			s.Stored += n
		case wire.KindRemoved:
			s.Removed += n
		case wire.KindCleared:
			s.Cleared++
		}
	}
	return nil
}

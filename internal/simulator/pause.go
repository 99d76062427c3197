package simulator

import (
	"context"
	"fmt"
)

// Snapshot is the state of an engine between two batches.
type Snapshot struct {
	// NextSeq is the seq of the next batch, and Batches the number of batches so far, across
	// restarts.
	NextSeq, Batches uint64
	// Blocks are the block hashes in the pool.
	Blocks map[uint64]struct{}
	// Digest is the XOR of splitmix64 over the hashes.
	Digest uint64
}

// pause is a pause of an engine, requested or in effect.
type pause struct{ reached chan struct{} }

// Snapshot returns the state of the engine at the end of a batch. It may be called at any time.
func (e *Engine) Snapshot() Snapshot {
	e.mu.Lock()
	defer e.mu.Unlock()
	return Snapshot{
		NextSeq: e.summary.NextSeq, Batches: e.summary.Batches,
		Blocks: e.pool.Blocks(), Digest: e.pool.Digest(),
	}
}

// Pause stops the engine at the next quiet point, and returns its state there. Resume continues.
// The sockets, replay included, are served all the time.
//
// A quiet point follows a batch that was sent live, whole, and to as many subscriptions as
// Config.Subscribers requires, when no batch is delayed, the sockets are open, and neither they nor
// replay have a fault. A subscriber then knows of every batch up to NextSeq, and can request those
// that it lacks. Faults occur as they would without the pause. If there is never a quiet point,
// Pause waits until its context ends, returns the context's error, and withdraws the request. An
// engine that has finished is quiet.
func (e *Engine) Pause(ctx context.Context) (Snapshot, error) {
	e.mu.Lock()
	if e.pause == nil {
		e.pause = &pause{make(chan struct{})}
	}
	reached := e.pause.reached
	e.mu.Unlock()
	e.feed.wakeup.wake()
	select {
	case <-reached:
	case <-e.finished:
	case <-ctx.Done():
		e.Resume()
		return Snapshot{}, fmt.Errorf("pause engine: %w", context.Cause(ctx))
	}
	return e.Snapshot(), nil
}

// Resume ends a pause.
func (e *Engine) Resume() {
	e.mu.Lock()
	e.pause = nil
	e.mu.Unlock()
	e.feed.wakeup.wake()
}

// serveWhilePaused serves the sockets while the engine is paused and quiet.
func (e *Engine) serveWhilePaused(ctx context.Context) error {
	var told *pause
	for ctx.Err() == nil {
		e.mu.Lock()
		asked := e.pause
		e.mu.Unlock()
		if asked == nil || !e.quiet() {
			return nil
		}
		if asked != told {
			close(asked.reached)
			told = asked
		}
		if err := e.feed.serve(-1); err != nil {
			return err
		}
	}
	return nil
}

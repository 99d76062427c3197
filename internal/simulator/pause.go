package simulator

import (
	"context"
	"fmt"
)

// Snapshot is the state of an engine between two batches.
type Snapshot struct {
	// NextSeq is the seq of the next batch. Batches is the number of batches so far, across
	// restarts.
	NextSeq, Batches uint64
	// Blocks are the block hashes in the pool.
	Blocks map[uint64]struct{}
	// Digest is the XOR of splitmix64 over the hashes.
	Digest uint64
}

// pause is a requested pause.
type pause struct {
	from    uint64        // number of batches before which the engine does not pause
	reached chan struct{} // closed when the engine is paused
}

// Snapshot returns the state of the engine at the end of a batch. It is safe for concurrent use.
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
// The engine is at a quiet point if its last batch was sent live, whole, and to at least
// Config.Subscribers subscriptions, no batch is delayed, the sockets are open, and neither live
// messages nor replay have a fault. A subscriber then knows that batches up to NextSeq exist, and
// can request the batches that it lacks. The pause does not change the faults. If the engine
// reaches no quiet point, Pause returns the error of its context, and the pause does not take
// effect later. An engine that has finished is at a quiet point.
func (e *Engine) Pause(ctx context.Context) (Snapshot, error) {
	e.mu.Lock()
	if e.pause == nil {
		e.pause = &pause{reached: make(chan struct{})}
	}
	reached := e.pause.reached
	e.mu.Unlock()
	return e.paused(ctx, reached)
}

// Publish ends a pause, and pauses again at the next quiet point after some batches, as Pause does.
func (e *Engine) Publish(ctx context.Context, batches uint64) (Snapshot, error) {
	reached := make(chan struct{})
	e.mu.Lock()
	e.pause = &pause{e.summary.Batches + batches, reached}
	e.mu.Unlock()
	return e.paused(ctx, reached)
}

// paused waits for a pause that was requested.
func (e *Engine) paused(ctx context.Context, reached <-chan struct{}) (Snapshot, error) {
	e.feed.wake()
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
	e.feed.wake()
}

// serveWhilePaused serves the sockets while the engine is paused and quiet.
func (e *Engine) serveWhilePaused(ctx context.Context) {
	var reached *pause
	for ctx.Err() == nil {
		e.mu.Lock()
		requested, batches := e.pause, e.summary.Batches
		e.mu.Unlock()
		if requested == nil || batches < requested.from || !e.isQuiet() {
			return
		}
		if requested != reached {
			close(requested.reached)
			reached = requested
		}
		e.feed.serve(-1)
	}
}

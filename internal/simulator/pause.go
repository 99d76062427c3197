package simulator

import (
	"context"
	"fmt"
)

// Snapshot is what an engine holds between two batches.
type Snapshot struct {
	// NextSeq is the seq of the batch that comes next, and Batches how many there
	// were before, over restarts.
	NextSeq, Batches uint64
	// Blocks are the block hashes that the pool holds.
	Blocks map[uint64]struct{}
	// Digest is the XOR of splitmix64 over them.
	Digest uint64
}

// pause is an engine's standing still, asked for or reached.
type pause struct{ reached chan struct{} }

// Snapshot returns what the engine holds, as of the end of a batch. It may be called
// at any time.
func (e *Engine) Snapshot() Snapshot {
	e.mu.Lock()
	defer e.mu.Unlock()
	return Snapshot{
		NextSeq: e.summary.NextSeq, Batches: e.summary.Batches,
		Blocks: e.pool.Blocks(), Digest: e.pool.Digest(),
	}
}

// Pause lets the engine stand still at the next quiet point, and returns what it
// holds there. It goes on with Resume. The sockets, replay included, are served all
// the while.
//
// A quiet point comes after a batch that went out live, whole, and to as many
// subscriptions as Config.Subscribers says, when none is held back, the sockets are
// open and neither they nor replay are under a fault: a subscriber then knows of
// every batch up to NextSeq, and can ask for those it has not. Faults strike as
// they would have without the pause, so where they always do Pause waits until its
// context ends, which is its error, and withdraws it. An engine that has finished
// stands still.
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

// serveWhilePaused serves the sockets for as long as the engine is paused and quiet.
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

package server_test

import (
	"context"
	"iter"
	"sync/atomic"
	"testing"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// lent counts the buffers of cuts in use.
type lent struct{ given, back atomic.Int64 }

// gate blocks its callers while it is closed.
type gate struct {
	closed atomic.Pointer[chan struct{}] // nil: open
	inside atomic.Int64                  // blocked callers
}

// close closes the gate and returns the function that opens it.
func (g *gate) close() (open func()) {
	c := make(chan struct{})
	g.closed.Store(&c)
	return func() {
		g.closed.Store(nil)
		close(c)
	}
}

func (g *gate) pass() {
	if c := g.closed.Load(); c != nil {
		g.inside.Add(1)
		<-*c
		g.inside.Add(-1)
	}
}

// countedState is a pipeline that counts the buffers of cuts, and whose queries pass a gate.
type countedState struct {
	*pipeline.Pipeline
	lent    *lent
	queries *gate
}

func (s countedState) Lookup(ctx context.Context, q pipeline.Query) ([]*kvcastv1.BlockHolder, error) {
	s.queries.pass()
	return s.Pipeline.Lookup(ctx, q)
}

func (s countedState) Status(match func(worker, model string) bool) []*kvcastv1.WorkerStatus {
	s.queries.pass()
	return s.Pipeline.Status(match)
}

func (s countedState) Snapshot(ctx context.Context, worker string, tiers journal.Tiers) (pipeline.Snapshot, bool, error) {
	c, ok, err := s.Pipeline.Snapshot(ctx, worker, tiers)
	blocks, reuse := c.Blocks, c.Reuse
	c.Blocks = iter.Seq2[[]byte, error](func(yield func([]byte, error) bool) {
		blocks(func(piece []byte, err error) bool {
			if piece != nil {
				s.lent.given.Add(1)
			}
			return yield(piece, err)
		})
	})
	c.Reuse = func(piece []byte) {
		s.lent.back.Add(1)
		reuse(piece)
	}
	return c, ok, err
}

// TestSnapshotMemoryIsRecycled reads snapshots to their end, when gRPC does not reference their
// memory any more.
func TestSnapshotMemoryIsRecycled(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.fill(20_000)
	for range 3 {
		s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
		s.untilMessage(t, isSnapshotEnd)
		if given, back := h.lent.given.Load(), h.lent.back.Load(); given == 0 || back != given {
			t.Errorf("%d pieces were sent, and the memory of %d is back", given, back)
		}
	}
}

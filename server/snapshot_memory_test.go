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

// bufferCount counts the buffers that snapshots have passed to the server, and those that it has returned.
type bufferCount struct{ taken, returned atomic.Int64 }

// gate blocks the callers of pass while it is closed.
type gate struct {
	closed atomic.Pointer[chan struct{}] // nil: open
	inside atomic.Int64                  // number of blocked callers
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

// countedState is a pipeline that counts the buffers of snapshots, and whose queries wait for a gate.
type countedState struct {
	*pipeline.Pipeline
	buffers *bufferCount
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
				s.buffers.taken.Add(1)
			}
			return yield(piece, err)
		})
	})
	c.Reuse = func(piece []byte) {
		s.buffers.returned.Add(1)
		reuse(piece)
	}
	return c, ok, err
}

// TestSnapshotMemoryIsRecycled reads snapshots to their end. gRPC then does not reference their memory any more.
func TestSnapshotMemoryIsRecycled(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.fill(20_000)
	for range 3 {
		s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
		s.untilMessage(t, isSnapshotEnd)
		if taken, returned := h.buffers.taken.Load(), h.buffers.returned.Load(); taken == 0 || returned != taken {
			t.Errorf("%d buffers were taken, %d returned", taken, returned)
		}
	}
}

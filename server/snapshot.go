package server

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// State is the workers' state that follows from the journal's entries.
type State interface {
	// Workers returns the names of the workers that match, ascending.
	Workers(match func(worker, model string) bool) []string
	// Cut starts to read a worker's blocks; ok is false if the worker does not exist.
	// The cut includes the worker's entries up to the journal's newest at the call.
	Snapshot(ctx context.Context, worker string, tiers journal.Tiers) (c pipeline.Snapshot, ok bool, err error)
	// Digests returns the digests of the workers that match, grouped by worker, each
	// with the seq of the worker's last entry.
	Digests(ctx context.Context, match func(worker, model string) bool, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, error)
	// Status returns the workers that match.
	Status(match func(worker, model string) bool) []*kvcastv1.WorkerStatus
	// Lookup returns the holders of blocks.
	Lookup(ctx context.Context, q pipeline.Query) ([]*kvcastv1.BlockHolder, error)
}

// snapshotAttempts is how often a snapshot is started if the journal evicts the entries
// since its start before the client has read it.
const snapshotAttempts = 3

// Snapshot implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Snapshot(req *kvcastv1.SnapshotRequest, stream kvcastv1.RouterEventService_SnapshotServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	b := s.journal.Bounds()
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return err
	}
	defer filter.release()
	c := newCursor(s.Server, stream, b.Epoch, 0, filter)
	return c.run(c.snapshot)
}

// acquireSnapshot waits for a snapshot slot. It sends a heartbeat now and then, since
// clients give up streams that are silent for long.
func (c *cursor) acquireSnapshot(ctx context.Context) error {
	s := c.server
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	acquired := make(chan error, 1)
	go func() { acquired <- s.snapshots.acquire(ctx) }()
	heartbeat := time.NewTicker(c.progressDelay())
	defer heartbeat.Stop()
	draining := s.draining
	for {
		select {
		case err := <-acquired:
			if why, ok := s.snapshots.refusal(err); ok {
				return errorf(ReasonTooManySnapshots, s.journal.Bounds(),
					"%d snapshots are being sent, which is the limit, and %s; try again later, or resume after a position", s.cfg.MaxSnapshots, why)
			}
			return err
		case <-heartbeat.C:
			send := c.sendHeartbeat
			if c.out.chained { // the stream has followed entries, and is still at its position
				send = func() error { return c.sendProgress(nil) }
			}
			if err := send(); err != nil {
				cancel(err)
			}
		case <-draining:
			cancel(shuttingDown(s.journal.Bounds()))
			draining = nil
		}
	}
}

// snapshot sends the workers' state and moves the cursor to its end:
//
//  1. Each worker's blocks are read separately, while entries are appended. All of them include the entries up
//     to some seq of that worker.
//  2. Then come the worker's entries after its seq, and all entries of workers that were added since, up to a
//     common seq. Blocks may include entries after their seq: applying an event twice changes nothing.
func (c *cursor) snapshot(ctx context.Context) error {
	if c.subscription != nil {
		c.subscription.inSnapshot.Store(true)
		defer c.subscription.inSnapshot.Store(false)
	}
	if err := c.acquireSnapshot(ctx); err != nil {
		return err
	}
	defer c.server.snapshots.release()
	c.out.pace = &snapshotPace{stallTimeout: c.server.cfg.StallTimeout}
	defer func() { c.out.pace = nil }()
	var end uint64
	err := journal.ErrCompacted
	for attempt := 0; attempt < snapshotAttempts && errors.Is(err, journal.ErrCompacted); attempt++ {
		end, err = c.sendState(ctx)
	}
	switch {
	case errors.Is(err, journal.ErrCompacted):
		return errorf(ReasonSlowSubscriber, c.server.journal.Bounds(),
			"the snapshot was read so slowly that the entries since its start are no longer retained; read faster, or let the server retain more (--journal-max-bytes)")
	case errors.Is(err, errSlowPace):
		c.server.metrics.stalled.Inc()
		return errorf(ReasonSlowSubscriber, c.server.journal.Bounds(),
			"the snapshot was read at less than %d MiB in %v, while others may be waiting; read faster", paceBytes>>20, c.server.cfg.StallTimeout)
	case err != nil:
		return err
	}
	c.seq = end
	c.out.chained = false
	return c.out.message(&kvcastv1.SubscribeResponse{SnapshotEnd: &kvcastv1.SnapshotEnd{
		Position: &kvcastv1.Position{Epoch: c.out.epoch, Seq: end},
	}}, end)
}

// sendState sends a snapshot without its SnapshotEnd, whose seq it returns.
func (c *cursor) sendState(ctx context.Context) (end uint64, err error) {
	begin := c.server.journal.Bounds().Newest
	err = c.out.messageWithin(&kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: c.out.epoch}})
	if err != nil {
		return 0, err
	}
	included := make(map[string]uint64) // by worker, the seq that its blocks include
	for _, name := range c.server.state.Workers(c.filter.worker) {
		cut, ok, err := c.server.state.Snapshot(ctx, name, c.filter.tierSet())
		if err != nil {
			return 0, err
		}
		if !ok || !c.filter.worker(name, cut.Worker.GetAdded().GetModel()) {
			continue // an entry since begin removed or replaced it
		}
		if err := c.sendCut(cut); err != nil {
			return 0, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		// cut.Seq may be old and evicted. The worker has no entry from there to begin.
		included[name] = max(cut.Seq, begin)
	}
	end = c.server.journal.Bounds().Newest
	return end, c.sendEntriesSince(ctx, begin, end, included)
}

func (c *cursor) sendCut(cut pipeline.Snapshot) error {
	err := c.out.messageWithin(&kvcastv1.SubscribeResponse{SnapshotWorker: cut.Worker})
	if err != nil {
		return err
	}
	lastSend := time.Now()
	for blocks, err := range cut.Blocks {
		if err != nil {
			return err
		}
		switch {
		case len(blocks) > 0:
			err = c.out.blocks(blocks, cut.Reuse)
		case time.Since(lastSend) >= c.progressDelay():
			err = c.sendHeartbeat()
		default:
			continue // the cut is waiting for the worker
		}
		if err != nil {
			return err
		}
		lastSend = time.Now()
	}
	return nil
}

// sendEntriesSince sends the entries from a snapshot's begin to its end that its blocks do not include.
func (c *cursor) sendEntriesSince(ctx context.Context, begin, end uint64, included map[string]uint64) error {
	filter := func(seq uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
		if seq <= included[s.Worker] {
			return journal.MatchNone
		}
		if c.filter == nil {
			return journal.MatchAll
		}
		return c.filter.match(seq, s, tiers)
	}
	for after := begin; after < end; {
		chunk, err := c.server.journal.Read(ctx, journal.Query{After: after, Until: end, MaxBytes: c.server.cfg.ResponseBytes, Filter: filter})
		if err != nil {
			return err
		}
		if chunk.Entries > 0 {
			if err := c.sendChunk(chunk, after, c.out.entriesWithin); err != nil {
				return err
			}
		}
		after = chunk.Last
	}
	return nil
}

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// State is what the workers hold. It need not be of this process: a table that
// is fed by the entries of a log serves as well.
type State interface {
	// Workers returns the names of the workers that a filter takes, in order.
	Workers(match func(worker, model string) bool) []string
	// Cut begins to read what a worker holds; ok is false where it is gone. The
	// cut includes all entries of the worker that the journal's bounds showed
	// before the call.
	Cut(ctx context.Context, worker string, tiers journal.Tiers) (c pipeline.Cut, ok bool, err error)
	// Digests tells what the workers that a filter takes hold, those of a worker one
	// after another, each with the seq of the worker's last entry then.
	Digests(ctx context.Context, match func(worker, model string) bool, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, error)
	// Status tells of the workers that a filter takes.
	Status(match func(worker, model string) bool) []*kvcastv1.WorkerStatus
	// Lookup returns every place where one of the blocks lies.
	Lookup(ctx context.Context, q pipeline.Query) ([]*kvcastv1.BlockHolder, error)
}

// snapshotAttempts is how often a snapshot is begun for a reader so slow that
// the journal lets go of what happened meanwhile.
const snapshotAttempts = 3

// Snapshot implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Snapshot(req *kvcastv1.SnapshotRequest, stream kvcastv1.RouterEventService_SnapshotServer) error {
	if err := s.welcome(); err != nil {
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

// turn waits until a snapshot may be sent. The headers, and what Subscribe accepted,
// have been; meanwhile there are signs of life.
func (c *cursor) turn(ctx context.Context) error {
	s := c.server
	err := s.snapshots.enter(ctx, s.draining, c.progressAfter(), c.alive)
	switch {
	case errors.Is(err, errNoPlace):
		return errTooManySnapshots(s.cfg.MaxSnapshots, fmt.Sprintf("none has come to its end within %v", s.cfg.MaxSnapshotWait), s.journal.Bounds())
	case errors.Is(err, errLineFull):
		return errTooManySnapshots(s.cfg.MaxSnapshots, fmt.Sprintf("%d more are waiting", s.snapshots.line), s.journal.Bounds())
	case errors.Is(err, errStopped):
		return errShuttingDown(s.journal.Bounds())
	}
	return err
}

// alive is a sign of life while a snapshot waits for its turn: a client whose stream
// is silent for long would give it up, and its place in the line. A stream that has
// followed entries is still where it was.
func (c *cursor) alive() error {
	if !c.out.chained {
		return c.aliveWithin()
	}
	c.server.metrics.progress.Inc()
	return c.out.message(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}}, c.seq)
}

// aliveWithin is one where there is no position.
func (c *cursor) aliveWithin() error {
	c.server.metrics.progress.Inc()
	return c.out.messageWithin(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}})
}

// snapshot sends what the workers hold, and leaves the cursor at its end:
//
//  1. Each worker's cut is taken by itself, while the others go on: its blocks,
//     and the seq of an entry that all of them include.
//  2. Entries of that worker after that seq, and all entries of a worker that
//     has come meanwhile, up to a seq common to all, bring all to the same
//     entry. Blocks may be newer than their cut's seq; applying an event twice
//     changes nothing.
func (c *cursor) snapshot(ctx context.Context) error {
	if c.listed != nil {
		c.listed.inSnapshot.Store(true)
		defer c.listed.inSnapshot.Store(false)
	}
	if err := c.turn(ctx); err != nil {
		return err
	}
	defer c.server.snapshots.leave()
	c.out.pace = &pace{stall: c.server.cfg.StallTimeout}
	defer func() { c.out.pace = nil }()
	for attempt := 1; ; attempt++ {
		end, err := c.trySnapshot(ctx)
		switch {
		case errors.Is(err, journal.ErrCompacted) && attempt < snapshotAttempts:
			continue
		case errors.Is(err, journal.ErrCompacted):
			return errSlowSnapshot(c.server.journal.Bounds())
		case errors.Is(err, errSlowPace):
			c.server.metrics.stalled.Inc()
			return errSnapshotPace(c.server.cfg.StallTimeout, c.server.journal.Bounds())
		case err != nil:
			return err
		}
		c.seq = end
		c.out.anew()
		return c.out.message(&kvcastv1.SubscribeResponse{SnapshotEnd: &kvcastv1.SnapshotEnd{
			Position: &kvcastv1.Position{Epoch: c.out.epoch, Seq: end},
		}}, end)
	}
}

// trySnapshot sends all of a snapshot but its end, whose seq it returns.
func (c *cursor) trySnapshot(ctx context.Context) (end uint64, err error) {
	begin := c.server.journal.Bounds().Newest
	err = c.out.messageWithin(&kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: c.out.epoch}})
	if err != nil {
		return 0, err
	}
	cuts := make(map[string]uint64) // by worker, the seq that its blocks include
	for _, name := range c.server.state.Workers(c.filter.worker) {
		cut, ok, err := c.server.state.Cut(ctx, name, c.filter.tierSet())
		if err != nil {
			return 0, err
		}
		if !ok || !c.filter.worker(name, cut.Worker.GetAdded().GetModel()) {
			continue // an entry since begin tells that it is gone, or another one now
		}
		if err := c.sendCut(cut); err != nil {
			return 0, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		// Its last entry may be old, and gone; since then until begin there was none.
		cuts[name] = max(cut.Seq, begin)
	}
	end = c.server.journal.Bounds().Newest
	return end, c.catchUp(begin, end, cuts)
}

func (c *cursor) sendCut(cut pipeline.Cut) error {
	err := c.out.messageWithin(&kvcastv1.SubscribeResponse{SnapshotWorker: cut.Worker})
	if err != nil {
		return err
	}
	sent := time.Now()
	for blocks := range cut.Blocks {
		if len(blocks) == 0 { // it waits
			if time.Since(sent) < c.progressAfter() {
				continue
			}
			err = c.aliveWithin()
		} else {
			err = c.out.blocks(blocks, cut.Reuse)
		}
		sent = time.Now()
		if err != nil {
			return err
		}
	}
	return nil
}

// catchUp sends the entries since a snapshot began, up to its end, that are not
// in its cuts: of a worker without one all of them.
func (c *cursor) catchUp(begin, end uint64, cuts map[string]uint64) error {
	filter := func(seq uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
		if seq <= cuts[s.Worker] {
			return journal.MatchNone
		}
		if c.filter == nil {
			return journal.MatchAll
		}
		return c.filter.match(seq, s, tiers)
	}
	for after := begin; after < end; {
		chunk, err := c.server.journal.Read(journal.Query{After: after, Until: end, MaxBytes: c.server.cfg.ResponseBytes, Filter: filter}, nil)
		if err != nil {
			return err
		}
		if chunk.Entries > 0 {
			if err := c.holding(after, func() error { return c.out.entriesWithin(c.cut(chunk)) }); err != nil {
				return err
			}
		}
		after = chunk.Last
	}
	return nil
}

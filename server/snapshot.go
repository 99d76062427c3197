package server

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// snapshotAttempts is how many times a snapshot is started. It starts again if the journal evicts entries that the
// end of the snapshot needs, because the client reads slowly.
const snapshotAttempts = 3

func (s routerEvents) Snapshot(req *kvcastv1.SnapshotRequest, stream kvcastv1.RouterEventService_SnapshotServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	c, err := s.openCursor(stream, req.GetFilter())
	if err != nil {
		return err
	}
	defer c.filter.release()
	return c.run(c.snapshot)
}

// awaitSweep waits until a sweep begins. Meanwhile it sends a heartbeat at each progress interval, since clients replace streams
// that are silent for several intervals. again reports whether a part of a snapshot was sent before.
func (c *cursor) awaitSweep(ctx context.Context, m *sweepStream, again bool) error {
	s := c.server
	s.snapshots.waiting.Add(1)
	defer s.snapshots.waiting.Add(-1)
	heartbeat := time.NewTicker(c.progressDelay())
	defer heartbeat.Stop()
	for {
		select {
		case <-m.begun:
			err := m.failure()
			if why, ok := s.snapshots.slots.Refusal(err); ok {
				return callerror.New(callerror.TooManySnapshots, s.journal.Bounds(),
					"%d snapshots are being sent, which is the limit, and %s; try again later, or resume after a position", s.cfg.MaxSnapshots, why)
			}
			return err
		case <-heartbeat.C:
			send := c.sendHeartbeat
			if c.out.hasPrev && !again { // the stream has sent a position, at which it still is
				send = func() error { return c.sendProgress(nil) }
			}
			if err := send(); err != nil {
				return err
			}
		case <-s.streams.draining:
			return callerror.Draining(s.journal.Bounds())
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// snapshot sends the state of all workers at one seq and moves the cursor to that seq:
//
//  1. It sends the messages of a sweep, which reads the blocks of one worker after the other, while entries are appended. The
//     blocks include the worker's entries up to a seq of that worker.
//  2. It sends each worker's entries from that seq up to a common seq, and all entries of workers that were added
//     meanwhile. The blocks may include some of these entries: applying an event twice has no further effect.
func (c *cursor) snapshot(ctx context.Context) error {
	if c.subscription != nil {
		c.subscription.inSnapshot.Store(true)
		defer c.subscription.inSnapshot.Store(false)
	}
	key, shared := c.sweepKey, c.sharesSweeps
	defer func() { c.out.pace = nil }()
	var end uint64
	err := journal.ErrCompacted
	for attempt := 0; attempt < snapshotAttempts && (errors.Is(err, journal.ErrCompacted) || errors.Is(err, errTooSlowToShare)); attempt++ {
		shared = shared && !errors.Is(err, errTooSlowToShare)
		m := c.server.joinSweep(admission.AddressOf(ctx), c.filter, key, shared)
		if err = c.awaitSweep(ctx, m, attempt > 0); err == nil {
			if c.out.pace == nil {
				c.out.pace = &snapshotPace{stallTimeout: c.server.cfg.StallTimeout}
			}
			end, err = c.sendState(ctx, m)
		}
		m.leave()
	}
	switch {
	case errors.Is(err, journal.ErrCompacted), errors.Is(err, errTooSlowToShare):
		return callerror.New(callerror.SlowSubscriber, c.server.journal.Bounds(),
			"the snapshot was read so slowly that the entries since its start are no longer retained; read faster, or let the server retain more (--journal-max-bytes)")
	case errors.Is(err, errSlowPace):
		c.server.metrics.stalled.Inc()
		return callerror.New(callerror.SlowSubscriber, c.server.journal.Bounds(),
			"the snapshot was read at less than %d MiB in %v, while others may be waiting; read faster, or give the server more CPU time if it cannot send faster", minPaceBytes>>20, c.server.cfg.StallTimeout)
	case err != nil:
		return err
	}
	c.seq = end
	if c.subscription != nil {
		c.subscription.seq.Store(end)
		c.out.newest = c.server.journal.Bounds().Newest
	}
	c.out.hasPrev = false
	return c.out.sendPositioned(&kvcastv1.SubscribeResponse{SnapshotEnd: &kvcastv1.SnapshotEnd{
		Position: &kvcastv1.Position{Epoch: c.out.epoch, Seq: end},
	}}, end)
}

// sendState sends a snapshot without its SnapshotEnd, and returns the seq at which the snapshot ends.
func (c *cursor) sendState(ctx context.Context, m *sweepStream) (end uint64, err error) {
	c.server.snapshots.sending.Add(1)
	defer c.server.snapshots.sending.Add(-1)
	err = c.out.sendUnpositioned(&kvcastv1.SubscribeResponse{SnapshotBegin: &kvcastv1.SnapshotBegin{Epoch: c.out.epoch}})
	if err != nil {
		return 0, err
	}
	for {
		message, err := m.next(ctx)
		if err != nil {
			return 0, err
		}
		if message == nil {
			break
		}
		if err := c.out.send(message); err != nil {
			return 0, err
		}
	}
	end = c.server.journal.Bounds().Newest
	return end, c.sendEntriesSince(ctx, m.begin, end, m.included)
}

// sendEntriesSince sends the entries from a snapshot's begin to its end that its blocks do not include.
func (c *cursor) sendEntriesSince(ctx context.Context, begin, end uint64, included map[string]uint64) error {
	filter := func(seq uint64, s *journal.Source, tiers kvblock.Tiers) journal.Match {
		if seq <= included[s.Worker] {
			return journal.MatchNone
		}
		return c.filter.match(seq, s, tiers)
	}
	for after := begin; after < end; {
		chunk, err := c.server.journal.Read(ctx, journal.Query{After: after, Until: end, MaxBytes: c.server.cfg.ResponseBytes, Filter: filter})
		if err != nil {
			return err
		}
		if chunk.Entries > 0 {
			if err := c.sendChunk(chunk, after, c.out.sendSnapshotEntries); err != nil {
				return err
			}
		}
		after = chunk.Last
	}
	return nil
}

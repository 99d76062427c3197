package server

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Subscribe implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	if !s.subscribers.tryAcquire() {
		return errorf(ReasonTooManySubs, s.journal.Bounds(), "%d subscribers are connected, which is the limit; try again later", s.cfg.MaxSubscribers)
	}
	defer s.subscribers.release()
	b := s.journal.Bounds()
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return err
	}
	defer filter.release()
	mode, after, err := subscribeStart(req, b)
	if err != nil {
		return err
	}
	c := newCursor(s.Server, stream, b.Epoch, after, filter)
	c.subscription = s.subscribers.add(stream.Context(), req.GetFilter())
	defer s.subscribers.remove(c.subscription)
	c.subscription.seq.Store(c.seq)
	c.snapshots = req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL
	c.digests = req.GetProgressDigests()
	return c.run(func(ctx context.Context) error {
		if err := c.accept(mode, b); err != nil {
			return err
		}
		if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
			if err := c.snapshot(ctx); err != nil {
				return err
			}
		}
		return c.follow(ctx)
	})
}

// subscribeStart returns how a stream starts, and after which entry.
func subscribeStart(req *kvcastv1.SubscribeRequest, b journal.Bounds) (mode kvcastv1.Accepted_Mode, after uint64, err error) {
	if _, ok := kvcastv1.GapPolicy_name[int32(req.GetGapPolicy())]; !ok {
		return 0, 0, invalidField(b, "gap_policy", "%d is not allowed: want GAP_POLICY_SNAPSHOT or GAP_POLICY_FAIL", req.GetGapPolicy())
	}
	switch from := req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_Latest:
		return kvcastv1.Accepted_MODE_LATEST, b.Newest, nil
	case *kvcastv1.SubscribeRequest_Earliest:
		return kvcastv1.Accepted_MODE_EARLIEST, b.Oldest - 1, nil
	case *kvcastv1.SubscribeRequest_After:
		err := checkPosition(from.After, b)
		if hasReason(err, ReasonPositionCompacted, ReasonEpochMismatch) && req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL {
			return kvcastv1.Accepted_MODE_SNAPSHOT, 0, nil
		}
		return kvcastv1.Accepted_MODE_RESUME, from.After.GetSeq(), err
	}
	return kvcastv1.Accepted_MODE_SNAPSHOT, 0, nil
}

// checkPosition returns an error unless the entries after a position are retained.
func checkPosition(p *kvcastv1.Position, b journal.Bounds) error {
	seq := p.GetSeq()
	switch epoch := p.GetEpoch(); {
	case epoch != "" && epoch != b.Epoch:
		return epochMismatch(epoch, b)
	case seq > b.Newest:
		return positionAhead(seq, b)
	case seq+1 < b.Oldest:
		return positionCompacted(seq, b)
	}
	return nil
}

// Replay implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Replay(req *kvcastv1.ReplayRequest, stream kvcastv1.RouterEventService_ReplayServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	if !s.replays.tryAcquire() {
		return errorf(ReasonTooManySubs, s.journal.Bounds(), "%d replays are being sent, which is the limit; try again later", s.cfg.MaxSubscribers)
	}
	defer s.replays.release()
	b := s.journal.Bounds()
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return err
	}
	defer filter.release()
	after, until, err := replayRange(req, b)
	if err != nil {
		return err
	}
	c := newCursor(s.Server, stream, b.Epoch, after, filter)
	return c.run(func(ctx context.Context) error {
		mode := kvcastv1.Accepted_MODE_RESUME
		if req.GetAfter() == nil {
			mode = kvcastv1.Accepted_MODE_EARLIEST
		}
		if err := c.accept(mode, b); err != nil {
			return err
		}
		for c.seq < until {
			if err := c.next(ctx, until); err != nil {
				return err
			}
		}
		if c.out.prev == until {
			return nil
		}
		// The filter left out the last entries: send the position without them.
		return c.out.message(&kvcastv1.SubscribeResponse{}, until)
	})
}

// replayRange returns the seq before the first entry of a replay, and that of the last.
func replayRange(req *kvcastv1.ReplayRequest, b journal.Bounds) (after, until uint64, err error) {
	after, until = b.Oldest-1, b.Newest
	if p := req.GetAfter(); p != nil {
		if err := checkPosition(p, b); err != nil {
			return 0, 0, err
		}
		after = p.GetSeq()
	}
	p := req.GetUntil()
	if p == nil {
		return after, until, nil
	}
	until = p.GetSeq()
	switch epoch := p.GetEpoch(); {
	case epoch != "" && epoch != b.Epoch:
		return 0, 0, epochMismatch(epoch, b)
	case until > b.Newest:
		return 0, 0, positionAhead(until, b)
	case until < after && req.GetAfter() == nil:
		return 0, 0, positionCompacted(until, b)
	case until < after:
		return 0, 0, invalidField(b, "until", "%d is not allowed: want %d (after) to %d (the newest)", until, after, b.Newest)
	}
	return after, until, nil
}

// follow sends the entries after the cursor until the client leaves, its connection
// reaches its maximum age, or the server shuts down and all entries are sent.
func (c *cursor) follow(ctx context.Context) (err error) {
	s, j := c.server, c.server.journal
	idle := time.NewTimer(c.progressDelay())
	defer idle.Stop()
	var aged <-chan time.Time // nil: never
	if timer := s.connectionAgeTimer(ctx); timer != nil {
		defer timer.Stop()
		aged = timer.C
	}
	var due *digests // to be sent when the cursor reaches their seq
	for {
		if due != nil && c.seq >= due.seq {
			if c.seq == due.seq { // not beyond, as after a snapshot
				if err := c.sendDigests(due.workers); err != nil {
					return err
				}
			}
			due = nil
			idle.Reset(c.progressDelay())
		}
		draining := s.isDraining() // before the read: when it is set and nothing is read, all entries are sent
		before, prev := c.seq, c.out.prev
		c.subscription.seq.Store(c.seq)
		if err := c.next(ctx, due.until()); err != nil {
			return err
		}
		if c.out.prev != prev && !c.digests {
			idle.Reset(c.progressDelay())
		}
		if c.seq != before {
			// Progress may still be due: the filter may have left out all entries, and
			// digests do not wait for an idle stream.
			select {
			case <-aged:
				return maxConnectionAge(j.Bounds())
			case <-idle.C:
				if due, err = c.progress(ctx, idle); err != nil {
					return err
				}
			default:
			}
			continue
		}
		if draining {
			return shuttingDown(j.Bounds())
		}
		changed := j.Changed()
		if j.Bounds().Newest != c.seq { // appended before Changed
			continue
		}
		select {
		case <-changed:
		case <-s.draining:
		case <-aged:
			return maxConnectionAge(j.Bounds())
		case <-idle.C:
			if due, err = c.progress(ctx, idle); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// progressDelay is how long to be idle before the next Progress. Jitter spreads the
// messages to many subscribers.
func (c *cursor) progressDelay() time.Duration {
	p := c.server.cfg.ProgressInterval
	return p - time.Duration(rand.Int64N(int64(p)/5+1))
}

// progress sends Progress. With digests it reads them instead, to be sent later.
func (c *cursor) progress(ctx context.Context, idle *time.Timer) (*digests, error) {
	if c.digests {
		return c.readDigests(ctx)
	}
	idle.Reset(c.progressDelay())
	return nil, c.sendProgress(nil)
}

func (c *cursor) sendProgress(workers []*kvcastv1.WorkerDigest) error {
	c.server.metrics.progress.Inc()
	return c.out.message(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: workers}}, c.seq)
}

// sendHeartbeat sends Progress without a position.
func (c *cursor) sendHeartbeat() error {
	c.server.metrics.progress.Inc()
	return c.out.messageWithin(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}})
}

// digests are the workers' digests at a seq.
type digests struct {
	seq     uint64
	workers []*kvcastv1.WorkerDigest
}

// until returns the seq up to which the stream may read before the digests are sent; 0, for nil, is the newest.
func (d *digests) until() uint64 {
	if d == nil {
		return 0
	}
	return d.seq
}

// readDigests returns the digests at one seq, without making workers wait for each other:
//
//  1. Each worker's digests are read at a different time, with the seq of its last entry.
//  2. The common seq is the largest of these, or the newest before them if that is larger: at or after the
//     cursor.
//  3. Workers with another entry up to the common seq are left out. Only entries appended since the start need
//     to be read to find them.
func (c *cursor) readDigests(ctx context.Context) (*digests, error) {
	j := c.server.journal
	begin := j.Bounds().Newest
	all, err := c.server.state.Digests(ctx, c.filter.worker, c.filter.tierSet())
	if err != nil {
		return nil, err
	}
	out := &digests{seq: begin}
	last := make(map[string]uint64) // by worker, the seq of its digests
	for _, d := range all {
		last[d.GetWorker()] = d.GetSeq()
		out.seq = max(out.seq, d.GetSeq())
	}
	leaveOutChanged := func(seq uint64, s *journal.Source, _ journal.Tiers) journal.Match {
		if of, ok := last[s.Worker]; ok && seq > of {
			delete(last, s.Worker)
		}
		return journal.MatchNone
	}
	for after := begin; after < out.seq; {
		chunk, err := j.Read(ctx, journal.Query{After: after, Until: out.seq, Filter: leaveOutChanged})
		if errors.Is(err, journal.ErrCompacted) {
			return &digests{seq: c.seq}, nil // which workers changed is unknown
		}
		if err != nil {
			return nil, err
		}
		after = chunk.Last
	}
	for _, d := range all {
		if _, ok := last[d.GetWorker()]; ok {
			out.workers = append(out.workers, d)
		}
	}
	return out, nil
}

// sendDigests sends at least one Progress, and more if the digests exceed the size of a
// response. A worker's digests are always in one message.
func (c *cursor) sendDigests(workers []*kvcastv1.WorkerDigest) error {
	first, bytes := 0, 0
	for i, d := range workers {
		size := proto.Size(d) + 4 // tag and length
		sameWorker := i > first && d.GetWorker() == workers[i-1].GetWorker()
		if i > first && !sameWorker && bytes+size > c.server.cfg.ResponseBytes {
			if err := c.sendProgress(workers[first:i]); err != nil {
				return err
			}
			first, bytes = i, 0
		}
		bytes += size
	}
	return c.sendProgress(workers[first:])
}

package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Subscribe implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	if err := s.welcome(); err != nil {
		return err
	}
	if !s.subscribers.enter() {
		return errTooManySubscribers(s.cfg.MaxSubscribers, s.journal.Bounds())
	}
	defer s.subscribers.leave()
	b := s.journal.Bounds()
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return err
	}
	defer filter.release()
	start, err := s.start(req, b)
	if err != nil {
		return err
	}
	c := newCursor(s.Server, stream, b.Epoch, start.after, filter)
	c.listed = s.subscribers.add(stream.Context(), req.GetFilter())
	defer s.subscribers.remove(c.listed)
	c.listed.seq.Store(c.seq)
	c.snapshots = req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL
	c.digested = req.GetProgressDigests()
	return c.run(func(ctx context.Context) error {
		if err := c.accept(start.mode, b); err != nil {
			return err
		}
		if start.mode == kvcastv1.Accepted_MODE_SNAPSHOT {
			if err := c.snapshot(ctx); err != nil {
				return err
			}
		}
		return c.follow(ctx)
	})
}

// start is where a stream begins.
type start struct {
	mode  kvcastv1.Accepted_Mode
	after uint64
}

// start finds out where the stream that was asked for begins.
func (s routerEvents) start(req *kvcastv1.SubscribeRequest, b journal.Bounds) (start, error) {
	if _, ok := kvcastv1.GapPolicy_name[int32(req.GetGapPolicy())]; !ok {
		return start{}, errInvalid("gap_policy", fmt.Sprintf(
			"%d is not allowed: want GAP_POLICY_SNAPSHOT or GAP_POLICY_FAIL", req.GetGapPolicy()), b)
	}
	switch from := req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_Latest:
		return start{kvcastv1.Accepted_MODE_LATEST, b.Newest}, nil
	case *kvcastv1.SubscribeRequest_Earliest:
		return start{kvcastv1.Accepted_MODE_EARLIEST, b.Oldest - 1}, nil
	case *kvcastv1.SubscribeRequest_After:
		err := checkPosition(from.After, b)
		var gone *goneError
		if errors.As(err, &gone) && req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL {
			return start{mode: kvcastv1.Accepted_MODE_SNAPSHOT}, nil
		}
		return start{kvcastv1.Accepted_MODE_RESUME, from.After.GetSeq()}, err
	}
	return start{mode: kvcastv1.Accepted_MODE_SNAPSHOT}, nil
}

// checkPosition tells whether the entries after a position are retained. The
// error is a *goneError where they were once, and are no longer.
func checkPosition(p *kvcastv1.Position, b journal.Bounds) error {
	seq := p.GetSeq()
	switch epoch := p.GetEpoch(); {
	case epoch != "" && epoch != b.Epoch:
		return &goneError{errEpochMismatch(epoch, b)}
	case seq > b.Newest:
		return errAhead(seq, b)
	case seq+1 < b.Oldest:
		return &goneError{errCompacted(seq, b)}
	}
	return nil
}

// goneError is a position that a snapshot can take the place of.
type goneError struct{ error }

func (e *goneError) Unwrap() error { return e.error }

// GRPCStatus makes gRPC send the status that is wrapped.
func (e *goneError) GRPCStatus() *status.Status { return status.Convert(e.error) }

// cursor is one stream's place in the journal, and nothing queued.
type cursor struct {
	server    *Server
	out       responses
	seq       uint64 // the last entry read
	filter    *filter
	snapshots bool // whether a snapshot may take the place of entries that are gone
	digested  bool // whether Progress tells what workers hold
	slices    [][]byte
	listed    *subscriber   // nil where it follows nothing
	sending   atomic.Uint64 // seq of the first of the entries that are being sent, at the earliest; 0 for none
}

func newCursor(s *Server, stream grpc.ServerStream, epoch string, after uint64, f *filter) *cursor {
	return &cursor{server: s, out: responses{stream: stream, epoch: epoch}, seq: after, filter: f}
}

// run runs a stream from its headers on. gRPC holds those back until the first
// message, and some clients wait for them before they return the stream.
//
// It returns when the body has, or when a send has stalled: nothing but the end
// of the call interrupts that, and then the body returns as well.
func (c *cursor) run(body func(context.Context) error) error {
	ctx := c.out.stream.Context()
	if err := c.out.stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	limit := c.server.cfg.StallTimeout
	watch := time.NewTicker(min(limit/4+1, pressureTime/2))
	defer watch.Stop()
	c.server.calls.enter()
	defer c.server.calls.leave()
	ended := make(chan error, 1)
	go func() { ended <- c.guard(ctx, body) }()
	for {
		select {
		case err := <-ended:
			if cause := ctx.Err(); cause != nil {
				// The client left, whatever the send that it interrupted says.
				return status.FromContextError(cause).Err()
			}
			return err
		case <-watch.C:
			switch {
			case c.out.stall.longer(limit):
				c.server.metrics.stalled.Inc()
				return errSlowSubscriber(limit, c.server.journal.Bounds())
			case c.pressing():
				c.server.metrics.stalled.Inc()
				return errHeldTooMuch(c.server.journal.Bounds())
			}
		}
	}
}

// pressureTime is how long a send may take whose entries the journal has let go of,
// while more of such memory is held than may be.
const pressureTime = time.Second

// pressing tells whether the stream is one of those that hold more memory of the
// journal's past than may be held: what it is sending has long been let go of.
func (c *cursor) pressing() bool {
	sending := c.sending.Load()
	return sending != 0 && c.out.stall.longer(pressureTime) &&
		c.server.journal.Retained() > c.server.cfg.MaxEvictedBytes && sending < c.server.journal.Bounds().Oldest
}

// guard makes an error of a panic, which the interceptor does not see in this
// goroutine.
func (c *cursor) guard(ctx context.Context, body func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = c.server.recovered(ctx, p)
		}
	}()
	return body(ctx)
}

func (c *cursor) accept(mode kvcastv1.Accepted_Mode, b journal.Bounds) error {
	m := &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch:     b.Epoch,
		OldestSeq: b.Oldest,
		NewestSeq: b.Newest,
		Mode:      mode,

		ProgressIntervalNano: uint64(c.server.cfg.ProgressInterval),
	}}
	if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
		return c.out.messageWithin(m)
	}
	return c.out.message(m, c.seq)
}

// follow sends what comes after the cursor, until the client leaves, its
// connection is too old, or the server shuts down and all has been sent.
func (c *cursor) follow(ctx context.Context) error {
	j := c.server.journal
	idle := time.NewTimer(c.progressAfter())
	defer idle.Stop()
	var aged <-chan time.Time // nil, which is never ready, where any age will do
	if over := c.server.age.over(ctx); over != nil {
		defer over.Stop()
		aged = over.C
	}
	var due *digests // nil, or what is to be told when the cursor is there
	for {
		if due != nil && c.seq >= due.at {
			if c.seq == due.at { // else a snapshot came between
				if err := due.tell(c); err != nil {
					return err
				}
			}
			due = nil
			idle.Reset(c.progressAfter())
		}
		// Asked before the read, so that when both say yes nothing is left.
		draining := c.server.isDraining()
		before, prev := c.seq, c.out.prev
		c.listed.seq.Store(c.seq)
		if err := c.next(ctx, due.until()); err != nil {
			return err
		}
		if c.out.prev != prev && !c.digested {
			idle.Reset(c.progressAfter())
		}
		if c.seq != before {
			// What a filter leaves out moves the cursor and tells nobody; and digests
			// do not wait for silence.
			select {
			case <-idle.C:
				var err error
				if due, err = c.progress(ctx, idle); err != nil {
					return err
				}
			default:
			}
			select {
			case <-aged:
				return errMaxConnectionAge(j.Bounds())
			default:
			}
			continue
		}
		if draining {
			return errShuttingDown(j.Bounds())
		}
		changed := j.Changed()
		// An entry that came before Changed was asked closes nothing.
		if j.Bounds().Newest != c.seq {
			continue
		}
		select {
		case <-changed:
		case <-c.server.draining:
		case <-aged:
			return errMaxConnectionAge(j.Bounds())
		case <-idle.C:
			var err error
			if due, err = c.progress(ctx, idle); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// progress tells that the stream is alive, and where it stands; with digests it
// only takes them.
func (c *cursor) progress(ctx context.Context, idle *time.Timer) (*digests, error) {
	if c.digested {
		return c.takeDigests(ctx)
	}
	idle.Reset(c.progressAfter())
	return nil, c.sendProgress(nil)
}

func (c *cursor) sendProgress(workers []*kvcastv1.WorkerDigest) error {
	c.server.metrics.progress.Inc()
	return c.out.message(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: workers}}, c.seq)
}

// next moves the cursor on and sends what it passes and the filter takes, as
// much as fits into a response, up to a seq or (0) the newest.
func (c *cursor) next(ctx context.Context, until uint64) error {
	chunk, err := c.server.journal.Read(journal.Query{
		After: c.seq, Until: until, MaxBytes: c.server.cfg.ResponseBytes, Filter: c.filter.journal(),
	}, c.slices[:0])
	// Let go of the journal's memory while there is nothing to send.
	defer func() { clear(c.slices) }()
	c.slices = chunk.Slices
	switch {
	case errors.Is(err, journal.ErrCompacted) && c.snapshots:
		return c.snapshot(ctx)
	case err != nil:
		return readError(err)
	}
	before := c.seq
	c.seq = chunk.Last
	if chunk.Entries == 0 {
		return nil
	}
	c.server.metrics.sent(chunk)
	return c.holding(before, func() error { return c.out.entries(c.cut(chunk)) })
}

// holding sends entries after a seq.
func (c *cursor) holding(after uint64, send func() error) error {
	c.sending.Store(after + 1)
	defer c.sending.Store(0)
	return send()
}

// cut leaves out of a chunk the events of tiers that are not wanted.
func (c *cursor) cut(chunk journal.Chunk) journal.Chunk {
	if chunk.Cut {
		chunk.Slices = [][]byte{cutEntries(chunk.Slices, c.filter.tierSet())}
	}
	return chunk
}

// readError tells a subscriber that fell off the old end of the journal.
func readError(err error) error {
	var pe *journal.PositionError
	switch {
	case !errors.As(err, &pe):
		return err
	case errors.Is(err, journal.ErrCompacted):
		return errCompacted(pe.After, pe.Bounds)
	}
	return errAhead(pe.After, pe.Bounds)
}

// progressAfter is how long to be idle before the next Progress: some jitter
// keeps many subscribers from being told all at once.
func (c *cursor) progressAfter() time.Duration {
	p := c.server.cfg.ProgressInterval
	return p - time.Duration(rand.Int64N(int64(p)/5+1))
}

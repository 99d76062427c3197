package client

import (
	"context"
	"errors"
	"io"
	"math"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// subscription is one range over updates: streams, one after the other, of the
// goroutine that ranges.
type subscription struct {
	client  *Client
	cfg     Config
	chain   *chain // what was delivered
	backoff backoff
	digests bool
	// anew tells that the next stream has to begin with a snapshot.
	anew bool
	// refused is why the caller does not trust what was told.
	refused error
	// moved tells that the stream has brought a position, and since when it is
	// there.
	moved bool
	since time.Time
	// doubts are how many streams in a row were not to be trusted.
	doubts backoff
}

// errLeft is that the caller has left the range.
var errLeft = errors.New("left")

func newSubscription(c *Client, cfg Config) (*subscription, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	cfg.Filter = proto.CloneOf(cfg.Filter)
	wait := backoff{least: cfg.BackoffMin, most: cfg.BackoffMax}
	return &subscription{
		client: c, cfg: cfg, chain: newChain(cfg.Filter, cfg.GapPolicy),
		backoff: wait, doubts: wait, digests: cfg.Digests,
	}, nil
}

// run delivers updates until ctx is done or the caller leaves; an error is for the
// caller.
func (s *subscription) run(ctx context.Context, deliver func(Update) bool) error {
	for ctx.Err() == nil {
		err := s.follow(ctx, deliver)
		if errors.Is(err, errLeft) || over(ctx) {
			return nil
		}
		i, err := s.judge(err)
		if err != nil {
			return err
		}
		var from Position // none where what was delivered is not gone on from
		if !i.Snapshot {
			from = s.chain.position()
		}
		s.cfg.Logger.Warn("stream ended", "error", i.Err, "position", from, "snapshot", i.Snapshot, "wait", i.Wait)
		if !deliver(Update{Interruption: i, Position: from}) {
			return nil
		}
		again := time.NewTimer(i.Wait)
		select {
		case <-again.C:
		case <-ctx.Done():
		}
		again.Stop()
	}
	return nil
}

// over tells that a context is done. The server knows its deadline, and may tell of
// it first.
func over(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// follow follows one stream to its end, and returns why it ended.
func (s *subscription) follow(ctx context.Context, deliver func(Update) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, hangUp, err := s.client.connect()
	if err != nil {
		return err
	}
	defer hangUp()
	idle := s.idle(nil)
	watch := time.AfterFunc(idle, func() { cancel(ErrIdle) })
	defer watch.Stop()
	s.moved, s.since = false, time.Now()
	start := s.start()
	s.chain.begin(start)
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(ctx, s.request(start))
	for err == nil {
		var m *kvcastv1.SubscribeResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		// What the caller does meanwhile takes as long as it likes.
		watch.Stop()
		if err := s.take(m, deliver); err != nil {
			return err
		}
		if a := m.GetAccepted(); a != nil {
			idle = s.idle(a)
		}
		watch.Reset(idle)
	}
	switch {
	case errors.Is(context.Cause(ctx), ErrIdle):
		return ErrIdle
	case errors.Is(err, io.EOF):
		return ErrEnded
	}
	return newError(err)
}

// idle is how long nothing may come on a stream that was accepted, or not yet (nil).
func (s *subscription) idle(a *kvcastv1.Accepted) time.Duration {
	const forever = time.Duration(math.MaxInt64)
	silence := time.Duration(min(a.GetProgressIntervalNano(), math.MaxInt64/IdleIntervals))
	switch t := s.cfg.IdleTimeout; {
	case t < 0:
		return forever
	case t > 0:
		if t <= silence {
			s.cfg.Logger.Warn("IdleTimeout is not above what the server is silent for: streams will be given up in vain", "idle_timeout", t, "server", silence)
		}
		return t
	case silence > 0:
		return max(IdleIntervals*silence, LeastIdleTimeout)
	}
	return DefaultIdleTimeout
}

// start is where the next stream begins.
func (s *subscription) start() Start {
	switch {
	case s.anew || s.chain.held == heldPart:
		return FromSnapshot()
	case s.chain.held == heldWhole:
		return Start{kind: startAfter, after: s.chain.position()}
	}
	return s.cfg.Start
}

func (s *subscription) request(start Start) *kvcastv1.SubscribeRequest {
	req := &kvcastv1.SubscribeRequest{Filter: s.cfg.Filter, ProgressDigests: s.digests}
	if s.cfg.GapPolicy == GapFail {
		req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_FAIL
	}
	start.put(req)
	return req
}

// take delivers a message that is what has to come next.
func (s *subscription) take(m *kvcastv1.SubscribeResponse, deliver func(Update) bool) error {
	if err := s.chain.check(m); err != nil {
		return err
	}
	if a := m.GetAccepted(); a != nil {
		s.cfg.Logger.Info("stream began", "epoch", a.GetEpoch(), "mode", a.GetMode(), "position", s.chain.position())
	} else if s.chain.phase == phaseFollowing {
		s.moved = true // a sign of life before a snapshot has none
	}
	if m.GetSnapshotBegin() != nil {
		s.anew = false
	}
	if !deliver(Update{Message: m, Position: s.chain.position(), subscription: s}) {
		return errLeft
	}
	if err := s.refused; err != nil {
		s.refused = nil
		return &refusal{err}
	}
	return nil
}

// refusal is that the caller does not trust what was told.
type refusal struct{ cause error }

func (r *refusal) Error() string { return r.cause.Error() }
func (r *refusal) Unwrap() error { return r.cause }

// judge says how to go on after the end of a stream; an error is that there is no
// way.
func (s *subscription) judge(err error) (*Interruption, error) {
	i := &Interruption{Err: err}
	var (
		answer    *Error
		violation *ViolationError
		refused   *refusal
		asked     time.Duration
	)
	if s.moved {
		s.backoff.reset()
	}
	if s.moved && time.Since(s.since) > s.cfg.BackoffMax {
		s.doubts.reset()
	}
	switch {
	case errors.As(err, &answer):
		switch {
		case s.client.closed():
			return nil, ErrConnClosed
		case answer.gone() && s.cfg.GapPolicy == GapSnapshot:
			s.anew = true
		case answer.Code == codes.Unimplemented && s.digests:
			// Perhaps it was the digests: at once without.
			s.digests, i.Failures, i.Snapshot = false, s.backoff.failures, s.start().kind == startSnapshot
			return i, nil
		case answer.permanent():
			return nil, answer
		}
		asked = answer.RetryAfter
	case errors.As(err, &violation), errors.As(err, &refused):
		if refused != nil {
			i.Err = refused.cause
		}
		if s.cfg.GapPolicy == GapFail {
			return nil, i.Err
		}
		s.anew = true
		// Snapshots cost the server something, so their wait is not forgotten with the
		// first message that comes.
		i.Wait = s.doubts.next(0)
	case errors.Is(err, ErrIdle), errors.Is(err, ErrEnded):
	default:
		return nil, err // of grpc.NewClient, which did take the options before
	}
	i.Wait = max(i.Wait, s.backoff.next(asked))
	i.Failures, i.Snapshot = s.backoff.failures, s.start().kind == startSnapshot
	return i, nil
}

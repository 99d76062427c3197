package client

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// subscription is the state of one range over updates: a sequence of streams, read by the caller's goroutine.
type subscription struct {
	client    *Client
	cfg       Config
	validator *validator
	digests   bool

	needSnapshot bool      // the next stream must start with a snapshot
	rejected     error     // set by Resnapshot until the stream has ended; nil: none
	progressed   bool      // the current stream has delivered entries or Progress with a position
	streamStart  time.Time // when the current stream was requested
	failed       func()    // makes the next stream go to the next server

	backoff         backoff // before all streams
	snapshotBackoff backoff // before streams that follow a violation
}

// errStopped means that the caller has broken the loop.
var errStopped = errors.New("the caller has broken the loop")

func newSubscription(c *Client, cfg Config) (*subscription, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	cfg.Filter = proto.CloneOf(cfg.Filter)
	b := backoff{min: cfg.BackoffMin, max: cfg.BackoffMax, servers: c.servers()}
	return &subscription{
		client: c, cfg: cfg, failed: func() {}, validator: newValidator(cfg.Filter, cfg.GapPolicy), digests: cfg.Digests,
		backoff: b, snapshotBackoff: backoff{min: cfg.BackoffMin, max: cfg.BackoffMax, servers: 1},
	}, nil
}

// run delivers updates until ctx ends or deliver returns false. An error ends the subscription.
func (s *subscription) run(ctx context.Context, deliver func(Update) bool) error {
	for ctx.Err() == nil {
		err := s.stream(ctx, deliver)
		if errors.Is(err, errStopped) || isDone(ctx) {
			return nil
		}
		s.failed()
		i, err := s.interruption(err)
		if err != nil {
			return err
		}
		var from Position // zero: a snapshot follows
		if !i.Snapshot {
			from = s.validator.position()
		}
		s.cfg.Logger.Warn("stream ended", "error", i.Err, "position", from, "snapshot", i.Snapshot, "wait", i.Wait)
		if !deliver(Update{Interruption: i, Position: from}) {
			return nil
		}
		select {
		case <-time.After(i.Wait):
		case <-ctx.Done():
		}
	}
	return nil
}

// isDone reports whether a context has ended or its deadline has passed. The server receives the deadline and may
// report it before the context ends.
func isDone(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// stream delivers the messages of one stream and returns the error that ended it.
func (s *subscription) stream(ctx context.Context, deliver func(Update) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := s.client.connect()
	if err != nil {
		return err
	}
	defer conn.close()
	s.failed = conn.failed
	timeout := s.idleTimeout(nil)
	idle := time.AfterFunc(timeout, func() { cancel(ErrIdle) })
	defer idle.Stop()
	s.progressed, s.streamStart = false, time.Now()
	start := s.nextStart()
	s.validator.startStream(start)
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(ctx, s.request(start))
	for err == nil {
		var m *kvcastv1.SubscribeResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		idle.Stop() // the time in which the caller processes the message does not count
		if err := s.deliver(m, deliver); err != nil {
			return err
		}
		if a := m.GetAccepted(); a != nil {
			timeout = s.idleTimeout(a)
		}
		idle.Reset(timeout)
	}
	switch {
	case errors.Is(context.Cause(ctx), ErrIdle):
		return ErrIdle
	case errors.Is(err, io.EOF):
		return ErrEnded
	}
	return newError(err)
}

// idleTimeout returns the idle timeout of a stream; a is nil until the stream is accepted.
func (s *subscription) idleTimeout(a *kvcastv1.Accepted) time.Duration {
	interval := time.Duration(min(a.GetProgressIntervalNano(), math.MaxInt64/IdleIntervals))
	switch t := s.cfg.IdleTimeout; {
	case t < 0:
		return math.MaxInt64
	case t > 0:
		if t <= interval {
			s.cfg.Logger.Warn("the idle timeout does not exceed the server's progress interval, so idle streams will be replaced; raise IdleTimeout",
				"idle_timeout", t, "progress_interval", interval)
		}
		return t
	case interval > 0:
		return max(IdleIntervals*interval, LeastIdleTimeout)
	}
	return DefaultIdleTimeout
}

func (s *subscription) nextStart() Start {
	switch {
	case s.needSnapshot || s.validator.delivered == deliveredPart:
		return FromSnapshot()
	case s.validator.delivered == deliveredAll:
		return Start{mode: kvcastv1.Accepted_MODE_RESUME, after: s.validator.position()}
	}
	return s.cfg.Start
}

func (s *subscription) request(start Start) *kvcastv1.SubscribeRequest {
	req := &kvcastv1.SubscribeRequest{Filter: s.cfg.Filter, ProgressDigests: s.digests, ClientId: s.cfg.ClientID}
	if s.cfg.GapPolicy == GapFail {
		req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_FAIL
	}
	start.setOn(req)
	return req
}

func (s *subscription) deliver(m *kvcastv1.SubscribeResponse, deliver func(Update) bool) error {
	if err := s.validator.validate(m); err != nil {
		return err
	}
	if a := m.GetAccepted(); a != nil {
		s.cfg.Logger.Info("stream began", "epoch", a.GetEpoch(), "mode", a.GetMode(), "position", s.validator.position())
	} else if s.validator.phase == phaseFollowing {
		s.progressed = true
	}
	if m.GetSnapshotBegin() != nil {
		s.needSnapshot = false
	}
	if !deliver(Update{Message: m, Position: s.validator.stored(), subscription: s}) {
		return errStopped
	}
	return s.rejected
}

// interruption decides how to continue after a stream has ended with an error. If it returns an error, the subscription ends.
func (s *subscription) interruption(err error) (*Interruption, error) {
	i := &Interruption{Err: err}
	if s.progressed {
		s.backoff.failures = 0
		if time.Since(s.streamStart) > s.cfg.BackoffMax {
			s.snapshotBackoff.failures = 0
		}
	}
	var (
		answer     *Error
		violation  *ViolationError
		retryAfter time.Duration
	)
	switch {
	case s.rejected != nil, errors.As(err, &violation):
		s.rejected = nil
		if s.cfg.GapPolicy == GapFail {
			return nil, err
		}
		s.needSnapshot = true
		// Snapshots are expensive, so only a stream longer than BackoffMax resets this backoff.
		i.Wait = s.snapshotBackoff.next(0)
	case errors.Is(err, ErrIdle), errors.Is(err, ErrEnded):
	case !errors.As(err, &answer):
		return nil, err // an error of grpc.NewClient
	case s.client.connClosed():
		return nil, ErrConnClosed
	case answer.positionLost() && s.cfg.GapPolicy == GapSnapshot:
		s.needSnapshot = true
	case answer.Code == codes.Unimplemented && s.digests:
		// The server may not support digests: request a stream without digests at once.
		s.digests, i.Failures, i.Snapshot = false, s.backoff.failures, s.startsWithSnapshot()
		return i, nil
	case answer.Code == codes.Unauthenticated && s.progressed: // the credentials of the next call may be others
	case answer.permanent():
		return nil, answer
	default:
		retryAfter = answer.RetryAfter
	}
	i.Wait = max(i.Wait, s.backoff.next(retryAfter))
	i.Failures, i.Snapshot = s.backoff.failures, s.startsWithSnapshot()
	return i, nil
}

// startsWithSnapshot reports whether the next stream starts with a snapshot.
func (s *subscription) startsWithSnapshot() bool {
	return s.nextStart().acceptedMode() == kvcastv1.Accepted_MODE_SNAPSHOT
}

// backoff is an exponential backoff with jitter.
type backoff struct {
	min, max time.Duration
	servers  int // tried in turn
	failures int
}

// next counts a failure and returns the wait after it: a short one before the next server, until all have failed. If the
// last server requests a longer delay, the wait is the requested delay plus up to a quarter at random, since the server
// requests the same delay from many clients.
func (b *backoff) next(requested time.Duration) time.Duration {
	rounds := b.failures / b.servers
	b.failures++
	if b.failures%b.servers != 0 {
		return jitter(b.min / 10)
	}
	wait := b.min
	for range rounds {
		if wait *= 2; wait >= b.max {
			wait = b.max
			break
		}
	}
	wait -= jitter(wait / 2)
	if requested = min(requested, MaxRetryDelay); requested > 0 {
		wait = max(wait, requested+jitter(requested/4))
	}
	return wait
}

// jitter returns a random duration up to d.
func jitter(d time.Duration) time.Duration { return time.Duration(rand.Int64N(max(0, int64(d)) + 1)) }

package server

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// evictedSendTimeout is the time limit of a send of evicted entries while the streams together reference more
// than MaxEvictedBytes of evicted entries.
const evictedSendTimeout = time.Second

// streamEnds are reasons to end a stream while its body is blocked, besides a stalled send. Each may be nil.
type streamEnds struct {
	referencesEvicted func() bool // reports whether the stream blocks the release of evicted entries
	// Both are for streams of requests and answers, which have no position to resume after.
	aged     <-chan time.Time
	draining <-chan struct{}
	outdated <-chan struct{} // nil: it does not matter
}

// runStream sends the headers and calls body, which sends the messages. gRPC would delay the headers until the first
// message, and some clients wait for them.
//
// runStream returns when body returns, or for one of the reasons in ends, or when a send stalls. A blocked
// send or receive ends with the call, so body runs in a goroutine that may end after runStream.
func (s *Server) runStream(out *responses, ends streamEnds, body func(context.Context) error) error {
	err := s.runBody(out, ends, body)
	out.ended.Store(true)
	s.unread.End(out.stream.Context(), &out.sent, err)
	return err
}

func (s *Server) runBody(out *responses, ends streamEnds, body func(context.Context) error) error {
	ctx := out.stream.Context()
	if err := out.stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	timeout := s.cfg.StallTimeout
	check := time.NewTicker(min(timeout/4+1, evictedSendTimeout/2))
	defer check.Stop()
	s.streams.open.Add(1)
	defer s.streams.ended()
	ended := make(chan error, 1)
	go func() { ended <- s.recoverPanic(ctx, body) }()
	done := ctx.Done()
	for {
		select {
		case <-done:
			if err := access.Revoked(ctx); err != nil {
				return err
			}
			done = nil // the client ended the call, and so the body ends
		case err := <-ended:
			if err := access.Revoked(ctx); err != nil {
				return err
			}
			if cause := ctx.Err(); cause != nil { // the client ended the call; the error of the interrupted send says less
				return status.FromContextError(cause).Err()
			}
			return err
		case <-ends.aged:
			return callerror.New(callerror.MaxConnectionAge, s.journal.Bounds(),
				"the connection has reached the age limit; send the unanswered requests over a new connection")
		case <-ends.draining:
			return callerror.New(callerror.ShuttingDown, s.journal.Bounds(), "the server is shutting down; send the unanswered requests when a server is back")
		case <-ends.outdated:
			return outdatedError(s.journal.Bounds())
		case <-check.C:
			switch {
			case out.sendExceeds(timeout):
				s.metrics.stalled.Inc()
				return callerror.New(callerror.SlowSubscriber, s.journal.Bounds(),
					"the client did not read for %v, which is the limit; resume after the last position, and read faster", timeout)
			case ends.referencesEvicted != nil && ends.referencesEvicted():
				s.metrics.stalled.Inc()
				return callerror.New(callerror.SlowSubscriber, s.journal.Bounds(),
					"the client did not read for %v while evicted entries that slow clients have not read use too much memory; start from a snapshot, and read faster", evictedSendTimeout)
			}
		}
	}
}

// recoverPanic calls body and converts a panic to an error. The recovery interceptor recovers only panics in the goroutine of the handler.
func (s *Server) recoverPanic(ctx context.Context, body func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = s.recovered(ctx, p)
		}
	}()
	return body(ctx)
}

// openStreams counts the open Subscribe, Snapshot, Replay and MatchPrefixes streams, and ends them.
type openStreams struct {
	open     atomic.Int64
	none     chan struct{} // has an element when open has become 0
	draining chan struct{} // closed when nothing more will be appended
	drain    func()        // closes draining, once
}

func newOpenStreams() *openStreams {
	draining := make(chan struct{})
	return &openStreams{none: make(chan struct{}, 1), draining: draining, drain: sync.OnceFunc(func() { close(draining) })}
}

// wait waits until no stream is open.
func (s *openStreams) wait(ctx context.Context) {
	for s.open.Load() > 0 {
		select {
		case <-s.none:
		case <-ctx.Done():
			return
		}
	}
	s.signal() // another Shutdown may wait too
}

func (s *openStreams) ended() {
	if s.open.Add(-1) == 0 {
		s.signal()
	}
}

func (s *openStreams) signal() {
	select {
	case s.none <- struct{}{}:
	default:
	}
}

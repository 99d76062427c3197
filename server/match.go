package server

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
	"github.com/kvcast/kvcast/server/match"
)

// matching is the memory of one request, for reuse.
type matching struct {
	query    match.Query
	response match.Response
}

var matchings = sync.Pool{New: func() any { return new(matching) }}

// release makes the memory available to other requests, unless it is large.
func (m *matching) release() {
	if m.query.IsLarge() || m.response.IsLarge() {
		return
	}
	m.query.Clear()
	matchings.Put(m)
}

func (s routerEvents) MatchPrefix(ctx context.Context, req *kvcastv1.MatchPrefixRequest) (*kvcastv1.MatchPrefixResponse, error) {
	m := matchings.Get().(*matching)
	defer m.release()
	m.query.Set(req)
	out := new(kvcastv1.MatchPrefixResponse)
	err := s.match(ctx, m, func(r *match.Response, size int) {
		// The fields are already encoded. gRPC sends them as it sends fields of a later version.
		out.ProtoReflect().SetUnknown(r.Append(make([]byte, 0, size)))
	})
	return out, err
}

func (s routerEvents) MatchPrefixes(stream kvcastv1.RouterEventService_MatchPrefixesServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	release, err := s.quotas.matchStreams.Stream(stream.Context(), "MatchPrefixes streams", "send more requests over each stream, or try again later")
	if err != nil {
		return err
	}
	defer release()
	var aged <-chan time.Time // nil: never
	if timer := s.connectionAgeTimer(stream.Context()); timer != nil {
		defer timer.Stop()
		aged = timer.C
	}
	out := &responses{stream: stream}
	is, outdated := s.outdated.get()
	if is { // the client has gone to no other server
		outdated = nil
	}
	return s.runStream(out, streamEnds{aged: aged, draining: s.streams.draining, outdated: outdated}, func(ctx context.Context) error {
		for {
			switch err := s.answerNext(ctx, out); {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			}
		}
	})
}

// answerNext receives the next request of a stream and answers it. It returns io.EOF if there is none.
func (s *Server) answerNext(ctx context.Context, out *responses) error {
	var req matchRequest
	if err := out.stream.RecvMsg(&req); err != nil {
		return err
	}
	answer, err := s.answerMatch(ctx, &req)
	req.release() // before the client reads the answer
	if err != nil {
		return err
	}
	return out.send(answer)
}

// answerMatch answers a request of a stream.
func (s *Server) answerMatch(ctx context.Context, req *matchRequest) (encoded mem.BufferSlice, err error) {
	answer, err := s.unread.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if all := req.query.Outcomes; len(all) > 0 {
		if violations := match.CheckOutcomes(all); violations != nil {
			answer.Discard()
			return nil, callerror.InvalidFields(violations, s.journal.Bounds())
		}
		s.outcomes.report(all, s.journal.Bounds())
	}
	if _, err := s.noteRouted(ctx, req.query.Routed); err != nil {
		answer.Discard()
		return nil, err
	}
	if !req.query.Asks() {
		return answer.Encode(match.MaxIDSize, func(b []byte) []byte { return match.AppendOnlyID(b, req.id) })
	}
	var refused error
	err = s.match(ctx, req.matching, func(r *match.Response, size int) {
		encoded, refused = answer.Encode(match.MaxIDSize+size, func(b []byte) []byte { return r.Append(match.AppendID(b, req.id, size)) })
	})
	if err != nil {
		answer.Discard()
		return nil, err
	}
	return encoded, refused
}

// matchRequest is a received MatchPrefixesRequest. An idle stream has none.
type matchRequest struct {
	*matching
	id uint64
}

func (r *matchRequest) decode(b []byte) (err error) {
	r.matching = matchings.Get().(*matching)
	r.id, err = r.query.Decode(b)
	return err
}

// match answers the query of m. It calls send with the response, which send must not keep, and its encoded size.
func (s *Server) match(ctx context.Context, m *matching, send func(*match.Response, int)) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	q, r := &m.query, &m.response
	if q.BlockHashes > 0 && !s.index.KeepsBlockHashes() {
		return callerror.InvalidField(s.journal.Bounds(), "max_block_hashes", "%d is not allowed: this server does not keep block hashes: want 0, or retain_block_hashes: true in its configuration", q.BlockHashes)
	}
	if violations := q.Check(); violations != nil {
		return callerror.InvalidFields(violations, s.journal.Bounds())
	}
	releaseBytes, err := s.reserveMatch(ctx, q.Bytes)
	if err != nil {
		return err
	}
	defer releaseBytes()
	if q.After != nil {
		if err := s.awaitPosition(ctx, q.After, q.MaxWait()); err != nil {
			return err
		}
	}
	release, err := s.queries.matches.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		return err
	}
	defer release()
	start := time.Now()
	r.Epoch, r.WithModel, r.WithHashes, r.Standing = s.journal.Bounds().Epoch, q.Model == "", q.BlockHashes > 0, s.standing.lookup(start)
	q.Now, q.Pools = start, true
	r.Seq = s.index.Match(&q.Query, &r.Matches)
	if r.Matches.Exceeded {
		return callerror.InvalidField(s.journal.Bounds(), "prompts",
			"the blocks of these block hashes have unknown content, and need more than %d lookups in all workers: send fewer hashes, or name fewer workers", match.MaxLookups)
	}
	size := r.Size()
	if size > callerror.MaxResponse {
		return callerror.LargeResponse(s.journal.Bounds(), "the matches", "set a limit, name workers, or match fewer prompts")
	}
	send(r, size)
	s.metrics.matched(&q.Query, r, time.Since(start))
	return nil
}

// reserveMatch reserves the memory of a request. The caller calls release if err is nil.
func (s *Server) reserveMatch(ctx context.Context, bytes int64) (release func(), err error) {
	release, exceeded := s.quotas.matchBytes.Reserve(ctx, bytes)
	if exceeded > 0 {
		return nil, callerror.New(callerror.TooManyQueries, s.journal.Bounds(),
			"the requests of MatchPrefix in progress take more than %d bytes, which is the limit; try again later", exceeded)
	}
	return release, nil
}

// AcquireMatch waits until an adapter may match a request, whose memory in bytes the caller estimates. The limits are those of
// MatchPrefix. The caller calls release after the match if err is nil, and else returns err to the client.
func (s *Server) AcquireMatch(ctx context.Context, bytes int64) (release func(), err error) {
	releaseBytes, err := s.reserveMatch(ctx, bytes)
	if err != nil {
		return nil, err
	}
	releaseSlot, err := s.queries.matches.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		releaseBytes()
		return nil, err
	}
	return func() {
		releaseSlot()
		releaseBytes()
	}, nil
}

// A call that waits for a position which is more than nearEntries ahead looks at the newest one at an interval, so that calls that wait for one which will
// not come cost nothing for each entry.
const (
	nearEntries = 64
	farInterval = 10 * time.Millisecond
)

// awaitPosition waits until the index has the entries up to a position.
func (s *Server) awaitPosition(ctx context.Context, p *kvcastv1.Position, maxWait time.Duration) error {
	b := s.journal.Bounds()
	if err := checkEpoch(p, b); err != nil {
		return err
	}
	if b.Newest >= p.GetSeq() {
		return nil
	}
	timeout, far := time.NewTimer(maxWait), time.NewTimer(0)
	defer timeout.Stop()
	defer far.Stop()
	for {
		changed := s.journal.Changed()
		if b = s.journal.Bounds(); b.Newest >= p.GetSeq() {
			return nil
		}
		if p.GetSeq()-b.Newest > nearEntries {
			changed = nil
			far.Reset(farInterval)
		}
		select {
		case <-changed:
		case <-far.C:
		case <-timeout.C:
			return callerror.New(callerror.PositionNotReached, b, "position %d is not reached after %v: the newest entry is %d; try again, or match without a position",
				p.GetSeq(), maxWait, b.Newest)
		case <-s.streams.draining:
			return callerror.New(callerror.ShuttingDown, b, "the server is shutting down; try again when a server is back")
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

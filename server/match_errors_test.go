package server_test

import (
	"context"
	"errors"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// matchFailures are the rows of MatchPrefix and MatchPrefixes.
func matchFailures() []failure {
	after := func(p *kvcastv1.Position, wait time.Duration) *kvcastv1.MatchPrefixRequest {
		req := matchOf(1)
		req.After, req.MaxWaitNano = p, uint64(wait)
		return req
	}
	both := &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{1}}, {TokenIds: []uint32{1}, BlockHashes: []uint64{1}}}}
	return []failure{
		{
			reason: "INVALID_ARGUMENT", name: "MatchPrefix, no prompt", code: codes.InvalidArgument, says: "prompts: 0 prompts are not allowed",
			call: matchFails(&kvcastv1.MatchPrefixRequest{}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "MatchPrefix, two forms", code: codes.InvalidArgument, says: "prompts[1].block_hashes: is given with token_ids",
			call: matchFails(both),
		},
		{
			reason: "INVALID_ARGUMENT", name: "MatchPrefixes, two forms", code: codes.InvalidArgument, says: "prompts[1].block_hashes: is given with token_ids",
			call: matchesFail(both),
		},
		{
			reason: "INVALID_ARGUMENT", name: "MatchPrefixes, no request", code: codes.InvalidArgument, says: "prompts: 0 prompts are not allowed",
			call: matchesFail(nil),
		},
		{
			reason: "INVALID_ARGUMENT", name: "MatchPrefix, many blocks of unknown content", code: codes.InvalidArgument, says: "need more than 131072 lookups in all workers: send fewer hashes",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				h.addWorker()
				hashes := make([]uint64, 1<<16)
				for i := range hashes {
					hashes[i] = uint64(i + 1)
				}
				for rank := range uint32(2) {
					h.lane.Batch(&feed.Batch{Rank: rank, Events: []wire.Event{{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes}}})
				}
				_, err := h.client.MatchPrefix(t.Context(), &kvcastv1.MatchPrefixRequest{
					Prompts: []*kvcastv1.Prompt{{BlockHashes: hashes}}, After: &kvcastv1.Position{Seq: 3},
				})
				return h, err
			},
		},
		{
			reason: "EPOCH_MISMATCH", name: "MatchPrefix", code: codes.FailedPrecondition, says: `"feed"`,
			call: matchFails(after(&kvcastv1.Position{Epoch: "feed"}, 0)),
		},
		{
			reason: "POSITION_NOT_REACHED", name: "MatchPrefix", code: codes.DeadlineExceeded, says: "position 9 is not reached after 1ms: the newest entry is 0",
			call: matchFails(after(&kvcastv1.Position{Seq: 9}, time.Millisecond)),
		},
		{
			reason: "POSITION_NOT_REACHED", name: "MatchPrefixes", code: codes.DeadlineExceeded, says: "position 9 is not reached",
			call: matchesFail(after(&kvcastv1.Position{Seq: 9}, time.Millisecond)),
		},
		{
			reason: "STARTING", name: "MatchPrefix", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				_, err := h.client.MatchPrefix(t.Context(), matchOf(1))
				return h, err
			},
		},
		{
			reason: "STARTING", name: "MatchPrefixes", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				stream, err := h.client.MatchPrefixes(t.Context())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "SHUTTING_DOWN", name: "MatchPrefix while it waits for a position", code: codes.Unavailable, says: "try again when a server is back",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				waits := h.matchBytes()
				ended := make(chan error, 1)
				go func() {
					_, err := h.client.MatchPrefix(context.Background(), after(&kvcastv1.Position{Seq: 9}, 10*time.Second))
					ended <- err
				}()
				for h.matchBytes() == waits { // the call has not arrived yet
				}
				go h.Server.Shutdown(t.Context())
				return h, <-ended
			},
		},
		{
			reason: "SHUTTING_DOWN", name: "MatchPrefixes", code: codes.Unavailable, says: "send the unanswered requests when a server is back",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				stream := h.matchPrefixes()
				stream.match(matchOf(1))
				go h.Server.Shutdown(t.Context())
				_, err := stream.Recv()
				return h, err
			},
		},
		{
			reason: "MAX_CONNECTION_AGE", name: "MatchPrefixes", code: codes.Unavailable, says: "send the unanswered requests over a new connection",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Limits: server.Limits{MaxConnectionAge: 50 * time.Millisecond, MaxConnectionAgeGrace: time.Second}}, journal.Config{})
				_, err := h.matchPrefixes().Recv()
				return h, err
			},
		},
		{
			reason: "TOO_MANY_STREAMS", name: "MatchPrefixes", code: codes.ResourceExhausted, says: "128 MatchPrefixes streams are open from this address, which is the limit",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				for range 128 {
					h.matchPrefixes().match(matchOf(1))
				}
				_, err := h.matchPrefixes().Recv()
				return h, err
			},
		},
		{
			reason: "TOO_MANY_QUERIES", name: "MatchPrefix", code: codes.ResourceExhausted, says: "take more than 100000 bytes, which is the limit; try again later",
			call: tooManyMatches,
		},
		{
			reason: "RESPONSE_TOO_LARGE", name: "MatchPrefix", code: codes.ResourceExhausted, says: "set a limit, name workers, or match fewer prompts",
			call: func(t *testing.T) (*fixture, error) {
				h, req := largeMatches(t)
				_, err := h.client.MatchPrefix(t.Context(), req)
				return h, err
			},
		},
		{
			reason: "SLOW_SUBSCRIBER", name: "MatchPrefixes", code: codes.ResourceExhausted, says: "the client did not read for 100ms",
			call: slowMatcher,
		},
	}
}

func matchFails(req *kvcastv1.MatchPrefixRequest) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{}, journal.Config{})
		_, err := h.client.MatchPrefix(t.Context(), req)
		return h, err
	}
}

// matchesFail sends a valid request before the other, and one after it.
func matchesFail(req *kvcastv1.MatchPrefixRequest) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{}, journal.Config{})
		stream := h.matchPrefixes()
		stream.send(1, matchOf(1))
		stream.send(2, req)
		// The stream may have ended by now.
		if err := stream.Send(&kvcastv1.MatchPrefixesRequest{Id: 3, Request: matchOf(1)}); err != nil && !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		if m, err := stream.Recv(); err != nil || m.GetId() != 1 {
			t.Errorf("the request before: got %v, error %v", m, err)
		}
		_, err := stream.Recv()
		return h, err
	}
}

// tooManyMatches starts calls that wait for a position, until one is refused.
func tooManyMatches(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{Limits: server.Limits{MaxMatchBytes: 100_000}}, journal.Config{})
	req := matchOf(make([]uint64, 5000)...) // some 56 KB in memory
	req.After, req.MaxWaitNano = &kvcastv1.Position{Seq: 1}, uint64(10*time.Second)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := h.client.MatchPrefix(ctx, req)
			ended <- err
		}()
	}
	err := <-ended
	cancel()
	<-ended
	return h, err
}

// largeMatches returns a server and a request whose response would exceed 4 MiB.
func largeMatches(t *testing.T) (*fixture, *kvcastv1.MatchPrefixRequest) {
	t.Helper()
	h := overTCP(t, server.Config{Limits: server.Limits{StallTimeout: 100 * time.Millisecond}}, journal.Config{})
	lane := h.Pipeline.AddWorker(feed.Worker{Name: "w", Endpoint: strings.Repeat("e", 70_000)})
	h.batch(lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{1}, TokensHashes: []uint64{1}, BlockSize: 16})
	req := matchOf(1)
	for len(req.Prompts) < 64 {
		req.Prompts = append(req.Prompts, req.Prompts[0])
	}
	return h, req
}

// slowMatcher sends requests and reads no answer.
func slowMatcher(t *testing.T) (*fixture, error) {
	h, req := largeMatches(t)
	req.Prompts = req.Prompts[:50]
	stream := h.withSmallWindow().matchPrefixes()
	for id := range uint64(4) {
		stream.send(id, req)
	}
	for h.metric("kvcast_server_stalled_streams_total") == 0 { // the server still waits
	}
	for {
		if _, err := stream.Recv(); err != nil {
			return h, err
		}
	}
}

// TestMatchesOfAdaptersAreLimited acquires matches until memory or slots are used up, and again after their release.
func TestMatchesOfAdaptersAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t, server.Config{Limits: server.Limits{MaxMatchBytes: 100}}, journal.Config{}).Server
		acquire := func(bytes int64, want codes.Code) (release func()) {
			t.Helper()
			release, err := s.AcquireMatch(t.Context(), bytes)
			if status.Code(err) != want {
				t.Errorf("got %v, want %s", err, want)
			}
			return release
		}
		release := acquire(60, codes.OK)
		acquire(60, codes.ResourceExhausted)
		release()
		releases := make([]func(), max(2, runtime.GOMAXPROCS(0))) // those of an address
		for i := range releases {
			releases[i] = acquire(1, codes.OK)
		}
		acquire(1, codes.ResourceExhausted) // after 5 s
		for _, release := range releases {
			release()
		}
		acquire(100, codes.OK)()
	})
}

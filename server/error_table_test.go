package server_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/server/registration"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// failing makes a call that must fail. It returns the fixture of the server and the error.
type failing func(t *testing.T) (*fixture, error)

// failure is a row of the error table.
type failure struct {
	reason string
	name   string
	code   codes.Code
	says   string
	call   failing
	moving bool // entries are appended after the error
}

// TestErrorContract has at least one row for each reason of the contract.
func TestErrorContract(t *testing.T) {
	t.Parallel()
	seq := func(n uint64) *kvcastv1.Position { return &kvcastv1.Position{Seq: n} }
	feed := func(n uint64) *kvcastv1.Position { return &kvcastv1.Position{Epoch: "feed", Seq: n} }
	filter := func(tiers ...kvcastv1.Tier) *kvcastv1.Filter { return &kvcastv1.Filter{Tiers: tiers} }
	for _, tt := range append([]failure{
		{
			reason: "POSITION_COMPACTED", name: "Subscribe, one before the oldest retained", code: codes.OutOfRange, says: "start from a snapshot",
			call: subscribeFails(func(b journal.Bounds) *kvcastv1.SubscribeRequest { return orFail(after(seq(b.Oldest - 2))) }),
		},
		{
			reason: "POSITION_COMPACTED", name: "Subscribe, entries evicted while streaming", code: codes.OutOfRange, says: "start from a snapshot",
			call: compactedInMidStream, moving: true,
		},
		{
			reason: "POSITION_COMPACTED", name: "Replay, one before the oldest retained", code: codes.OutOfRange, says: "start from a snapshot",
			call: replayFails(func(b journal.Bounds) *kvcastv1.ReplayRequest {
				return &kvcastv1.ReplayRequest{After: seq(b.Oldest - 2)}
			}),
		},
		{
			reason: "POSITION_COMPACTED", name: "Replay, until a seq that is not retained", code: codes.OutOfRange, says: "start from a snapshot",
			call: replayFails(func(b journal.Bounds) *kvcastv1.ReplayRequest {
				return &kvcastv1.ReplayRequest{Until: seq(b.Oldest - 2)}
			}),
		},
		{
			reason: "POSITION_AHEAD", name: "Subscribe, one beyond the newest", code: codes.OutOfRange, says: "newest entry 501",
			call: subscribeFails(func(b journal.Bounds) *kvcastv1.SubscribeRequest { return after(seq(b.Newest + 1)) }),
		},
		{
			reason: "POSITION_AHEAD", name: "Subscribe, the largest seq", code: codes.OutOfRange, says: "start from a snapshot",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest { return orFail(after(seq(1<<64 - 1))) }),
		},
		{
			reason: "POSITION_AHEAD", name: "Replay, one beyond the newest", code: codes.OutOfRange, says: "newest entry 501",
			call: replayFails(func(b journal.Bounds) *kvcastv1.ReplayRequest {
				return &kvcastv1.ReplayRequest{After: seq(b.Newest + 1)}
			}),
		},
		{
			reason: "POSITION_AHEAD", name: "Replay, until a seq beyond the newest", code: codes.OutOfRange, says: "newest entry 501",
			call: replayFails(func(b journal.Bounds) *kvcastv1.ReplayRequest {
				return &kvcastv1.ReplayRequest{Until: seq(b.Newest + 1)}
			}),
		},
		{
			reason: "BEHIND", name: "Subscribe", code: codes.Unavailable, says: "position 1 is not read yet: the newest entry is 0",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Newest: func(context.Context) (uint64, error) { return 0, errors.New("no server") }}, journal.Config{})
				stream, err := h.client.Subscribe(t.Context(), after(seq(1)))
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "OUTDATED", name: "Subscribe", code: codes.Unavailable, says: "resume after the last position at another server",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				h.Server.SetOutdatedAfter(time.Now())
				stream, err := h.client.Subscribe(t.Context(), latest())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "EPOCH_MISMATCH", name: "Subscribe", code: codes.FailedPrecondition, says: `"feed"`,
			call: subscribeFails(func(b journal.Bounds) *kvcastv1.SubscribeRequest { return orFail(after(feed(b.Newest))) }),
		},
		{
			reason: "EPOCH_MISMATCH", name: "Subscribe, a very long epoch", code: codes.FailedPrecondition, says: "start from a snapshot",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest {
				return orFail(after(&kvcastv1.Position{Epoch: strings.Repeat("e", 1<<16)}))
			}),
		},
		{
			reason: "EPOCH_MISMATCH", name: "Replay", code: codes.FailedPrecondition, says: `"feed"`,
			call: replayFails(func(journal.Bounds) *kvcastv1.ReplayRequest { return &kvcastv1.ReplayRequest{After: feed(0)} }),
		},
		{
			reason: "EPOCH_MISMATCH", name: "Replay, until a position of another epoch", code: codes.FailedPrecondition, says: `"feed"`,
			call: replayFails(func(journal.Bounds) *kvcastv1.ReplayRequest { return &kvcastv1.ReplayRequest{Until: feed(0)} }),
		},
		{
			reason: "SLOW_SUBSCRIBER", name: "Subscribe", code: codes.ResourceExhausted, says: "resume after the last position, and read faster",
			call: slowSubscriber, moving: true,
		},
		{
			reason: "TOO_MANY_SUBSCRIBERS", name: "Subscribe", code: codes.ResourceExhausted, says: "2 subscribers are connected, which is the limit; try again later",
			call: tooManySubscribers,
		},
		{
			reason: "TOO_MANY_SUBSCRIBERS", name: "Replay", code: codes.ResourceExhausted, says: "1 replays are being sent, which is the limit; try again later",
			call: tooManyReplays,
		},
		{
			reason: "TOO_MANY_SNAPSHOTS", name: "Snapshot", code: codes.ResourceExhausted, says: "1 snapshots are being sent, which is the limit, and none has ended within 20ms; try again later",
			call: func(t *testing.T) (*fixture, error) {
				h := sendingASnapshot(t)
				stream, err := h.client.Snapshot(t.Context(), &kvcastv1.SnapshotRequest{})
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "TOO_MANY_SNAPSHOTS", name: "Subscribe from a snapshot", code: codes.ResourceExhausted, says: "or resume after a position",
			call: func(t *testing.T) (*fixture, error) {
				h := sendingASnapshot(t)
				_, err := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil)).messages(2)
				return h, err
			},
		},
		{
			reason: "TOO_MANY_HOLDERS", name: "LookupBlocks", code: codes.ResourceExhausted, says: "more than 25000 holders, which is the limit; ask for fewer blocks",
			call: tooManyHolders,
		},
		{
			reason: "TOO_MANY_HOLDERS", name: "LookupBlocks, holders with long names", code: codes.ResourceExhausted, says: "which take more than 4 MiB, which is the limit; ask for fewer blocks",
			call: holdersOfLongNames,
		},
		{
			reason: "TOO_MANY_QUERIES", name: "LookupBlocks by tokens hash", code: codes.ResourceExhausted, says: "1 queries of this kind are running, which is the limit, and 64 more are waiting; try again later",
			call: tooManyQueries,
		},
		{
			reason: "RESPONSE_TOO_LARGE", name: "ListWorkers", code: codes.ResourceExhausted, says: "narrow the filter to a model, or to some of the workers",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Sources: manySources}, journal.Config{})
				_, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
				return h, err
			},
		},
		{
			reason: "TOO_MANY_STREAMS", name: "Watch", code: codes.ResourceExhausted, says: "1 health watches are open from this address, which is the limit; try again later, or raise the limit",
			call: tooManyWatches(server.Config{Limits: server.Limits{MaxConnectionsPerAddress: 1}}),
		},
		{
			reason: "TOO_MANY_STREAMS", name: "Watch, limit of all addresses", code: codes.ResourceExhausted, says: "1 health watches are open, which is the limit; try again later, or raise the limit",
			call: tooManyWatches(server.Config{Limits: server.Limits{MaxConnections: 1}}),
		},
		{
			reason: "FILTERS_TOO_LARGE", name: "ListWorkers while a subscriber has a large filter", code: codes.ResourceExhausted, says: "name fewer workers and models",
			call: filtersTooLarge,
		},
		{
			reason: "STARTING", name: "Subscribe", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				stream, err := h.client.Subscribe(t.Context(), latest())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "STARTING", name: "Replay", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				stream, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{})
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "STARTING", name: "Snapshot", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				stream, err := h.client.Snapshot(t.Context(), &kvcastv1.SnapshotRequest{})
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "STARTING", name: "LookupBlocks", code: codes.Unavailable, says: "try again",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				_, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1}})
				return h, err
			},
		},
		{
			reason: "SHUTTING_DOWN", name: "Subscribe", code: codes.Unavailable, says: "resume after it when a server is back",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				s := h.subscribe(checker.New(checker.Options{}), earliest())
				if _, err := s.next(); err != nil {
					t.Fatal(err)
				}
				go h.Server.Shutdown(t.Context())
				_, err := s.next()
				return h, err
			},
		},
		{
			reason: "SHUTTING_DOWN", name: "Subscribe, stopped before it served", code: codes.Unavailable, says: "resume after it when a server is back",
			call: func(t *testing.T) (*fixture, error) {
				h := startingOverTCP(t, server.Config{})
				h.Server.StopServing()
				h.Server.StartServing() // no effect after StopServing
				stream, err := h.client.Subscribe(t.Context(), latest())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "NOT_SERVING", name: "Subscribe", code: codes.Unavailable, says: "call another one of the cluster",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{NoRouters: true}, journal.Config{})
				stream, err := h.client.Subscribe(t.Context(), latest())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "MAX_CONNECTION_AGE", name: "Subscribe", code: codes.Unavailable, says: "resume after the last position",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Limits: server.Limits{MaxConnectionAge: 50 * time.Millisecond, MaxConnectionAgeGrace: time.Second}}, journal.Config{})
				_, err := h.subscribe(checker.New(checker.Options{}), earliest()).messages(2)
				return h, err
			},
		},
		{
			reason: "INVALID_ARGUMENT", name: "Subscribe, an unknown gap policy", code: codes.InvalidArgument, says: "GAP_POLICY_FAIL",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest { return &kvcastv1.SubscribeRequest{GapPolicy: 9} }),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Subscribe, an unknown tier", code: codes.InvalidArgument, says: "filter.tiers[1]: 7 is not allowed: want TIER_DEVICE",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest {
				return &kvcastv1.SubscribeRequest{Filter: filter(1, 7)}
			}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Subscribe, a long client_id", code: codes.InvalidArgument, says: "client_id: it has 129 bytes: at most 128 are allowed",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest {
				return &kvcastv1.SubscribeRequest{ClientId: strings.Repeat("a", 129)}
			}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Subscribe, a client_id for no terminal", code: codes.InvalidArgument, says: `client_id: "\x1b[2J" is not allowed: want printable ASCII`,
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest {
				return &kvcastv1.SubscribeRequest{ClientId: "\x1b[2J"}
			}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Subscribe, too many names", code: codes.InvalidArgument, says: "at most 10000",
			call: subscribeFails(func(journal.Bounds) *kvcastv1.SubscribeRequest {
				return &kvcastv1.SubscribeRequest{Filter: &kvcastv1.Filter{Workers: make([]string, 10_001)}}
			}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Replay, until before after", code: codes.InvalidArgument, says: "until: 480 is not allowed: want 490",
			call: replayFails(func(journal.Bounds) *kvcastv1.ReplayRequest {
				return &kvcastv1.ReplayRequest{After: seq(490), Until: seq(480)}
			}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "Replay, no tier", code: codes.InvalidArgument, says: "filter.tiers[0]: TIER_UNSPECIFIED is not allowed",
			call: replayFails(func(journal.Bounds) *kvcastv1.ReplayRequest { return &kvcastv1.ReplayRequest{Filter: filter(0)} }),
		},
		{
			reason: "INVALID_ARGUMENT", name: "LookupBlocks, no hash", code: codes.InvalidArgument, says: "no hash is given",
			call: lookupFails(&kvcastv1.LookupBlocksRequest{}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "LookupBlocks, too many hashes", code: codes.InvalidArgument, says: "at most 10000",
			call: lookupFails(&kvcastv1.LookupBlocksRequest{BlockHashes: make([]uint64, 10_001)}),
		},
		{
			reason: "INVALID_ARGUMENT", name: "LookupBlocks, an unknown tier", code: codes.InvalidArgument, says: "filter.tiers[0]: 9 is not allowed",
			call: lookupFails(&kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1}, Filter: filter(9)}),
		},
		{
			reason: "UNIMPLEMENTED", name: "RegisterWorker", code: codes.Unimplemented, says: "name the worker in its configuration",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				_, err := kvcastv1.NewWorkerServiceClient(h.conn).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{})
				return h, err
			},
		},
		{
			reason: "UNIMPLEMENTED", name: "DeregisterWorker", code: codes.Unimplemented, says: "start it without the worker",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{}, journal.Config{})
				_, err := kvcastv1.NewWorkerServiceClient(h.conn).DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{})
				return h, err
			},
		},
		{
			reason: "WORKER_EXISTS", name: "RegisterWorker", code: codes.AlreadyExists, says: `worker "v" exists`,
			call: registerFails(config.ErrWorkerExists, spec()),
		},
		{
			reason: "TOO_MANY_WORKERS", name: "RegisterWorker", code: codes.ResourceExhausted, says: "deregister another",
			call: registerFails(config.ErrTooManyWorkers, spec()),
		},
		{
			reason: "TOO_MANY_SOURCES", name: "RegisterWorker", code: codes.ResourceExhausted, says: "--ingest-max-sources",
			call: registerFails(config.ErrTooManySources, spec()),
		},
		{
			reason: "WORKERS_TOO_LARGE", name: "RegisterWorker", code: codes.ResourceExhausted, says: "--ingest-worker-bytes",
			call: registerFails(config.ErrWorkersTooLarge, spec()),
		},
		{
			reason: "NOT_STORED", name: "RegisterWorker", code: codes.Unavailable, says: "cannot be stored: not stored: disk full; try again",
			call: registerFails(fmt.Errorf("%w: disk full", registration.ErrNotStored), spec()),
		},
		{
			reason: "NOT_INGESTING", name: "RegisterWorker", code: codes.FailedPrecondition, says: "ask the server that reads them",
			call: registerFails(registration.ErrNotIngesting, spec()),
		},
		{
			reason: "SHUTTING_DOWN", name: "RegisterWorker", code: codes.Unavailable, says: "try again when a server is back",
			call: registerFails(config.ErrEnded, spec()),
		},
		{
			reason: "INTERNAL", name: "RegisterWorker", code: codes.Internal, says: "see its log",
			call: registerFails(errors.New("broken"), spec()),
		},
		{
			reason: "INVALID_ARGUMENT", name: "RegisterWorker, no worker", code: codes.InvalidArgument, says: "worker: is missing",
			call: registerFails(nil, nil),
		},
		{
			reason: "WORKER_NOT_FOUND", name: "DeregisterWorker", code: codes.NotFound, says: `worker "absent" does not exist; ListWorkers lists`,
			call: deregisterFails(config.ErrNoWorker, "absent"),
		},
		{
			reason: "WORKER_NOT_FOUND", name: "DeregisterWorker, an engine that connects to the server", code: codes.NotFound, says: "connects to a port of the server",
			call: deregisterFails(config.ErrNoWorker, "w"),
		},
		{
			reason: "SHUTTING_DOWN", name: "DeregisterWorker", code: codes.Unavailable, says: "shutting down",
			call: deregisterFails(config.ErrEnded, "w"),
		},
		{
			reason: "INVALID_ARGUMENT", name: "DeregisterWorker without a name", code: codes.InvalidArgument, says: "name: is missing",
			call: deregisterFails(nil, ""),
		},
		{
			reason: "INTERNAL", name: "Subscribe, a panic", code: codes.Internal, says: "see its log",
			call: panicsInTwoCalls,
		},
		{
			reason: "UNAUTHENTICATED", name: "Subscribe without a token", code: codes.Unauthenticated, says: "send it in the header authorization: Bearer TOKEN",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
				stream, err := h.client.Subscribe(t.Context(), latest())
				return h, firstError(t, err, stream.Recv)
			},
		},
		{
			reason: "UNAUTHENTICATED", name: "Subscribe with a password", code: codes.Unauthenticated, says: "authorization: Bearer TOKEN",
			call: subscribeAs("Basic " + routersToken),
		},
		{
			reason: "UNAUTHENTICATED", name: "Subscribe with an unknown token", code: codes.Unauthenticated, says: "ask the server's operator for one",
			call: subscribeAs("Bearer " + routersToken + "x"),
		},
		{
			reason: "UNAUTHENTICATED", name: "GetStatus with part of a token", code: codes.Unauthenticated, says: "ask the server's operator for one",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
				_, err := kvcastv1.NewRouterEventServiceClient(h.as("Bearer "+routersToken[1:])).GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
				return h, err
			},
		},
		{
			reason: "PERMISSION_DENIED", name: "RegisterWorker by a router", code: codes.PermissionDenied, says: "role is router, which may not call kvcast.v1.WorkerService; ask",
			call: func(t *testing.T) (*fixture, error) {
				h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
				_, err := kvcastv1.NewWorkerServiceClient(h.as("Bearer "+routersToken)).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{})
				return h, err
			},
		},
	}, matchFailures()...) {
		t.Run(tt.reason+"/"+tt.name, func(t *testing.T) {
			h, err := tt.call(t)
			wantStatus(t, err, tt.code, tt.reason)
			s, _ := status.FromError(err)
			if !strings.Contains(s.Message(), tt.says) {
				t.Errorf("message: got %q, want %q in it", s.Message(), tt.says)
			}
			for _, d := range s.Details() {
				info, ok := d.(*errdetails.ErrorInfo)
				if !ok || slices.Contains(publicReasons, tt.reason) {
					continue
				}
				got, _ := boundsIn(info)
				want := h.Journal.Bounds()
				if tt.moving && got.Oldest <= want.Oldest && got.Newest <= want.Newest {
					got.Oldest, got.Newest = want.Oldest, want.Newest
				}
				if got != want {
					t.Errorf("metadata: got %+v, want %+v", got, want)
				}
			}
		})
	}
}

// firstError returns the error of a stream's first receive.
func firstError[M any](t *testing.T, err error, receive func() (M, error)) error {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	_, err = receive()
	return err
}

// retainsLittle starts a server whose first entries are evicted.
func retainsLittle(t *testing.T) *fixture {
	t.Helper()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 16 << 10})
	h.addWorker()
	h.fill(500)
	if b := h.Journal.Bounds(); b.Oldest < 3 {
		t.Fatalf("oldest entry: got %d, want evicted entries", b.Oldest)
	}
	return h
}

func subscribeFails(req func(journal.Bounds) *kvcastv1.SubscribeRequest) failing {
	return func(t *testing.T) (*fixture, error) {
		h := retainsLittle(t)
		stream, err := h.client.Subscribe(t.Context(), req(h.Journal.Bounds()))
		return h, firstError(t, err, stream.Recv)
	}
}

func replayFails(req func(journal.Bounds) *kvcastv1.ReplayRequest) failing {
	return func(t *testing.T) (*fixture, error) {
		h := retainsLittle(t)
		stream, err := h.client.Replay(t.Context(), req(h.Journal.Bounds()))
		return h, firstError(t, err, stream.Recv)
	}
}

func lookupFails(req *kvcastv1.LookupBlocksRequest) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{}, journal.Config{})
		_, err := h.client.LookupBlocks(t.Context(), req)
		return h, err
	}
}

func subscribeAs(authorization string) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
		stream, err := kvcastv1.NewRouterEventServiceClient(h.as(authorization)).Subscribe(t.Context(), latest())
		return h, firstError(t, err, stream.Recv)
	}
}

func compactedInMidStream(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 256 << 10})
	s := h.subscribe(checker.New(checker.Options{}), orFail(earliest()))
	if _, err := s.next(); err != nil {
		t.Fatal(err)
	}
	h.addWorker()
	h.flood()
	return h, s.end()
}

func slowSubscriber(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{Limits: server.Limits{StallTimeout: 100 * time.Millisecond}}, journal.Config{MaxBytes: 1 << 30})
	h.addWorker()
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 1)
	h.flood()
	for h.subscribers(t) > 0 { // the handler has not returned yet
	}
	return h, s.end()
}

// tooManyReplays starts a replay that the client does not read, and a second replay.
func tooManyReplays(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSubscribers: 1}}, journal.Config{MaxBytes: 128 << 20})
	h.addWorker()
	h.flood()
	first, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{})
	if err == nil {
		_, err = first.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	stream, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{})
	return h, firstError(t, err, stream.Recv)
}

func tooManySubscribers(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSubscribers: 2}}, journal.Config{})
	for range 2 {
		if _, err := h.subscribe(checker.New(checker.Options{}), earliest()).next(); err != nil {
			t.Fatal(err)
		}
	}
	_, err := h.subscribe(checker.New(checker.Options{}), earliest()).next()
	return h, err
}

// sendingASnapshot starts a server that sends its maximum of one snapshot.
func sendingASnapshot(t *testing.T) *fixture {
	t.Helper()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSnapshotWait: 20 * time.Millisecond}}, journal.Config{})
	h.addWorker()
	h.storeLargeBlocks()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := h.client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: &kvcastv1.Filter{Workers: []string{"w"}}})
	if err := firstError(t, err, stream.Recv); err != nil {
		t.Fatal(err)
	}
	return h
}

func tooManyHolders(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{}, journal.Config{})
	hashes := make([]uint64, 10_000)
	for i := range hashes {
		hashes[i] = uint64(i)
	}
	for _, name := range []string{"a", "b", "c"} {
		h.batch(h.Pipeline.AddWorker(feed.Worker{Name: name}), wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, BlockSize: 16})
	}
	_, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes})
	return h, err
}

// holdersOfLongNames looks up fewer holders than the limit, with long names.
func holdersOfLongNames(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{}, journal.Config{})
	hashes := make([]uint64, 10_000)
	for i := range hashes {
		hashes[i] = uint64(i)
	}
	lane := h.Pipeline.AddWorker(feed.Worker{Name: "w", Model: strings.Repeat("m", config.MaxModelBytes)})
	h.batch(lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, BlockSize: 16})
	_, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes})
	return h, err
}

// tooManyQueries starts one lookup more than may run and wait.
func tooManyQueries(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.append(1)
	open := h.queries.close()
	ended := make(chan error, 66)
	for range cap(ended) {
		go func() {
			_, err := h.client.LookupBlocks(context.Background(), &kvcastv1.LookupBlocksRequest{TokensHashes: []uint64{1}})
			ended <- err
		}()
	}
	err := <-ended
	open()
	for range cap(ended) - 1 {
		if err := <-ended; err != nil {
			t.Errorf("another lookup: %v", err)
		}
	}
	return h, err
}

func tooManyWatches(cfg server.Config) failing {
	return func(t *testing.T) (*fixture, error) {
		h := overTCP(t, cfg, journal.Config{})
		first, err := healthv1.NewHealthClient(h.conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
		if err := firstError(t, err, first.Recv); err != nil {
			t.Fatal(err)
		}
		second, err := healthv1.NewHealthClient(h.conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
		return h, firstError(t, err, second.Recv)
	}
}

func filtersTooLarge(t *testing.T) (*fixture, error) {
	h := overTCP(t, server.Config{Limits: server.Limits{MaxFilterBytes: server.MinFilterBytes}}, journal.Config{})
	req := earliest()
	req.Filter = wide()
	if _, err := h.subscribe(checker.New(checker.Options{}), req).next(); err != nil {
		t.Fatal(err)
	}
	_, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{Filter: wide()})
	return h, err
}

// brokenJournal panics in Read.
type brokenJournal struct{ *follow.Follower }

func (brokenJournal) Read(context.Context, journal.Query) (journal.Chunk, error) { panic("broken") }

// panicsInTwoCalls checks that a panic ends only its call, and that the error does not describe the panic.
func panicsInTwoCalls(t *testing.T) (h *fixture, err error) {
	h = start(t, harness.InstanceConfig{WrapJournal: func(j *follow.Follower) server.Journal { return brokenJournal{j} }})
	for range 2 {
		err = h.subscribe(checker.New(checker.Options{}), earliest()).end()
		if strings.Contains(err.Error(), "broken") || strings.Contains(err.Error(), "goroutine") {
			t.Errorf("the error reveals details of the panic: %v", err)
		}
	}
	return h, err
}

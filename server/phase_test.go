package server_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

func TestHealthFollowsPhase(t *testing.T) {
	t.Parallel()
	h := startingOverTCP(t, server.Config{})
	want := func(when string, want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for _, service := range []string{"", kvcastv1.RouterEventService_ServiceDesc.ServiceName} {
			got, err := healthv1.NewHealthClient(h.conn).Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			if err != nil || got.GetStatus() != want {
				t.Errorf("health of %q %s: got %v, %v; want %v", service, when, got.GetStatus(), err, want)
			}
		}
	}
	want("at the start", healthv1.HealthCheckResponse_NOT_SERVING)
	h.Server.StartServing()
	want("after StartServing", healthv1.HealthCheckResponse_SERVING)
	h.Server.SetStalled(true)
	want("while the journal is stalled", healthv1.HealthCheckResponse_NOT_SERVING)
	h.Server.SetStalled(false)
	want("after the journal was stalled", healthv1.HealthCheckResponse_SERVING)
	h.Server.StopServing()
	want("after StopServing", healthv1.HealthCheckResponse_NOT_SERVING)
	h.Server.StartServing()
	want("after a second StartServing", healthv1.HealthCheckResponse_NOT_SERVING)
	h.Server.SetStalled(true)
	h.Server.SetStalled(false)
	want("when the journal was stalled after StopServing", healthv1.HealthCheckResponse_NOT_SERVING)
}

func TestServerThatStartsWithAStalledJournalIsNotReady(t *testing.T) {
	t.Parallel()
	h := startingOverTCP(t, server.Config{})
	health := func() healthv1.HealthCheckResponse_ServingStatus {
		got, err := healthv1.NewHealthClient(h.conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return got.GetStatus()
	}
	h.Server.SetStalled(true)
	h.Server.StartServing()
	if got := health(); got != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health while the journal is stalled: %v", got)
	}
	h.Server.SetStalled(false)
	if got := health(); got != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health after it was stalled: %v", got)
	}
}

func TestStatusHasTheRecovery(t *testing.T) {
	t.Parallel()
	want := &kvcastv1.Recovery{Workers: 2, AppliedSeq: 3, NewestSeq: 9}
	h := startingOverTCP(t, server.Config{Recovery: func() *kvcastv1.Recovery { return want }})
	s, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil || !proto.Equal(s.GetRecovery(), want) {
		t.Errorf("got %v, %v, want the recovery %v", s.GetRecovery(), err, want)
	}
}

// TestStartingServerAnswersQueries makes the calls that a starting server answers. TestErrorContract makes the calls
// that it refuses.
func TestStartingServerAnswersQueries(t *testing.T) {
	t.Parallel()
	h := startingOverTCP(t, server.Config{})
	h.addWorker()
	stream, err := h.client.Subscribe(t.Context(), latest())
	if err := firstError(t, err, stream.Recv); err == nil {
		t.Fatal("a subscriber was accepted")
	}
	s, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil || s.GetWorkers() != 1 || s.GetSubscribers() != 0 {
		t.Errorf("status: got %v, %v; want a worker and no subscriber", s, err)
	}
	w, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil || len(w.GetWorkers()) != 1 {
		t.Errorf("workers: got %v, %v; want one", w, err)
	}
	h.Server.StartServing()
	h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
}

// TestStoppingServerAnswers subscribes after StopServing, as clients do until load balancers react.
func TestStoppingServerAnswers(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.Server.StopServing()
	h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
}

// TestNoProgressWhileOutdated has a server that becomes outdated while nothing calls SetOutdatedAfter, as when its process stands still.
func TestNoProgressWhileOutdated(t *testing.T) {
	t.Parallel()
	for name, req := range map[string]*kvcastv1.SubscribeRequest{
		"without digests": latest(),
		"with digests":    {Start: latest().GetStart(), ProgressDigests: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := overTCP(t, server.Config{Limits: server.Limits{ProgressInterval: time.Millisecond}}, journal.Config{})
			h.addWorker()
			stream, err := h.client.Subscribe(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := stream.Recv(); err != nil || r.GetAccepted() == nil {
				t.Fatalf("got %v, error %v, want Accepted", r, err)
			}
			at := time.Now().Add(20 * time.Millisecond)
			h.Server.SetOutdatedAfter(at)
			for err == nil {
				_, err = stream.Recv()
			}
			wantStatus(t, err, codes.Unavailable, "OUTDATED")
			if time.Now().Before(at) {
				t.Error("the stream has ended before that")
			}
		})
	}
}

// TestOutdatedServerEndsItsStreams has a stream of each kind open, one before the server is outdated and one that begins while it is.
func TestOutdatedServerEndsItsStreams(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	open := func() map[string]func() error {
		t.Helper()
		entries, err := h.client.Subscribe(t.Context(), latest())
		if err != nil {
			t.Fatal(err)
		}
		matches, err := h.client.MatchPrefixes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return map[string]func() error{
			"Subscribe": func() error { _, err := entries.Recv(); return err },
			"MatchPrefixes": func() error {
				_ = matches.Send(&kvcastv1.MatchPrefixesRequest{Request: &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{BlockHashes: []uint64{1}}}}}) // Recv has the error
				_, err := matches.Recv()
				return err
			},
		}
	}
	streams := open()
	for kind, receive := range streams {
		if err := receive(); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
	}
	h.Server.SetOutdatedAfter(time.Now())
	for kind, receive := range streams {
		for err := error(nil); err == nil; {
			if err = receive(); err != nil {
				wantStatus(t, err, codes.Unavailable, "OUTDATED")
			}
		}
		t.Logf("%s has ended", kind)
	}
	if got := h.Server.Unready(); got == "" {
		t.Error("the server is ready")
	}
	streams = open()
	wantStatus(t, streams["Subscribe"](), codes.Unavailable, "OUTDATED")
	if err := streams["MatchPrefixes"](); err != nil {
		t.Errorf("MatchPrefixes: %v; the answers of an outdated server have an age", err)
	}
	for range 2 {
		h.Server.SetOutdatedAfter(time.Now().Add(time.Hour))
		for kind, receive := range open() {
			if err := receive(); err != nil {
				t.Errorf("%s afterwards: %v", kind, err)
			}
		}
		if got := h.Server.Unready(); got != "" {
			t.Errorf("the server is not ready: %s", got)
		}
	}
}

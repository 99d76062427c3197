package server_test

import (
	"testing"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
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

package server_test

import (
	"testing"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

func TestHealthFollowsPhase(t *testing.T) {
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
	h.Server.StopServing()
	want("after StopServing", healthv1.HealthCheckResponse_NOT_SERVING)
	h.Server.StartServing()
	want("after a second StartServing", healthv1.HealthCheckResponse_NOT_SERVING)
}

// TestStartingServerAnswersQueries makes the calls that a starting server answers. TestErrorContract makes the calls
// that it refuses.
func TestStartingServerAnswersQueries(t *testing.T) {
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
	h := overTCP(t, server.Config{}, journal.Config{})
	h.addWorker()
	h.Server.StopServing()
	h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
}

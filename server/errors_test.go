package server_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/checker"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// wantStatus checks the code, the reason and the rest of an error's ErrorInfo.
func wantStatus(t testing.TB, err error, code codes.Code, reason string) {
	t.Helper()
	var grpcErr interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &grpcErr) {
		t.Fatalf("got error %v, want a status", err)
	}
	s := grpcErr.GRPCStatus()
	if s.Code() != code {
		t.Errorf("code: got %v, want %v (%v)", s.Code(), code, err)
	}
	for _, d := range s.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok {
			continue
		}
		if info.GetReason() != reason || info.GetDomain() != server.Domain {
			t.Errorf("error info: got %s of %s, want %s of %s", info.GetReason(), info.GetDomain(), reason, server.Domain)
		}
		for _, key := range []string{"epoch", "oldest", "newest"} {
			if info.GetMetadata()[key] == "" {
				t.Errorf("error info: no %s in %v", key, info.GetMetadata())
			}
		}
		return
	}
	t.Errorf("no ErrorInfo in %v", err)
}

func TestSubscribeRefusals(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
	h.addWorker()
	h.fill(5000)
	b := h.journal.Bounds()
	if b.Oldest < 3 {
		t.Fatalf("oldest entry: got %d, want some evicted", b.Oldest)
	}
	for _, tt := range []struct {
		name   string
		req    *kvcastv1.SubscribeRequest
		code   codes.Code
		reason string
		says   string
	}{
		{"one before the oldest retained", failing(after(&kvcastv1.Position{Seq: b.Oldest - 2})), codes.OutOfRange, server.ReasonPositionCompacted, "start from a snapshot"},
		{"another epoch", failing(after(&kvcastv1.Position{Epoch: "feed", Seq: b.Newest})), codes.FailedPrecondition, server.ReasonEpochMismatch, `"feed"`},
		{"a very long epoch", failing(after(&kvcastv1.Position{Epoch: strings.Repeat("e", 1<<16)})), codes.FailedPrecondition, server.ReasonEpochMismatch, "start from a snapshot"},
		{"one beyond the newest", after(&kvcastv1.Position{Seq: b.Newest + 1}), codes.OutOfRange, server.ReasonPositionAhead, "newest entry 5001"},
		{"the largest seq", after(&kvcastv1.Position{Seq: 1<<64 - 1}), codes.OutOfRange, server.ReasonPositionAhead, "start from a snapshot"},
		{
			"digests", &kvcastv1.SubscribeRequest{ProgressDigests: true},
			codes.Unimplemented, server.ReasonUnimplemented, "leave it out",
		},
		{
			"an unknown gap policy", &kvcastv1.SubscribeRequest{GapPolicy: 9},
			codes.InvalidArgument, server.ReasonInvalidArgument, "GAP_POLICY_FAIL",
		},
		{
			"an unknown tier", &kvcastv1.SubscribeRequest{Filter: &kvcastv1.Filter{Tiers: []kvcastv1.Tier{1, 7}}},
			codes.InvalidArgument, server.ReasonInvalidArgument, "filter.tiers[1]: 7 is not allowed: want TIER_DEVICE",
		},
		{
			"too many names", &kvcastv1.SubscribeRequest{Filter: &kvcastv1.Filter{Workers: make([]string, 10_001)}},
			codes.InvalidArgument, server.ReasonInvalidArgument, "at most 10000",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stream, err := h.client.Subscribe(t.Context(), tt.req)
			if err != nil {
				t.Fatal(err)
			}
			_, err = stream.Recv()
			wantStatus(t, err, tt.code, tt.reason)
			if !strings.Contains(status.Convert(err).Message(), tt.says) {
				t.Errorf("message: got %q, want it to say %q", status.Convert(err).Message(), tt.says)
			}
		})
	}
}

func TestCallsNotBuiltSayWhatToUse(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{})
	w := kvcastv1.NewWorkerServiceClient(h.conn)
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"RegisterWorker":   func() error { _, err := w.RegisterWorker(ctx, &kvcastv1.RegisterWorkerRequest{}); return err },
		"DeregisterWorker": func() error { _, err := w.DeregisterWorker(ctx, &kvcastv1.DeregisterWorkerRequest{}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			err := call()
			wantStatus(t, err, codes.Unimplemented, server.ReasonUnimplemented)
			if got := status.Convert(err).Message(); !strings.HasPrefix(got, name+" is not built in this version; ") {
				t.Errorf("message: got %q, want what to use instead", got)
			}
		})
	}
}

func TestHealthFollowsTheServersLife(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{})
	client := healthv1.NewHealthClient(h.conn)
	for _, service := range []string{"", kvcastv1.RouterEventService_ServiceDesc.ServiceName} {
		got, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil || got.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("health of %q: got %v, %v; want SERVING", service, got.GetStatus(), err)
		}
	}
	h.server.StopServing()
	got, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || got.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("health after StopServing: got %v, %v; want NOT_SERVING", got.GetStatus(), err)
	}
}

func TestReflectionListsTheServices(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := reflectionv1.NewServerReflectionClient(h.conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{},
	}); err != nil {
		t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	got := make([]string, 0, 8)
	for _, s := range m.GetListServicesResponse().GetService() {
		got = append(got, s.GetName())
	}
	for _, want := range []string{"kvcast.v1.RouterEventService", "kvcast.v1.WorkerService", "grpc.health.v1.Health"} {
		if !slices.Contains(got, want) {
			t.Errorf("services: got %v, want %s among them", got, want)
		}
	}
}

func TestAdminPort(t *testing.T) {
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{Registerer: reg}, journal.Config{})
	h.addWorker()
	h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
	admin := h.server.NewAdmin(reg)
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		admin.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	for path, want := range map[string]string{
		"/healthz": "ok\n",
		"/readyz":  "ok\n",
		"/metrics": "kvcast_server_journal_newest_seq 1\n",
	} {
		if code, body := get(path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: got %d %q, want 200 with %q", path, code, body, want)
		}
	}
	h.server.StopServing()
	if code, _ := get("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz after StopServing: got %d, want 503", code)
	}
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz after StopServing: got %d, want 200", code)
	}
}

// brokenJournal panics when it is read.
type brokenJournal struct{ *journal.Memory }

func (brokenJournal) Read(journal.Query, [][]byte) (journal.Chunk, error) { panic("broken") }

func TestPanicEndsOneCallOnly(t *testing.T) {
	h := overTCP(t, server.Config{}, journal.Config{}, func(j *journal.Memory) server.Journal { return brokenJournal{j} })
	for range 2 {
		stream, err := h.client.Subscribe(t.Context(), earliest())
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = stream.Recv()
		}
		wantStatus(t, err, codes.Internal, server.ReasonInternal)
		if strings.Contains(err.Error(), "broken") || strings.Contains(err.Error(), "goroutine") {
			t.Errorf("the client was told of the server's inside: %v", err)
		}
	}
}

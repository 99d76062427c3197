package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// retryReasons are the reasons with RetryInfo.
var retryReasons = []string{
	"STARTING", "NOT_STORED", "SHUTTING_DOWN", "MAX_CONNECTION_AGE", "BEHIND", "OUTDATED", "SLOW_SUBSCRIBER", "POSITION_NOT_REACHED",
	"TOO_MANY_SUBSCRIBERS", "TOO_MANY_SNAPSHOTS", "FILTERS_TOO_LARGE", "TOO_MANY_STREAMS", "TOO_MANY_QUERIES", "INTERNAL",
}

// publicReasons are the reasons without metadata, since clients without a token may receive them.
var publicReasons = []string{"UNAUTHENTICATED", "TOO_MANY_STREAMS"}

// wantStatus checks the code, the reason and the details of an error.
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
	var infos, retries, violations int
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			infos++
			if d.GetReason() != reason || d.GetDomain() != "kvcast" {
				t.Errorf("error info: got %s of %s, want %s of %s", d.GetReason(), d.GetDomain(), reason, "kvcast")
			}
			if slices.Contains(publicReasons, reason) {
				if len(d.GetMetadata()) > 0 {
					t.Errorf("error info: got metadata %v, want none", d.GetMetadata())
				}
			} else if _, err := boundsIn(d); err != nil {
				t.Errorf("error info: %v in %v", err, d.GetMetadata())
			}
		case *errdetails.RetryInfo:
			if d.GetRetryDelay().AsDuration() > 0 {
				retries++
			}
		case *errdetails.BadRequest:
			violations += len(d.GetFieldViolations())
		}
	}
	if infos != 1 {
		t.Errorf("got %d ErrorInfo in %v, want one", infos, err)
	}
	if got, want := retries == 1, slices.Contains(retryReasons, reason); got != want {
		t.Errorf("%s has RetryInfo: %v, want %v", reason, got, want)
	}
	if got, want := violations > 0, reason == "INVALID_ARGUMENT"; got != want {
		t.Errorf("%s has field violations: %v, want %v", reason, got, want)
	}
}

// boundsIn parses the metadata of an error.
func boundsIn(info *errdetails.ErrorInfo) (b journal.Bounds, err error) {
	b.Epoch = info.GetMetadata()["epoch"]
	if b.Epoch == "" {
		return b, errors.New("no epoch")
	}
	if b.Oldest, err = strconv.ParseUint(info.GetMetadata()["oldest"], 10, 64); err != nil {
		return b, fmt.Errorf("oldest: %w", err)
	}
	if b.Newest, err = strconv.ParseUint(info.GetMetadata()["newest"], 10, 64); err != nil {
		return b, fmt.Errorf("newest: %w", err)
	}
	return b, nil
}

func TestReflectionListsTheServices(t *testing.T) {
	t.Parallel()
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
			t.Errorf("services: got %v, want %s in it", got, want)
		}
	}
}

func TestAdminPort(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := startingOverTCP(t, server.Config{Registerer: reg})
	h.addWorker()
	admin := h.Server.NewAdmin(reg)
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		admin.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || body != "starting\n" {
		t.Errorf("/readyz before StartServing: got %d %q, want 503", code, body)
	}
	h.Server.StartServing()
	h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
	for path, want := range map[string]string{
		"/healthz": "ok\n",
		"/readyz":  "ok\n",
		"/metrics": "kvcast_server_journal_newest_seq 1\n",

		"/debug/pprof/goroutine?debug=1": "goroutine profile:",
	} {
		if code, body := get(path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: got %d %q, want 200 with %q", path, code, body, want)
		}
	}
	h.Server.SetStalled(true)
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || body != "the journal does not answer\n" {
		t.Errorf("/readyz while the journal is stalled: got %d %q, want 503", code, body)
	}
	h.Server.StopServing()
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || body != "shutting down\n" {
		t.Errorf("/readyz after StopServing: got %d %q, want 503", code, body)
	}
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz after StopServing: got %d, want 200", code)
	}
}

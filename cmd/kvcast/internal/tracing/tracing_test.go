package tracing_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"go.opentelemetry.io/otel"
	"google.golang.org/grpc/stats"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/tracing"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// TestDeadCollectorLosesSpansWithoutDelayingCalls ends more calls than the queue has room for, while a collector accepts the
// connection and never answers.
func TestDeadCollectorLosesSpansWithoutDelayingCalls(t *testing.T) {
	silent, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	var log harness.Log
	tr, err := tracing.Start(t.Context(), tracing.Config{Endpoint: "http://" + silent.Addr().String(), SampleRatio: 1, Log: log.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	h := tr.Handler()
	for range 10_000 { // the queue has 2,048
		ctx := h.TagRPC(context.Background(), &stats.RPCTagInfo{FullMethodName: kvcastv1.RouterEventService_MatchPrefix_FullMethodName})
		h.HandleRPC(ctx, &stats.Begin{})
		h.HandleRPC(ctx, &stats.End{})
	}
	for range 1000 {
		otel.Handle(errors.New("the collector does not answer")) // as the exporter does
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	tr.Stop(ended)
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "spans are lost") {
		t.Errorf("logged %d lines, want one:\n%s", n, log.String())
	}
}

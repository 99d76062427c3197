package observe_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

// otlp is an OpenTelemetry collector in memory.
type otlp struct {
	collector.UnimplementedTraceServiceServer
	received chan *trace.ResourceSpans
}

// Export implements collector.TraceServiceServer.
func (c *otlp) Export(_ context.Context, r *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	for _, s := range r.GetResourceSpans() {
		c.received <- s
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// startOTLP starts a collector, and returns its URL. The test stops it.
func startOTLP(t *testing.T) (*otlp, string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, s, done := &otlp{received: make(chan *trace.ResourceSpans, 1000)}, grpc.NewServer(), make(chan error, 1)
	collector.RegisterTraceServiceServer(s, c)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c, "http://" + l.Addr().String()
}

// TestCallsAreTraced reads the spans of calls that succeed and fail after the server has stopped, which flushes them.
func TestCallsAreTraced(t *testing.T) {
	testclass.Process(t)
	c, url := startOTLP(t)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
	p := fleet.Start(t, "--bind", bindAny, "--tracing-endpoint", url)
	conn := harness.Dial(t, fleet.Address(t, p))
	routers := kvcastv1.NewRouterEventServiceClient(conn)
	const traceID = "0123456789abcdef0123456789abcdef"
	sampled := metadata.AppendToOutgoingContext(harness.Context(t), "traceparent", "00-"+traceID+"-0123456789abcdef-01")
	match := &kvcastv1.MatchPrefixRequest{Model: "m", Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{424242, 434343}}}}
	if _, err := routers.MatchPrefix(sampled, match); err != nil {
		t.Fatal(err)
	}
	if _, err := routers.MatchPrefix(harness.Context(t), &kvcastv1.MatchPrefixRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Fatalf("a match without a prompt: got %v, want INVALID_ARGUMENT", err)
	}
	stream, err := routers.Subscribe(harness.Context(t), &kvcastv1.SubscribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil { // ends the stream
		t.Fatal(err)
	}
	var spans []string
	for len(c.received) > 0 {
		r := <-c.received
		about := fmt.Sprint(r.GetResource())
		for _, want := range []string{"kvcast", "deployment.environment.name"} {
			if !strings.Contains(about, want) {
				t.Errorf("the resource is %s, want %s in it", about, want)
			}
		}
		for _, scope := range r.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				if text := fmt.Sprint(s); strings.Contains(text, "424242") || strings.Contains(text, "434343") {
					t.Errorf("a span has token ids: %s", text)
				}
				code := ""
				for _, a := range s.GetAttributes() {
					if strings.HasSuffix(a.GetKey(), "status_code") {
						code = a.GetValue().GetStringValue() + strings.TrimSuffix(fmt.Sprint(a.GetValue().GetIntValue()), "0")
					}
				}
				parent := ""
				if fmt.Sprintf("%x", s.GetTraceId()) == traceID {
					parent = " with a parent"
				}
				spans = append(spans, fmt.Sprintf("%s %s %s%s", s.GetName(), s.GetStatus().GetCode(), code, parent))
			}
		}
	}
	slices.Sort(spans)
	want := []string{
		"kvcast.v1.RouterEventService/MatchPrefix STATUS_CODE_UNSET INVALID_ARGUMENT",
		"kvcast.v1.RouterEventService/MatchPrefix STATUS_CODE_UNSET OK with a parent",
		"kvcast.v1.RouterEventService/Subscribe STATUS_CODE_ERROR UNAVAILABLE",
	}
	if !slices.Equal(spans, want) {
		t.Errorf("got spans\n%s\nwant\n%s", strings.Join(spans, "\n"), strings.Join(want, "\n"))
	}
}

func TestUntracedWithoutSample(t *testing.T) {
	testclass.Process(t)
	c, url := startOTLP(t)
	p := fleet.Start(t, "--bind", bindAny, "--tracing-endpoint", url, "--tracing-sample-ratio", "0")
	if _, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, fleet.Address(t, p))).ListWorkers(harness.Context(t), nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	if n := len(c.received); n > 0 {
		t.Errorf("got spans of %d requests, want none", n)
	}
}

// TestServerStopsWithoutItsCollector covers the flush at shutdown, which has a time limit.
func TestServerStopsWithoutItsCollector(t *testing.T) {
	testclass.Process(t)
	p := fleet.Start(t, "--bind", bindAny, "--tracing-endpoint", fmt.Sprintf("http://127.0.0.1:%d", harness.FreePort(t)))
	if _, err := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, fleet.Address(t, p))).ListWorkers(harness.Context(t), nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(strings.Join(p.Log(), "\n"), "spans are lost"); n != 1 {
		t.Errorf("the loss of spans was logged %d times, want once:\n%s", n, strings.Join(p.Log(), "\n"))
	}
}

func TestLogLinesAreJSON(t *testing.T) {
	testclass.Process(t)
	p := fleet.Start(t, "--bind", bindAny, "--log-format", "json")
	if _, err := p.Logged(regexp.MustCompile(`"msg":"serving","grpc":"([^"]+)"`)); err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, line := range p.Log() {
		var record struct{ Time, Level, Msg string }
		if err := json.Unmarshal([]byte(line), &record); err != nil || record.Time == "" || record.Level == "" || record.Msg == "" {
			t.Errorf("got %q, want a JSON object with time, level and msg (%v)", line, err)
		}
	}
}

// Package tracing sends a span of each gRPC call to an OpenTelemetry collector.
//
// Calls flow in, through a gRPC stats handler; spans flow out over OTLP in the background, in batches. Spans that do not fit into
// a bounded queue are dropped, so that a collector that is slow or dead costs its memory and a log line a minute, and delays no
// call. A span has the method, the status and the peer's address, and nothing of the messages.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/stats"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Config configures Start. The variables OTEL_EXPORTER_OTLP_* (except for the endpoint), OTEL_BSP_*, OTEL_SERVICE_NAME and
// OTEL_RESOURCE_ATTRIBUTES apply too.
type Config struct {
	// Endpoint is the URL of the collector: http://HOST:PORT, or https:// for TLS.
	Endpoint string
	// SampleRatio is the part of the calls that are traced, from 0 to 1, of those whose caller has not decided.
	SampleRatio float64
	// Version is kvcast's.
	Version string
	Log     *slog.Logger
}

// logInterval is the minimum time between two log lines.
const logInterval = time.Minute

// Tracing sends spans until Stop.
type Tracing struct {
	exporter *otlptrace.Exporter
	provider *trace.TracerProvider
	log      *slog.Logger

	mu         sync.Mutex // guards all below
	next       time.Time  // of the next log line, at the earliest
	suppressed int        // errors that were not logged since the last log line
}

// Start starts to send spans. It does not wait for the collector. The errors of OpenTelemetry's library in this process are logged
// as those of Tracing.
func Start(ctx context.Context, c Config) (*Tracing, error) {
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(c.Endpoint))
	if err != nil {
		return nil, fmt.Errorf("start tracing to %s: %w", c.Endpoint, err)
	}
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "kvcast"), attribute.String("service.version", c.Version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start tracing: %w; see OTEL_RESOURCE_ATTRIBUTES", err), exporter.Shutdown(ctx))
	}
	t := &Tracing{exporter: exporter, log: c.Log.With("collector", c.Endpoint)}
	t.provider = trace.NewTracerProvider(
		trace.WithBatcher(exporter), trace.WithResource(about), trace.WithSampler(trace.ParentBased(trace.TraceIDRatioBased(c.SampleRatio))))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(t.failed))
	return t, nil
}

// Handler returns what makes gRPC servers create a span of each call of kvcast's services.
func (t *Tracing) Handler() stats.Handler {
	services := "/" + strings.TrimSuffix(kvcastv1.RouterEventService_ServiceDesc.ServiceName, "RouterEventService")
	return otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(t.provider), otelgrpc.WithMeterProvider(noop.NewMeterProvider()),
		otelgrpc.WithPropagators(propagation.TraceContext{}),
		otelgrpc.WithFilter(func(call *stats.RPCTagInfo) bool { return strings.HasPrefix(call.FullMethodName, services) }))
}

// failed logs an error, at most once in logInterval.
func (t *Tracing) failed(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if now.Before(t.next) {
		t.suppressed++
		return
	}
	t.log.Warn("spans are lost", "error", err, "suppressed", t.suppressed)
	t.next, t.suppressed = now.Add(logInterval), 0
}

// Stop sends the spans that are left, and drops those that the collector does not take before ctx ends.
func (t *Tracing) Stop(ctx context.Context) {
	if err := t.provider.Shutdown(ctx); err != nil {
		t.failed(err)
		_ = t.exporter.Shutdown(ctx) // ends the request in progress
	}
}

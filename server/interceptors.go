package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/tap"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// A call uses memory as soon as its headers are received, and gRPC receives the request of a unary call before
// any interceptor runs. The server therefore limits the number of calls whose request is being received, and
// the time to receive it. At the limit, a connection that starts another call is not read until an earlier
// request is complete or has timed out. No call is refused, and a client that sends headers and request
// together is not delayed. One client address may have at most a quarter of these calls, so that a slow client
// does not block others.
//
// A connection that is not read cannot complete its earlier requests. connWindow is therefore so large that a client
// sends each request right after its headers, even if it starts many calls at the same time.
const (
	maxReceiving           = 256 // with up to maxRequestBytes each
	maxReceivingPerAddress = 64
	receiveTimeout         = 5 * time.Second
)

// receivedKey is the context key of the function to call when a call's request is complete.
type receivedKey struct{}

// startReceiving is gRPC's tap handle: gRPC calls it when the headers of a call are complete, in the goroutine
// that reads the connection. Receiving ends when the request is complete, when the call ends, or after
// receiveTimeout, which cancels the call.
func (s *Server) startReceiving(ctx context.Context, call *tap.Info) (context.Context, error) {
	if isPublic(call.FullMethodName) {
		clear(call.Header) // the header is not used, and would stay in memory until the stream ends
	}
	peer := connectionOf(ctx).peer
	select {
	case peer.receiving <- struct{}{}:
	case <-s.draining:
		return ctx, nil
	}
	select {
	case s.receiving <- struct{}{}:
	case <-s.draining:
		<-peer.receiving
		return ctx, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	timeout := time.AfterFunc(receiveTimeout, func() {
		s.metrics.late.Inc()
		cancel()
	})
	release := sync.OnceFunc(func() {
		timeout.Stop()
		<-s.receiving
		<-peer.receiving
	})
	stop := context.AfterFunc(ctx, release)
	return context.WithValue(ctx, receivedKey{}, func() { stop(); release() }), nil
}

// requestReceived ends the receiving of a call's request. Further calls do nothing.
func requestReceived(ctx context.Context) {
	if received, ok := ctx.Value(receivedKey{}).(func()); ok {
		received()
	}
}

// unaryReceived is the first unary interceptor. gRPC has received the request before it calls an interceptor.
func unaryReceived(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	requestReceived(ctx)
	return handler(ctx, req)
}

// streamReceived is the first stream interceptor. The request of a server stream is complete when RecvMsg
// returns. Client streams are limited by quotas instead: MatchPrefixes, and reflection by limitPublicStreams.
func streamReceived(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if info.IsClientStream {
		requestReceived(stream.Context())
		return handler(srv, stream)
	}
	return handler(srv, receivingStream{stream})
}

type receivingStream struct{ grpc.ServerStream }

// RecvMsg implements grpc.ServerStream.
func (s receivingStream) RecvMsg(m any) error {
	defer requestReceived(s.Context())
	return s.ServerStream.RecvMsg(m)
}

// needsToken matches the methods that need a token.
var needsToken = selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool { return !isPublic(c.FullMethod()) })

// isPublic reports whether a method needs no token: a health check or reflection.
func isPublic(method string) bool {
	return strings.HasPrefix(method, "/grpc.health.v1.Health/") || strings.HasPrefix(method, "/grpc.reflection.")
}

// Limits of reflection streams. A tool opens one for less than a second.
const (
	maxReflections           = 64
	maxReflectionsPerAddress = 16
)

// limitPublicStreams is a stream interceptor. It limits health watches and reflection streams, which need no
// token and which the server never ends.
func (s *Server) limitPublicStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !isPublic(info.FullMethod) {
		return handler(srv, stream)
	}
	peer := connectionOf(stream.Context()).peer
	q, inUse, streams, hint := s.reflections, &peer.reflections, "reflection streams", "try again later"
	if info.FullMethod == healthv1.Health_Watch_FullMethodName {
		q, inUse, streams = s.watches, &peer.watches, "health watches"
		hint = "try again later, or raise the limit (--subscribers-max-connections, --subscribers-max-connections-per-address)"
	}
	switch err := q.acquire(inUse); {
	case errors.Is(err, errAddressQuota):
		return errorf(reasonTooManyStreams, journal.Bounds{}, "%d %s are open from this address, which is the limit; %s", q.perAddress, streams, hint)
	case err != nil:
		return errorf(reasonTooManyStreams, journal.Bounds{}, "%d %s are open, which is the limit; %s", q.total.Limit(), streams, hint)
	}
	defer q.release(inUse)
	return handler(srv, stream)
}

// maxServiceName bounds the bytes of the name in a health watch, which stays in memory until the watch ends.
const maxServiceName = 256

// healthService is gRPC's health service with bounded service names.
type healthService struct {
	*health.Server
}

// Watch implements healthv1.HealthServer.
func (s healthService) Watch(req *healthv1.HealthCheckRequest, stream healthv1.Health_WatchServer) error {
	if n := len(req.GetService()); n > maxServiceName {
		return invalidField(journal.Bounds{}, "service", "a name of %d bytes is not allowed: want at most %d", n, maxServiceName)
	}
	return s.Server.Watch(req, stream)
}

// logInterceptors returns interceptors that log each call of a kvcast service when it ends. Health checks and
// reflection are too frequent to be logged.
func logInterceptors(log *slog.Logger) (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	logger := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		log.Log(ctx, slog.Level(level), msg, fields...)
	})
	opts := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(logLevel),
		logging.WithDisableLoggingFields(logging.ComponentFieldKey, logging.MethodTypeFieldKey, logging.SystemTag[0]),
	}
	// Dashboards send the unary calls of RouterEventService several times a second.
	queries := logging.UnaryServerInterceptor(logger, append(opts, logging.WithLevels(queryLogLevel))...)
	changes := logging.UnaryServerInterceptor(logger, opts...)
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		switch {
		case isPublic(info.FullMethod):
			return handler(ctx, req)
		case strings.HasPrefix(info.FullMethod, "/"+kvcastv1.RouterEventService_ServiceDesc.ServiceName+"/"):
			return queries(ctx, req, info, handler)
		}
		return changes(ctx, req, info, handler)
	}
	return selector.StreamServerInterceptor(logging.StreamServerInterceptor(logger, opts...), needsToken), unary
}

// logLevel returns the level for a call that ended with a code. Only failures of the server itself are errors.
func logLevel(c codes.Code) logging.Level {
	switch c {
	case codes.Unknown, codes.Internal, codes.DataLoss:
		return logging.LevelError
	case codes.ResourceExhausted:
		return logging.LevelWarn
	default:
		return logging.LevelInfo
	}
}

func queryLogLevel(c codes.Code) logging.Level {
	if c == codes.OK {
		return logging.LevelDebug
	}
	return logLevel(c)
}

// recovered logs a panic of a call and returns the client's error, which does not describe the panic.
func (s *Server) recovered(ctx context.Context, p any) error {
	s.metrics.panics.Inc()
	s.cfg.Logger.ErrorContext(ctx, "call panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return internalError(s.journal.Bounds())
}

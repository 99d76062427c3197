package server

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/server/internal/admission"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// limitPublicStreams is a stream interceptor. It limits health watches and reflection streams, which need no
// token and which the server never ends.
func (s *Server) limitPublicStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !access.IsPublic(info.FullMethod) {
		return handler(srv, stream)
	}
	q, streams, hint := s.quotas.reflections, "reflection streams", "try again later"
	if info.FullMethod == healthv1.Health_Watch_FullMethodName {
		q, streams = s.quotas.watches, "health watches"
		hint = "try again later, or raise the limit (--subscribers-max-connections, --subscribers-max-connections-per-address)"
	}
	release, err := q.Stream(stream.Context(), streams, hint)
	if err != nil {
		return err
	}
	defer release()
	var sent admission.Sent
	err = handler(srv, trackedStream{stream, &sent})
	s.unread.End(stream.Context(), &sent, err)
	return err
}

// trackedStream is a stream of generated messages that are tracked.
type trackedStream struct {
	grpc.ServerStream
	sent *admission.Sent
}

func (s trackedStream) SendMsg(m any) error { return s.ServerStream.SendMsg(tracked{m, s.sent}) }

// trackAdapter is the last stream interceptor. Streams of adapters are tracked until their clients have read the end.
func (s *Server) trackAdapter(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !s.adapters[access.ServiceOf(info.FullMethod)] {
		return handler(srv, stream)
	}
	var sent admission.Sent
	err := handler(srv, trackedStream{stream, &sent})
	s.unread.End(stream.Context(), &sent, err)
	return err
}

// limitAnswer is the last unary interceptor. It encodes the answer, whose memory is bounded until the client has read it.
func (s *Server) limitAnswer(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := s.unread.Begin(ctx)
	if err != nil {
		return nil, err
	}
	answered := false
	defer func() {
		if !answered { // also after a panic
			answer.Discard()
		}
	}()
	out, err := handler(ctx, req)
	if err != nil {
		return nil, err
	}
	m := out.(proto.Message)
	size := proto.Size(m)
	answered = true
	encoded, refused := answer.Encode(size, func(b []byte) []byte {
		b, err = proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, m)
		return b
	})
	if refused != nil {
		return nil, refused
	}
	if err != nil {
		encoded.Free()
		return nil, err
	}
	return frame(encoded), nil
}

// maxServiceName bounds the bytes of the name in a health watch, which stays in memory until the watch ends.
const maxServiceName = 256

// healthService is gRPC's health service with bounded service names.
type healthService struct {
	*health.Server
}

func (s healthService) Watch(req *healthv1.HealthCheckRequest, stream healthv1.Health_WatchServer) error {
	if n := len(req.GetService()); n > maxServiceName {
		return callerror.InvalidField(journal.Bounds{}, "service", "a name of %d bytes is not allowed: want at most %d", n, maxServiceName)
	}
	return s.Server.Watch(req, stream)
}

// logInterceptors returns interceptors that log each call of a kvcast service when it ends. Health checks and
// reflection are too frequent to be logged.
func (s *Server) logInterceptors() (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	logger := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		s.cfg.Logger.Log(ctx, slog.Level(level), msg, fields...)
	})
	opts := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(logLevel),
		logging.WithDisableLoggingFields(logging.ComponentFieldKey, logging.MethodTypeFieldKey, logging.SystemTag[0]),
	}
	// Routers send the unary calls of services that only read thousands of times a second. The fields of a line are collected only if it is written.
	queries := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		began := time.Now()
		answer, err := handler(ctx, req)
		if err == nil && !s.cfg.Logger.Enabled(ctx, slog.LevelDebug) {
			return answer, nil
		}
		took := logging.DurationToTimeMillisFields(time.Since(began))
		log := logging.UnaryServerInterceptor(logger, append(opts[:len(opts):len(opts)], logging.WithLevels(queryLogLevel),
			logging.WithDurationField(func(time.Duration) logging.Fields { return took }))...)
		return log(ctx, req, info, func(context.Context, any) (any, error) { return answer, err })
	}
	changes := logging.UnaryServerInterceptor(logger, opts...)
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		switch {
		case access.IsPublic(info.FullMethod):
			return handler(ctx, req)
		case s.isForRouters(access.ServiceOf(info.FullMethod)):
			return queries(ctx, req, info, handler)
		}
		return changes(ctx, req, info, handler)
	}
	return selector.StreamServerInterceptor(logging.StreamServerInterceptor(logger, opts...), access.NeedsToken), unary
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
	return callerror.Bug(s.journal.Bounds())
}

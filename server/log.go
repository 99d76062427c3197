package server

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// logCalls returns interceptors that log a line for each call of kvcast's own
// services when it ends: health checks and reflection would drown them.
func logCalls(log *slog.Logger) (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	logger := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		log.Log(ctx, slog.Level(level), msg, fields...)
	})
	opts := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(logLevel),
		logging.WithDisableLoggingFields(logging.ComponentFieldKey, logging.MethodTypeFieldKey, logging.SystemTag[0]),
	}
	ours := selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool {
		return strings.HasPrefix(c.Service, "kvcast.")
	})
	loud := logging.UnaryServerInterceptor(logger, opts...)
	quiet := logging.UnaryServerInterceptor(logger, append(opts, logging.WithLevels(questionLevel))...)
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if strings.HasPrefix(info.FullMethod, "/"+kvcastv1.RouterEventService_ServiceDesc.ServiceName+"/") {
			return quiet(ctx, req, info, handler)
		}
		return loud(ctx, req, info, handler)
	}
	return selector.StreamServerInterceptor(logging.StreamServerInterceptor(logger, opts...), ours),
		selector.UnaryServerInterceptor(unary, ours)
}

// questionLevel is that of a call that asks how things are, as a screen does three times
// a second: one that was answered is for those who look for it.
func questionLevel(c codes.Code) logging.Level {
	if c == codes.OK {
		return logging.LevelDebug
	}
	return logLevel(c)
}

// recovered makes the error of a call that panicked: what the client is told says
// nothing of the server's inside, which the log does.
func (s *Server) recovered(ctx context.Context, p any) error {
	s.metrics.panics.Inc()
	s.cfg.Logger.ErrorContext(ctx, "call panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return errInternal(s.journal.Bounds())
}

// logLevel is that of a call that ended with a code: only what is the server's
// own fault is an error, since anybody may send a bad request.
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

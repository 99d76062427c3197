package server

import (
	"context"
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

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// logInterceptors returns interceptors that log each call of kvcast's own services when
// it ends. Health checks and reflection are not logged: there are too many.
func logInterceptors(log *slog.Logger) (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	logger := logging.LoggerFunc(func(ctx context.Context, level logging.Level, msg string, fields ...any) {
		log.Log(ctx, slog.Level(level), msg, fields...)
	})
	opts := []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithLevels(logLevel),
		logging.WithDisableLoggingFields(logging.ComponentFieldKey, logging.MethodTypeFieldKey, logging.SystemTag[0]),
	}
	all := logging.UnaryServerInterceptor(logger, opts...)
	queries := logging.UnaryServerInterceptor(logger, append(opts, logging.WithLevels(queryLogLevel))...)
	unary := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if strings.HasPrefix(info.FullMethod, "/"+kvcastv1.RouterEventService_ServiceDesc.ServiceName+"/") {
			return queries(ctx, req, info, handler)
		}
		return all(ctx, req, info, handler)
	}
	own := selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool {
		return strings.HasPrefix(c.Service, "kvcast.")
	})
	return selector.StreamServerInterceptor(logging.StreamServerInterceptor(logger, opts...), own),
		selector.UnaryServerInterceptor(unary, own)
}

// logLevel is the level for a call that ended with a code. Only failures of the server itself are errors.
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

// queryLogLevel is the level for a query, which dashboards send several times a second.
func queryLogLevel(c codes.Code) logging.Level {
	if c == codes.OK {
		return logging.LevelDebug
	}
	return logLevel(c)
}

// recovered logs a panic of a call and returns the client's error, which has no details.
func (s *Server) recovered(ctx context.Context, p any) error {
	s.metrics.panics.Inc()
	s.cfg.Logger.ErrorContext(ctx, "call panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return internalError(s.journal.Bounds())
}

// A logLimiter allows logBurst records per logInterval.
const (
	logBurst    = 20
	logInterval = 10 * time.Second
)

// logLimiter limits the log records of one kind, whatever clients do.
type logLimiter struct {
	mu      sync.Mutex // guards all below
	start   time.Time  // of the current interval
	logged  int        // in the current interval
	omitted int        // since the last record
}

// allow reports whether a record may be logged, and how many were omitted before it.
func (l *logLimiter) allow() (omitted int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); now.Sub(l.start) >= logInterval {
		l.start, l.logged = now, 0
	}
	if l.logged >= logBurst {
		l.omitted++
		return 0, false
	}
	l.logged++
	omitted, l.omitted = l.omitted, 0
	return omitted, true
}

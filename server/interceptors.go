package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/tap"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// A call uses memory as soon as its headers are received, and gRPC receives the request of a unary call before
// any interceptor runs. The server therefore limits the number of calls whose request is being received, and
// the time to receive it. Calls beyond the limit are admitted: gRPC takes their data up to receiveWindow, and no more
// until an earlier request is complete or has timed out. At the limit of admitted calls, a connection that starts
// another one is not read for as long. No call is refused. One client address may have at most a quarter of these calls,
// and one connection half of those of its address that are received, so that a slow client does not block others.
//
// A connection that is not read cannot complete its earlier requests. A client may send the headers of many calls
// before it sends their requests, so many calls are admitted. One that sends more headers than that before the first
// request is not read until the calls that are received have timed out.
const (
	maxReceiving              = 256 // with up to maxRequestBytes each
	maxReceivingPerAddress    = 64
	maxReceivingPerConnection = 32
	// Each has up to receiveWindow of data, which takes four times as much memory if it comes in small frames.
	maxAdmitted           = 2048
	maxAdmittedPerAddress = 512
)

// take takes an element of each of some limits, in order, so that who waits for the first is not in the way of others that
// wait for the second. It returns a function that gives them back, and false if done was closed before.
func take(done <-chan struct{}, limits ...chan struct{}) (free func(), ok bool) {
	for i, limit := range limits {
		select {
		case limit <- struct{}{}:
		case <-done:
			give(limits[:i])
			return nil, false
		}
	}
	return func() { give(limits) }, true
}

func give(limits []chan struct{}) {
	for _, limit := range limits {
		<-limit
	}
}

// receiving is a call whose request is not complete. It is admitted at first, and then its request is received.
type receiving struct {
	cancel context.CancelFunc // of the call
	mu     sync.Mutex         // guards all below
	free   func()             // what it has of the limits; nil: nothing, and it gets nothing any more
	late   *time.Timer        // nil while it is admitted
}

// begin ends the admission, and gives the call the slots of one whose request is received, and some time for that, after which
// it calls late. It returns false if the call has ended.
func (r *receiving) begin(free func(), timeout time.Duration, late func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.free == nil {
		return false
	}
	r.free()
	r.free, r.late = free, time.AfterFunc(timeout, late)
	return true
}

// end frees what the call has. Further calls do nothing.
func (r *receiving) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.free != nil {
		r.free()
		r.free = nil
	}
	if r.late != nil {
		r.late.Stop()
	}
}

// receivedKey is the context key of the *receiving of a call.
type receivedKey struct{}

// admit is gRPC's tap handle: gRPC calls it when the headers of a call are complete, in the goroutine that reads the
// connection.
func (s *Server) admit(ctx context.Context, call *tap.Info) (context.Context, error) {
	if access.IsPublic(call.FullMethodName) {
		clear(call.Header) // the header is not used, and would stay in memory until the stream ends
	}
	free, ok := take(s.draining, connectionOf(ctx).peer.admitted, s.admitted)
	if !ok {
		return ctx, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &receiving{cancel: cancel, free: free}
	context.AfterFunc(ctx, r.end)
	return context.WithValue(ctx, receivedKey{}, r), nil
}

// receiver is a stats.Handler that delays calls until their requests may be received.
type receiver struct{ *Server }

// TagConn implements stats.Handler.
func (receiver) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (receiver) HandleConn(context.Context, stats.ConnStats) {}

// HandleRPC implements stats.Handler.
func (receiver) HandleRPC(context.Context, stats.RPCStats) {}

// TagRPC implements stats.Handler. gRPC calls it in the goroutine of the call, before it receives the request. The request
// has been received when requestReceived is called, when the call ends, or after Config.ReceiveTimeout, which cancels the call.
func (s receiver) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	r, ok := ctx.Value(receivedKey{}).(*receiving)
	if !ok {
		return ctx
	}
	c := connectionOf(ctx)
	free, ok := take(ctx.Done(), c.receiving, c.peer.receiving, s.receiving)
	if ok && !r.begin(free, s.cfg.ReceiveTimeout, func() {
		s.metrics.late.Inc()
		r.cancel()
	}) {
		free()
	}
	return ctx
}

// requestReceived ends the receiving of a call's request. Further calls do nothing.
func requestReceived(ctx context.Context) {
	if r, ok := ctx.Value(receivedKey{}).(*receiving); ok {
		r.end()
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

// Limits of reflection streams. A tool opens one for less than a second.
const (
	maxReflections           = 64
	maxReflectionsPerAddress = 16
)

// limitPublicStreams is a stream interceptor. It limits health watches and reflection streams, which need no
// token and which the server never ends.
func (s *Server) limitPublicStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !access.IsPublic(info.FullMethod) {
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
		return callerror.New(callerror.TooManyStreams, journal.Bounds{}, "%d %s are open from this address, which is the limit; %s", q.perAddress, streams, hint)
	case err != nil:
		return callerror.New(callerror.TooManyStreams, journal.Bounds{}, "%d %s are open, which is the limit; %s", q.total.Limit(), streams, hint)
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
	// Dashboards and routers send the unary calls of services that only read several times a second.
	queries := logging.UnaryServerInterceptor(logger, append(opts, logging.WithLevels(queryLogLevel))...)
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

package server

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/tap"

	"github.com/kvcast/kvcast/journal"
)

// A call uses memory from its headers on, and gRPC receives the request of a unary call before any interceptor
// runs. The calls whose request is being received are therefore limited in number and time. At the limit, the
// server stops reading from a connection that starts another call until an earlier request is complete or has
// timed out. No call is refused, and clients that send headers and request together notice nothing. So that a
// slow address cannot stop all others, it may have at most an eighth of these calls.
const (
	maxReceiving           = 1024
	maxReceivingPerAddress = 128
	receiveTimeout         = 5 * time.Second
)

// receivedKey is the context key of a function that ends the receiving of a call's request.
type receivedKey struct{}

// startReceiving is gRPC's tap handle: it runs when the headers of a call are complete, in the goroutine that
// reads the connection. Receiving ends when the request is complete, when the call ends, or after
// receiveTimeout, which cancels the call.
func (s *Server) startReceiving(ctx context.Context, call *tap.Info) (context.Context, error) {
	if isPublic(call.FullMethodName) {
		clear(call.Header) // unused, but a stream would keep it in memory
	}
	peer := s.peerOf(ctx)
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

// unaryReceived is an interceptor: gRPC has received the request before it runs.
func unaryReceived(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	requestReceived(ctx)
	return handler(ctx, req)
}

// streamReceived is an interceptor: a server stream's request is complete when RecvMsg
// has returned it. Client streams are limited by limitPublicStreams.
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

const (
	reflectionPrefix = "/grpc.reflection."
	healthPrefix     = "/grpc.health.v1.Health/"
)

// isPublic reports whether a method needs no token.
func isPublic(method string) bool {
	return strings.HasPrefix(method, healthPrefix) || strings.HasPrefix(method, reflectionPrefix)
}

// Limits of reflection streams. A tool uses one for a moment.
const (
	maxReflections           = 64
	maxReflectionsPerAddress = 16
)

// limitPublicStreams is an interceptor that limits the streams that need no token and
// have no end: health watches and reflection.
func (s *Server) limitPublicStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !isPublic(info.FullMethod) {
		return handler(srv, stream)
	}
	peer := s.peerOf(stream.Context())
	q, inUse, streams, hint := s.reflections, &peer.reflections, "reflection streams", "try again later"
	if info.FullMethod == healthv1.Health_Watch_FullMethodName {
		q, inUse, streams = s.watches, &peer.watches, "health watches"
		hint = "try again later, or raise the limit (--subscribers-max-connections, --subscribers-max-connections-per-address)"
	}
	switch err := q.acquire(inUse); {
	case errors.Is(err, errAddressQuota):
		return errorf(ReasonTooManyStreams, journal.Bounds{}, "%d %s are open from this address, which is the limit; %s", q.perAddress, streams, hint)
	case err != nil:
		return errorf(ReasonTooManyStreams, journal.Bounds{}, "%d %s are open, which is the limit; %s", q.total.Limit(), streams, hint)
	}
	defer q.release(inUse)
	return handler(srv, stream)
}

// maxServiceName bounds the name in a health watch, which stays in memory with it.
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

package server

import (
	"context"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/tap"
)

// A call costs memory from its headers on, and gRPC reads the request of a unary call
// before any interceptor can judge it. So the calls whose request is arriving are
// bounded in number and in time. Beyond the number, no further call is read from a
// connection until an earlier one has arrived or was given up: nothing is refused,
// and clients that send headers and request at once notice nothing. A connection that
// waits is not served at all meanwhile. One address may therefore have at most an eighth
// of the arriving calls.
const (
	maxArriving           = 1024
	maxArrivingPerAddress = 128
	arrivalTime           = 5 * time.Second
)

// arrival is a call whose request is arriving. It ends when the request is there,
// when the call ends, and when arrivalTime is over, with which the call is canceled.
type arrival struct {
	once    sync.Once
	release func()
	unwatch func() bool // stops waiting for the call's end
}

type arrivalKey struct{}

// receiveCall is run by gRPC when the headers of a call are there. It runs in the
// goroutine that reads the connection.
func (s *Server) receiveCall(ctx context.Context, call *tap.Info) (context.Context, error) {
	if isOpen(call.FullMethodName) {
		clear(call.Header) // which nobody reads, and a stream would hold
	}
	peer := s.peerOf(ctx)
	select {
	case peer.arriving <- struct{}{}:
	case <-s.draining:
		return ctx, nil
	}
	select {
	case s.arriving <- struct{}{}:
	case <-s.draining:
		<-peer.arriving
		return ctx, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(arrivalTime, func() {
		s.metrics.late.Inc()
		cancel()
	})
	a := &arrival{release: func() {
		late.Stop()
		<-s.arriving
		<-peer.arriving
	}}
	a.unwatch = context.AfterFunc(ctx, a.end)
	return context.WithValue(ctx, arrivalKey{}, a), nil
}

func (a *arrival) end() { a.once.Do(a.release) }

// arrived ends the arrival, as the request has been read. It is safe to call more than
// once, and on nil.
func (a *arrival) arrived() {
	if a != nil {
		a.unwatch()
		a.end()
	}
}

func arrivalOf(ctx context.Context) *arrival {
	a, _ := ctx.Value(arrivalKey{}).(*arrival)
	return a
}

// unaryArrived is an interceptor: a unary call comes to it with its request.
func unaryArrived(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	arrivalOf(ctx).arrived()
	return handler(ctx, req)
}

// streamArrived is an interceptor: a stream's request is there when it was received.
// Streams with several requests are bounded elsewhere.
func streamArrived(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	a := arrivalOf(stream.Context())
	if info.IsClientStream {
		a.arrived()
		return handler(srv, stream)
	}
	return handler(srv, arrivingStream{stream, a})
}

type arrivingStream struct {
	grpc.ServerStream
	arrival *arrival
}

// RecvMsg implements grpc.ServerStream.
func (s arrivingStream) RecvMsg(m any) error {
	defer s.arrival.arrived()
	return s.ServerStream.RecvMsg(m)
}

// isOpen tells whether a method is open to clients without a token.
func isOpen(method string) bool {
	return strings.HasPrefix(method, "/"+healthv1.Health_ServiceDesc.ServiceName+"/") || strings.HasPrefix(method, reflectionPrefix)
}

package server

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// Bounds of reflection streams. A tool that looks around holds one for a moment.
const (
	maxReflections           = 64
	maxReflectionsPerAddress = 16
)

const reflectionPrefix = "/grpc.reflection."

// limitOpenStreams is an interceptor that bounds the streams which are open to
// clients without a token, and last for as long as they like.
func (s *Server) limitOpenStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	peer := s.peerOf(stream.Context())
	limit, held, streams, raise := s.watches, &peer.watches, "health watches", "try again later, or raise the limit (--subscribers-max-connections, --subscribers-max-connections-per-address)"
	switch {
	case info.FullMethod == healthv1.Health_Watch_FullMethodName:
	case strings.HasPrefix(info.FullMethod, reflectionPrefix):
		limit, held, streams, raise = s.reflections, &peer.reflections, "reflection streams", "try again later"
	default:
		return handler(srv, stream)
	}
	switch err := limit.take(held); {
	case errors.Is(err, errAddressShare):
		return errTooManyStreams(fmt.Sprintf("%d %s are open from this address, which is the limit; %s", limit.each, streams, raise))
	case err != nil:
		return errTooManyStreams(fmt.Sprintf("%d %s are open, which is the limit; %s", limit.all.Limit(), streams, raise))
	}
	defer limit.release(held)
	return handler(srv, stream)
}

// maxServiceName is how long the name of a service may be that a watch asks for: the
// watch holds it.
const maxServiceName = 256

// healthService is gRPC's, and bounds what a watch holds.
type healthService struct {
	*health.Server
}

// Watch implements healthv1.HealthServer.
func (s healthService) Watch(req *healthv1.HealthCheckRequest, stream healthv1.Health_WatchServer) error {
	if len(req.GetService()) > maxServiceName {
		return errServiceName(len(req.GetService()))
	}
	return s.Server.Watch(req, stream)
}

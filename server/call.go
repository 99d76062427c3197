package server

import (
	"context"
	"crypto/tls"
	"net"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// Caller is a client that does not speak gRPC, such as a browser.
type Caller struct {
	Address net.Addr
	// Token is a bearer token; empty: none.
	Token string
	// TLS is the state of its connection; nil: plaintext.
	TLS *tls.ConnectionState
	// Permitted says that the caller needs neither a token nor a certificate.
	Permitted bool
}

// calls are the unary methods of the services that only read, by full name.
type calls map[string]call

type call struct {
	implementation any
	handler        grpc.MethodHandler
}

func (s *Server) newCalls() calls {
	all := make(calls)
	for _, service := range []struct {
		desc           *grpc.ServiceDesc
		implementation any
	}{
		{&kvcastv1.RouterEventService_ServiceDesc, routerEvents{Server: s}},
		{&kvcastv1.InspectionService_ServiceDesc, inspection{Server: s}},
	} {
		for _, m := range service.desc.Methods {
			all["/"+service.desc.ServiceName+"/"+m.MethodName] = call{service.implementation, m.Handler}
		}
	}
	return all
}

// Call answers a unary call of RouterEventService or InspectionService, such as /kvcast.v1.RouterEventService/GetStatus, as
// gRPC does: with the same roles, limits, log records and errors, which have a gRPC status. It calls decode, which decodes the
// request into a message, if the caller may make the call. Streams and other services are unimplemented here.
func (s *Server) Call(ctx context.Context, method string, caller Caller, decode func(proto.Message) error) (proto.Message, error) {
	m, ok := s.calls[method]
	if !ok {
		return nil, callerror.New(callerror.Unimplemented, journal.Bounds{}, "%.256q is no unary method of RouterEventService or InspectionService", method)
	}
	from := &peer.Peer{Addr: caller.Address}
	if caller.TLS != nil {
		from.AuthInfo = credentials.TLSInfo{State: *caller.TLS}
	}
	ctx = grpc.NewContextWithServerTransportStream(peer.NewContext(ctx, from), unaryCall(method))
	if caller.Token != "" {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+caller.Token))
	}
	if s.gate.Closed() && !caller.Permitted { // before the request is read
		var err error
		if ctx, err = s.gate.Authenticate(ctx); err != nil {
			return nil, err
		}
	}
	out, err := m.handler(m.implementation, ctx, func(req any) error { return decode(req.(proto.Message)) }, s.unaryQueries)
	if err != nil {
		return nil, err
	}
	answer := out.(proto.Message)
	if unknown := answer.ProtoReflect().GetUnknown(); len(unknown) == 0 {
		return answer, nil
	}
	decoded := answer.ProtoReflect().New().Interface() // a response of fields that are encoded already
	return decoded, proto.Unmarshal(answer.ProtoReflect().GetUnknown(), decoded)
}

// chainUnary returns an interceptor that runs others, the first outermost.
func chainUnary(all ...grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		for _, intercept := range slices.Backward(all) {
			next := handler
			handler = func(ctx context.Context, req any) (any, error) { return intercept(ctx, req, info, next) }
		}
		return handler(ctx, req)
	}
}

// unaryCall is the transport stream of a Call, which only names the method.
type unaryCall string

func (c unaryCall) Method() string { return string(c) }

func (unaryCall) SetHeader(metadata.MD) error { return nil }

func (unaryCall) SendHeader(metadata.MD) error { return nil }

func (unaryCall) SetTrailer(metadata.MD) error { return nil }

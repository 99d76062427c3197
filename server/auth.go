package server

import (
	"context"
	"log/slog"
	"strings"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/auth"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// authenticateCalls returns interceptors that let a call on only with a token
// whose role may make it. Health checks and reflection are open: probes have no
// token, and what reflection tells is public.
func (s *Server) authenticateCalls() (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	closed := selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool {
		return c.Service != healthv1.Health_ServiceDesc.ServiceName && !strings.HasPrefix(c.Service, "grpc.reflection.")
	})
	return selector.StreamServerInterceptor(auth.StreamServerInterceptor(s.authenticate), closed),
		selector.UnaryServerInterceptor(auth.UnaryServerInterceptor(s.authenticate), closed)
}

// authenticate is an auth.AuthFunc. A call that is refused comes no further, so
// this is where it is logged, unless many are; one that is not is logged with its
// role.
func (s *Server) authenticate(ctx context.Context) (context.Context, error) {
	method, _ := grpc.Method(ctx)
	role, err := s.authorize(ctx, method)
	if err != nil {
		heldBack, ok := s.refusedCalls.line()
		if !ok {
			return nil, err
		}
		about := []slog.Attr{slog.String("grpc.method", method), slog.String("grpc.code", status.Code(err).String())}
		if p, ok := peer.FromContext(ctx); ok {
			about = append(about, slog.String("peer.address", p.Addr.String()))
		}
		if role != "" {
			about = append(about, slog.String("role", string(role)))
		}
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "refused call", append(about, slog.Int("held_back", heldBack))...)
		return nil, err
	}
	return logging.InjectLogField(ctx, "role", string(role)), nil
}

// authorize returns the role of a call's token, and an error where that may not
// make the call.
func (s *Server) authorize(ctx context.Context, method string) (Role, error) {
	token, err := auth.AuthFromMD(ctx, "bearer")
	if err != nil {
		return "", errUnauthenticated("the call carries no token; send it with the header authorization: Bearer TOKEN")
	}
	role, ok := s.cfg.Tokens.role(token)
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	switch {
	case !ok:
		return "", errUnauthenticated("the token is none of those that the server read when it started; ask its operator for one")
	case role != RoleOperator && service != kvcastv1.RouterEventService_ServiceDesc.ServiceName:
		return role, errPermissionDenied(role, service, s.journal.Bounds())
	}
	return role, nil
}

// Package access decides who may call a server: by bearer tokens and client certificates, which have roles.
package access

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/auth"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// Gate decides whether calls are permitted.
type Gate struct {
	cfg  Config
	list atomic.Pointer[List]
}

// Config configures a Gate. All fields must be set.
type Config struct {
	// List has the tokens and certificates that permit calls, which Set can replace. Without tokens and ClientCertificates, calls
	// need neither.
	List List
	// ClientCertificates says that TLS verifies client certificates, and that one permits calls.
	ClientCertificates bool
	// ForRouters reports whether RoleRouter permits the calls of a service.
	ForRouters func(service string) bool
	// Bounds are those of the journal, for errors.
	Bounds func() journal.Bounds
	// Close closes the connection of a call.
	Close func(context.Context)
	// Permitted is called for each call whose credentials permit it, with the call's context.
	Permitted func(context.Context)
	// Interval is the time after which an open stream must still be permitted, again and again.
	Interval time.Duration
	Logger   *slog.Logger
}

// NewGate returns a gate.
func NewGate(cfg Config) *Gate {
	g := &Gate{cfg: cfg}
	g.Set(cfg.List)
	return g
}

// Set replaces Config.List. Open streams that the new list does not permit end within Config.Interval. Whether calls need a token or a
// certificate at all is determined by NewGate.
func (g *Gate) Set(l List) { g.list.Store(&l) }

// Closed reports whether calls need a token or a client certificate.
func (g *Gate) Closed() bool { return g.cfg.List.Tokens != nil || g.cfg.ClientCertificates }

// NeedsToken matches the methods that need a token.
var NeedsToken = selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool { return !IsPublic(c.FullMethod()) })

// IsPublic reports whether a method needs no token: a health check or reflection.
func IsPublic(method string) bool {
	return strings.HasPrefix(method, "/grpc.health.v1.Health/") || strings.HasPrefix(method, "/grpc.reflection.")
}

// Interceptors returns interceptors that refuse a call unless it has a token or a client certificate whose role permits
// the call. Health checks and reflection need none: probes cannot have one, and reflection returns the published contract. The context of a
// stream that is not permitted any more is canceled: see Revoked.
func (g *Gate) Interceptors() (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	authenticate := auth.StreamServerInterceptor(g.Authenticate)
	stream := func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		return authenticate(srv, s, info, func(srv any, s grpc.ServerStream) error { return g.guard(srv, s, info.FullMethod, handler) })
	}
	return selector.StreamServerInterceptor(stream, NeedsToken),
		selector.UnaryServerInterceptor(auth.UnaryServerInterceptor(g.Authenticate), NeedsToken)
}

// guard calls a handler, and ends its stream when its credentials permit it no more.
func (g *Gate) guard(srv any, s grpc.ServerStream, method string, handler grpc.StreamHandler) error {
	ctx, end := context.WithCancelCause(s.Context())
	defer end(nil)
	go func() {
		check := time.NewTicker(g.cfg.Interval)
		defer check.Stop()
		for {
			select {
			case <-check.C:
			case <-ctx.Done():
				return
			}
			switch _, err := g.authorize(ctx, method); {
			case errors.Is(err, errExpired):
				g.cfg.Close(ctx)
				return
			case err != nil:
				end(&revokedError{err})
				return
			}
		}
	}()
	err := handler(srv, guarded{s, ctx})
	if revoked := Revoked(ctx); revoked != nil {
		return revoked
	}
	return err
}

// errExpired refuses the calls of a connection whose client certificate was valid when the connection began, and has expired since. The connection is
// closed, so that the client connects again: with another certificate, or TLS refuses it.
var errExpired = callerror.New(callerror.Unauthenticated, journal.Bounds{}, "the client's certificate has expired; connect again with another one")

// guarded is a stream with another context.
type guarded struct {
	grpc.ServerStream
	ctx context.Context
}

func (s guarded) Context() context.Context { return s.ctx }

// revokedError is why a stream is not permitted any more.
type revokedError struct{ error }

// Revoked returns the status of a stream that was ended because it is not permitted any more; nil if it was not.
func Revoked(ctx context.Context) error {
	if revoked := (*revokedError)(nil); errors.As(context.Cause(ctx), &revoked) {
		return revoked.error
	}
	return nil
}

// Authenticate is an auth.AuthFunc. It logs a refused call, since the logging interceptor runs after it. For a
// permitted call, it adds the role to the log record of the logging interceptor.
func (g *Gate) Authenticate(ctx context.Context) (context.Context, error) {
	method, _ := grpc.Method(ctx)
	role, err := g.authorize(ctx, method)
	if err == nil {
		g.cfg.Permitted(ctx)
		return logging.InjectLogField(ctx, "role", string(role)), nil
	}
	if errors.Is(err, errExpired) {
		g.cfg.Close(ctx)
	}
	attrs := []slog.Attr{slog.String("grpc.method", method), slog.String("grpc.code", status.Code(err).String())}
	if p, ok := peer.FromContext(ctx); ok {
		attrs = append(attrs, slog.String(loglimit.PeerAddress, p.Addr.String()))
	}
	if role != "" {
		attrs = append(attrs, slog.String("role", string(role)))
	}
	g.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "refused call", attrs...)
	return nil, err
}

// authorize returns the role of a call's token, or of the client's certificate if the call has no token, and an error if the
// role does not permit the call.
func (g *Gate) authorize(ctx context.Context, method string) (Role, error) {
	role, err := g.identify(ctx)
	if err != nil {
		return "", err
	}
	service := ServiceOf(method)
	if role != RoleOperator && !g.cfg.ForRouters(service) {
		return role, callerror.New(callerror.PermissionDenied, g.cfg.Bounds(),
			"the client's role is %s, which may not call %s; ask the server's operator for a token or a certificate with the role %s", role, service, RoleOperator)
	}
	return role, nil
}

// ServiceOf returns the service of a method such as /kvcast.v1.RouterEventService/GetStatus.
func ServiceOf(method string) string {
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return service
}

func (g *Gate) identify(ctx context.Context) (Role, error) {
	list := g.list.Load()
	token, err := auth.AuthFromMD(ctx, "bearer")
	if err == nil {
		if list.Tokens != nil {
			if known, ok := list.Tokens.bySum[sha256.Sum256([]byte(token))]; ok {
				return known.role, nil
			}
		}
		return "", callerror.New(callerror.Unauthenticated, journal.Bounds{}, "the token is not among those of the server; ask the server's operator for one")
	}
	cert := clientCertificate(ctx)
	if cert == nil {
		want := "no token; send it in the header authorization: Bearer TOKEN"
		if g.cfg.ClientCertificates {
			want += ", or connect with a client certificate"
		}
		return "", callerror.New(callerror.Unauthenticated, journal.Bounds{}, "the call has %s", want)
	}
	role, ok := list.Certificates.role(cert)
	if !ok {
		return "", callerror.New(callerror.Unauthenticated, journal.Bounds{}, "no name of the client's certificate has a role at this server: %.256q; ask the server's operator to add one", certificateNames(cert))
	}
	if time.Now().After(cert.NotAfter) {
		return "", errExpired
	}
	return role, nil
}

// clientCertificate returns the verified certificate of a call's client; nil if there is none.
func clientCertificate(ctx context.Context) *x509.Certificate {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 {
		return nil
	}
	return info.State.VerifiedChains[0][0]
}

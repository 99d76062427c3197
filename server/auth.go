package server

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/auth"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Role is what a token permits.
type Role string

const (
	// RoleRouter permits all of RouterEventService.
	RoleRouter Role = "router"
	// RoleOperator permits everything.
	RoleOperator Role = "operator"
)

// Token lengths in bytes. Shorter tokens can be guessed.
const (
	minToken = 16
	maxToken = 1024
)

// Tokens are the accepted bearer tokens with their roles. They are immutable, and keep only SHA-256 sums.
type Tokens struct {
	known []knownToken
}

type knownToken struct {
	sum  [sha256.Size]byte
	role Role
	line int
}

// ParseTokens parses a tokens file. Each line is ROLE TOKEN, blank, or a comment starting with #. Errors start
// with the file's name and the line number, and never show the line, since it may contain a token.
func ParseTokens(name string, text []byte) (*Tokens, error) {
	t := new(Tokens)
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := t.add(line, number); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, number, err)
		}
	}
	if len(t.known) == 0 {
		return nil, fmt.Errorf("%s: no token found: want at least one line ROLE TOKEN with the role router or operator", name)
	}
	return t, nil
}

func (t *Tokens) add(line string, number int) error {
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return errors.New("the line is not allowed: want two words, ROLE TOKEN")
	}
	role, token := Role(fields[0]), fields[1]
	if role != RoleRouter && role != RoleOperator {
		return errors.New("the role is not allowed: want router or operator, then the token")
	}
	invisible := func(c rune) bool { return c <= ' ' || c > '~' }
	if len(token) < minToken || len(token) > maxToken || strings.IndexFunc(token, invisible) >= 0 {
		return fmt.Errorf("the token is not allowed: want %d to %d visible ASCII characters", minToken, maxToken)
	}
	sum := sha256.Sum256([]byte(token))
	for _, k := range t.known {
		if k.sum == sum {
			return fmt.Errorf("the token is a duplicate of the one in line %d", k.line)
		}
	}
	t.known = append(t.known, knownToken{sum: sum, role: role, line: number})
	return nil
}

// role returns the role of a token, in a time that does not depend on the accepted tokens' contents.
func (t *Tokens) role(token string) (role Role, ok bool) {
	sum := sha256.Sum256([]byte(token))
	for i := range t.known {
		if subtle.ConstantTimeCompare(sum[:], t.known[i].sum[:]) == 1 {
			role, ok = t.known[i].role, true
		}
	}
	return role, ok
}

// authInterceptors returns interceptors that refuse calls without a token whose role permits them. Health
// checks and reflection are public: probes have no token, and reflection returns the published contract.
func (s *Server) authInterceptors() (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	return selector.StreamServerInterceptor(auth.StreamServerInterceptor(s.authenticate), needsToken),
		selector.UnaryServerInterceptor(auth.UnaryServerInterceptor(s.authenticate), needsToken)
}

// authenticate is an auth.AuthFunc. It logs refused calls, since the logging
// interceptor runs after it, and adds the role to the log record of others.
func (s *Server) authenticate(ctx context.Context) (context.Context, error) {
	method, _ := grpc.Method(ctx)
	role, err := s.authorize(ctx, method)
	if err == nil {
		return logging.InjectLogField(ctx, "role", string(role)), nil
	}
	if omitted, ok := s.refusedCalls.allow(); ok {
		attrs := []slog.Attr{slog.String("grpc.method", method), slog.String("grpc.code", status.Code(err).String())}
		if p, ok := peer.FromContext(ctx); ok {
			attrs = append(attrs, slog.String("peer.address", p.Addr.String()))
		}
		if role != "" {
			attrs = append(attrs, slog.String("role", string(role)))
		}
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "refused call", append(attrs, slog.Int("suppressed", omitted))...)
	}
	return nil, err
}

// authorize returns the role of a call's token, with an error if it does not permit the call.
func (s *Server) authorize(ctx context.Context, method string) (Role, error) {
	token, err := auth.AuthFromMD(ctx, "bearer")
	if err != nil {
		return "", errorf(reasonUnauthenticated, journal.Bounds{}, "the call has no token; send it in the header authorization: Bearer TOKEN")
	}
	role, ok := s.cfg.Tokens.role(token)
	if !ok {
		return "", errorf(reasonUnauthenticated, journal.Bounds{}, "the token is not among those that the server read at its start; ask the server's operator for one")
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if role != RoleOperator && service != kvcastv1.RouterEventService_ServiceDesc.ServiceName {
		return role, errorf(reasonPermissionDenied, s.journal.Bounds(),
			"the token's role is %s, which may not call %s; ask the server's operator for a token with the role %s", role, service, RoleOperator)
	}
	return role, nil
}

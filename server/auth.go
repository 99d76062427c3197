package server

import (
	"context"
	"crypto/sha256"
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

// Role determines the calls that a token permits.
type Role string

const (
	// RoleRouter permits all calls of RouterEventService.
	RoleRouter Role = "router"
	// RoleOperator permits all calls.
	RoleOperator Role = "operator"
)

// Token lengths in bytes. Shorter tokens can be guessed.
const (
	minToken = 16
	maxToken = 1024
)

// Tokens are the accepted bearer tokens with their roles. Tokens are immutable and do not contain the tokens
// themselves. Since a lookup is by SHA-256, its time does not reveal how much of a token is correct.
type Tokens struct {
	bySum map[[sha256.Size]byte]knownToken
}

type knownToken struct {
	role Role
	line int // in the tokens file
}

// ParseTokens parses the text of a tokens file. Each line is ROLE TOKEN, blank, or a comment that starts with #.
// Errors have the file's name and the line number, but not the line, since it may contain a token.
func ParseTokens(name string, text []byte) (*Tokens, error) {
	t := &Tokens{bySum: make(map[[sha256.Size]byte]knownToken)}
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
	if len(t.bySum) == 0 {
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
	if k, ok := t.bySum[sum]; ok {
		return fmt.Errorf("the token is a duplicate of the one in line %d", k.line)
	}
	t.bySum[sum] = knownToken{role: role, line: number}
	return nil
}

// authInterceptors returns interceptors that refuse a call unless it has a token whose role permits the call. Health
// checks and reflection need no token: probes have none, and reflection returns the published contract.
func (s *Server) authInterceptors() (grpc.StreamServerInterceptor, grpc.UnaryServerInterceptor) {
	return selector.StreamServerInterceptor(auth.StreamServerInterceptor(s.authenticate), needsToken),
		selector.UnaryServerInterceptor(auth.UnaryServerInterceptor(s.authenticate), needsToken)
}

// authenticate is an auth.AuthFunc. It logs a refused call, since the logging interceptor runs after it. For a
// permitted call, it adds the role to the log record of the logging interceptor.
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

// authorize returns the role of a call's token, and an error if the role does not permit the call.
func (s *Server) authorize(ctx context.Context, method string) (Role, error) {
	token, err := auth.AuthFromMD(ctx, "bearer")
	if err != nil {
		return "", errorf(reasonUnauthenticated, journal.Bounds{}, "the call has no token; send it in the header authorization: Bearer TOKEN")
	}
	known, ok := s.cfg.Tokens.bySum[sha256.Sum256([]byte(token))]
	if !ok {
		return "", errorf(reasonUnauthenticated, journal.Bounds{}, "the token is not among those that the server read at its start; ask the server's operator for one")
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	if known.role != RoleOperator && service != kvcastv1.RouterEventService_ServiceDesc.ServiceName {
		return known.role, errorf(reasonPermissionDenied, s.journal.Bounds(),
			"the token's role is %s, which may not call %s; ask the server's operator for a token with the role %s", known.role, service, RoleOperator)
	}
	return known.role, nil
}

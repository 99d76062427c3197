package access

import (
	"errors"
	"log/slog"
	"net/http"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/loglimit"
)

// maxLoggedPath bounds the bytes of a path in the log.
const maxLoggedPath = 128

// AuthorizeHTTP returns a handler that passes on requests with the credentials of a router or an operator, as calls of
// RouterEventService need them, and refuses others. A token is sent as Bearer token, or as the password of Basic
// authentication, for clients whose only setting is a URL.
func (g *Gate) AuthorizeHTTP(next http.Handler) http.Handler {
	if !g.Closed() {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		if token := httpToken(r); token != "" {
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
		}
		if r.TLS != nil {
			ctx = peer.NewContext(ctx, &peer.Peer{AuthInfo: credentials.TLSInfo{State: *r.TLS}})
		}
		if _, err := g.identify(ctx); err != nil {
			path := r.URL.Path[:min(len(r.URL.Path), maxLoggedPath)]
			g.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "refused request", slog.String("http.path", path), slog.String(loglimit.PeerAddress, r.RemoteAddr))
			w.Header().Set("WWW-Authenticate", `Basic realm="kvcast"`)
			if errors.Is(err, errExpired) {
				w.Header().Set("Connection", "close")
			}
			http.Error(w, status.Convert(err).Message(), http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func httpToken(r *http.Request) string {
	if _, password, ok := r.BasicAuth(); ok {
		return password
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return token
}

package access_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/access"
)

// TestExpiredCertificateIsRefused authenticates with a certificate that was valid when TLS verified it.
func TestExpiredCertificateIsRefused(t *testing.T) {
	t.Parallel()
	g := access.NewGate(access.Config{
		ClientCertificates: true, ForRouters: func(string) bool { return true }, Permitted: func(context.Context) {}, Interval: time.Hour, Logger: slog.New(slog.DiscardHandler),
		Bounds: func() journal.Bounds { return journal.Bounds{} },
	})
	for name, tt := range map[string]struct {
		until time.Time
		want  codes.Code
	}{"valid": {time.Now().Add(time.Hour), codes.OK}, "expired": {time.Now().Add(-time.Second), codes.Unauthenticated}} {
		state := tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{NotAfter: tt.until}}}}
		ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: credentials.TLSInfo{State: state}, Addr: address{}})
		if _, err := g.Authenticate(ctx); status.Code(err) != tt.want {
			t.Errorf("%s: got %v, want %v", name, err, tt.want)
		}
	}
}

type address struct{}

func (address) Network() string { return "tcp" }
func (address) String() string  { return "192.0.2.1:1" }

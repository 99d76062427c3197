package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"

	"github.com/kvcast/kvcast/console"
)

// newAdmin sets the server of the admin port, and the console if it is wanted. The gRPC port must be open.
func (s *Service) newAdmin() {
	handler := s.server.NewAdmin(s.registry)
	if s.cfg.Console && s.cfg.Admin != "" {
		s.console = console.New(console.Config{
			Server: s.server, Loopback: isLoopback(s.cfg.Admin),
			About: console.About{
				GRPC: s.Addr(), TLS: s.cfg.Server.TLS != nil, Token: s.cfg.Server.Access.Tokens != nil || s.cfg.Server.ClientCertificates,
			},
		})
		mux := http.NewServeMux()
		mux.Handle("/", handler)
		s.console.Register(mux)
		handler = mux
	}
	s.admin = &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	if s.cfg.AdminTLS {
		s.admin.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: s.credentials.adminTLS}
	}
}

// maxAdminConnections bounds the connections of Prometheus, probes and pages. Further ones wait.
const maxAdminConnections = 512

// serveAdmin serves the admin port until it is closed.
func (s *Service) serveAdmin() error {
	serve := s.admin.Serve
	if s.cfg.AdminTLS {
		serve = func(l net.Listener) error { return s.admin.ServeTLS(l, "", "") }
	}
	if err := serve(netutil.LimitListener(s.adminPort, maxAdminConnections)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin port: %w", err)
	}
	return nil
}

// adminTLS returns the configuration of a connection to the admin port: that of the gRPC port, except that Prometheus and
// probes need no certificate.
func (r *credentials) adminTLS(*tls.ClientHelloInfo) (*tls.Config, error) {
	c := r.tls.Load().Clone()
	if c.ClientAuth == tls.RequireAndVerifyClientCert {
		c.ClientAuth = tls.VerifyClientCertIfGiven
	}
	c.NextProtos = []string{"h2", "http/1.1"}
	return c, nil
}

// listen opens a port, which a flag names.
func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // omits the address, which the message below contains
		}
		return nil, fmt.Errorf("listen at %s: %w; choose another address with %s", addr, err, flag)
	}
	return l, nil
}

func closePort(l net.Listener) error {
	if l == nil {
		return nil
	}
	return l.Close()
}

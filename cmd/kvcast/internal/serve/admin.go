package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/loglimit"
)

// newAdmin sets the server of the admin port, and the console if it is wanted. The gRPC port must be open.
func (s *Service) newAdmin() {
	handler := s.server.NewAdmin(s.registry)
	if isLoopback(s.cfg.Admin) {
		handler = loopbackHosts(handler)
	}
	if s.cfg.Console && s.cfg.Admin != "" {
		s.console = console.New(console.Config{
			Server: s.server, Loopback: isLoopback(s.cfg.Admin),
			About: console.About{
				GRPC: s.Addr(), TLS: s.cfg.Server.TLS != nil, Token: s.cfg.Server.Access.Tokens != nil || s.cfg.Server.ClientCertificates,
			},
			Registerer: s.registry,
		})
		mux := http.NewServeMux()
		mux.Handle("/", handler)
		s.console.Register(mux)
		handler = mux
	}
	s.admin = &http.Server{
		Handler: limitBodyTime(handler), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute,
		HTTP2:    &http.HTTP2Config{MaxConcurrentStreams: maxAdminStreams},
		ErrorLog: log.New(loglimit.Writer(s.log, slog.LevelDebug, "HTTP server"), "", 0), // failed TLS handshakes, which any peer can cause
	}
	if s.cfg.AdminTLS {
		s.admin.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: s.credentials.adminTLS}
	}
}

const (
	// maxAdminConnections bounds the connections of Prometheus, probes and pages, and maxAdminConnectionsPerAddress those of one
	// client address. Further ones are closed: an address that uses up its own must not keep probes away.
	maxAdminConnections           = 512
	maxAdminConnectionsPerAddress = maxAdminConnections / 8
	// maxAdminStreams bounds the requests in progress of an HTTP/2 connection.
	maxAdminStreams = 32
	// adminBodyTimeout is the time for the body of a request.
	adminBodyTimeout = 10 * time.Second
)

// loopbackHosts refuses requests that name the host otherwise than as loopback, which pages of other sites can make a browser send. On other
// addresses, Prometheus asks by any name.
func loopbackHosts(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if message := console.RefuseHost(r.Host, true, false); message != "" {
			http.Error(w, message, http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// limitBodyTime bounds the time for the body of each request, also of one that no handler reads: net/http waits for that
// before it reads the next request.
func limitBodyTime(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(adminBodyTimeout))
		}
		next.ServeHTTP(w, r)
	})
}

// serveAdmin serves the admin port until it is closed.
func (s *Service) serveAdmin() error {
	serve := s.admin.Serve
	if s.cfg.AdminTLS {
		serve = func(l net.Listener) error { return s.admin.ServeTLS(l, "", "") }
	}
	connections := budget.New("admin_connections", maxAdminConnections)
	s.registry.MustRegister(budget.Collector{connections})
	if err := serve(budget.NewShares(connections, maxAdminConnectionsPerAddress).Limit(s.adminPort)); !errors.Is(err, http.ErrServerClosed) {
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

package server_test

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// plainAndTLS runs a test over plaintext and over TLS.
func plainAndTLS(t *testing.T, test func(t *testing.T, h *fixture)) {
	// With the default StallTimeout, a stalled subscriber might end before the shutdown.
	t.Run("plain", func(t *testing.T) {
		test(t, overTCP(t, server.Config{Limits: server.Limits{StallTimeout: time.Hour}}, journal.Config{}))
	})
	t.Run("TLS", func(t *testing.T) {
		cert, client := secured(t)
		h := overTCP(t, server.Config{TLS: cert, Limits: server.Limits{StallTimeout: time.Hour}}, journal.Config{})
		h.conn = h.Dial(t, grpc.WithTransportCredentials(credentials.NewTLS(client)))
		h.client = kvcastv1.NewRouterEventServiceClient(h.conn)
		test(t, h)
	})
}

func TestShutdownEndsStreamsAfterTheLastEntry(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	// All entries are in flight before the client has read them, so that it may be as slow as the machine.
	h.conn = h.Dial(t, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(16<<20), grpc.WithInitialConnWindowSize(16<<20))
	h.client = kvcastv1.NewRouterEventServiceClient(h.conn)
	h.addWorker()
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 1)
	h.fill(5000)
	ctx, cancel := context.WithTimeout(context.Background(), harness.Timeout)
	defer cancel()
	done := make(chan struct{})
	go func() { defer close(done); h.Server.Shutdown(ctx) }()
	var err error
	for err == nil {
		_, err = s.next()
	}
	wantStatus(t, err, codes.Unavailable, "SHUTTING_DOWN")
	if got := s.checker.Position().GetSeq(); got != 5001 {
		t.Errorf("last position: got %d, want 5001", got)
	}
	<-done
	if ctx.Err() != nil {
		t.Error("shutdown waited until its deadline, although each subscriber has read all entries")
	}
}

// TestShutdownBeforeServe calls Shutdown before Serve, as after a signal during the start.
func TestShutdownBeforeServe(t *testing.T) {
	t.Parallel()
	s := server.New(server.Config{}, journal.NewMemory(journal.Config{}), nil)
	s.Shutdown(t.Context())
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(l); err != nil {
		t.Errorf("serve after shutdown: got %v, want nil", err)
	}
}

func TestShutdownAbortsUnreadSubscriber(t *testing.T) {
	t.Parallel()
	plainAndTLS(t, func(t *testing.T, h *fixture) {
		h.addWorker()
		s := h.subscribe(checker.New(checker.Options{}), earliest())
		s.until(t, 1)
		h.flood()
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		done := make(chan struct{})
		go func() { defer close(done); h.Server.Shutdown(ctx) }()
		select {
		case <-done:
		case <-time.After(harness.Timeout):
			t.Fatal("shutdown continues after its deadline")
		}
		if ctx.Err() == nil {
			t.Error("shutdown ended before its deadline, so the test had no effect")
		}
	})
}

// TestShutdownWaitsForStreamsOnly opens connections without a call, connections with an incomplete handshake, and a
// health watch.
func TestShutdownWaitsForStreamsOnly(t *testing.T) {
	t.Parallel()
	plainAndTLS(t, func(t *testing.T, h *fixture) {
		for _, sent := range []string{"", "PRI * HTTP/2.0\r\n", "\x16\x03\x01\x02\x00\x01"} {
			c, err := new(net.Dialer).DialContext(t.Context(), "tcp", h.conn.Target())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			if _, err := c.Write([]byte(sent)); err != nil {
				t.Fatal(err)
			}
		}
		watch, err := healthv1.NewHealthClient(h.conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := watch.Recv(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), harness.Timeout)
		defer cancel()
		h.Server.Shutdown(ctx)
		if ctx.Err() != nil {
			t.Error("shutdown waited until its deadline")
		}
	})
}

// TestOldTLSIsRefused uses a client limited to TLS 1.1.
func TestOldTLSIsRefused(t *testing.T) {
	t.Parallel()
	cert, client := secured(t)
	h := overTCP(t, server.Config{TLS: cert}, journal.Config{})
	client.MinVersion, client.MaxVersion, client.NextProtos = tls.VersionTLS10, tls.VersionTLS11, []string{"h2"}
	d := tls.Dialer{Config: client}
	if c, err := d.DialContext(t.Context(), "tcp", h.conn.Target()); err == nil {
		_ = c.Close()
		t.Error("the handshake was successful")
	}
	client.MaxVersion = tls.VersionTLS12
	c, err := d.DialContext(t.Context(), "tcp", h.conn.Target())
	if err != nil {
		t.Fatalf("TLS 1.2: %v", err)
	}
	defer func() { _ = c.Close() }()
	if got := c.(*tls.Conn).ConnectionState().NegotiatedProtocol; got != "h2" {
		t.Errorf("protocol: got %q, want h2", got)
	}
}

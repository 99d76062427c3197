package server_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/access"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	routersToken   = "a-router's-token-0"
	operatorsToken = "an-operator's-token-0"
)

func tokens(t testing.TB) *access.Tokens {
	t.Helper()
	tokens, err := access.ParseTokens("f", []byte("router "+routersToken+"\noperator "+operatorsToken+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// syncBuffer is a buffer for concurrent writers.
type syncBuffer struct {
	mu  sync.Mutex // guards all below
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestRolesPermitTheirCalls makes calls that are permitted. TestErrorContract makes calls that are denied.
func TestRolesPermitTheirCalls(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}, Logger: logger}, journal.Config{})
	h.addWorker()
	for _, authorization := range []string{"Bearer " + routersToken, "bearer " + operatorsToken} {
		h.client = kvcastv1.NewRouterEventServiceClient(h.as(authorization))
		h.subscribe(checker.New(checker.Options{}), earliest()).until(t, 1)
		if _, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{}); err != nil {
			t.Errorf("GetStatus: %v", err)
		}
	}
	// The call is permitted, and fails since the server registers no workers.
	_, err := kvcastv1.NewWorkerServiceClient(h.as("Bearer "+operatorsToken)).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{})
	wantStatus(t, err, codes.Unimplemented, "UNIMPLEMENTED")
	_, err = kvcastv1.NewWorkerServiceClient(h.as("Bearer "+routersToken)).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{})
	wantStatus(t, err, codes.PermissionDenied, "PERMISSION_DENIED")
	for _, says := range []string{
		// Answered queries are logged at debug level.
		`level=DEBUG msg="finished call" grpc.service=kvcast.v1.RouterEventService grpc.method=GetStatus role=router `,
		`level=DEBUG msg="finished call" grpc.service=kvcast.v1.RouterEventService grpc.method=GetStatus role=operator `,
		`level=INFO msg="finished call" grpc.service=kvcast.v1.WorkerService grpc.method=RegisterWorker role=operator `,
		`msg="refused call" grpc.method=/kvcast.v1.WorkerService/RegisterWorker grpc.code=PermissionDenied peer.address=127.0.0.1:`,
	} {
		if !strings.Contains(log.String(), says) {
			t.Errorf("no %q in the log:\n%s", says, log.String())
		}
	}
	if strings.Contains(log.String(), "token-0") {
		t.Errorf("a token is in the log:\n%s", log.String())
	}
}

// TestStreamsEndWhenTheirTokenIsRemoved replaces the tokens while streams are open: those of the removed token end, and no others.
func TestStreamsEndWhenTheirTokenIsRemoved(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}, AccessInterval: time.Millisecond}, journal.Config{})
	h.addWorker()
	operator := kvcastv1.NewRouterEventServiceClient(h.as("Bearer " + operatorsToken))
	kept, err := operator.Subscribe(t.Context(), earliest())
	if err != nil {
		t.Fatal(err)
	}
	router := kvcastv1.NewRouterEventServiceClient(h.as("Bearer " + routersToken))
	subscribed, err := router.Subscribe(t.Context(), earliest())
	if err != nil {
		t.Fatal(err)
	}
	matching, err := router.MatchPrefixes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := subscribed.Recv(); err != nil {
		t.Fatal(err)
	}
	left, err := access.ParseTokens("f", []byte("operator "+operatorsToken+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	h.Server.SetAccess(access.List{Tokens: left})
	for err == nil {
		_, err = subscribed.Recv()
	}
	wantStatus(t, err, codes.Unauthenticated, "UNAUTHENTICATED")
	_, err = matching.Recv()
	wantStatus(t, err, codes.Unauthenticated, "UNAUTHENTICATED")
	h.append(1)
	for stored := false; !stored; {
		m, err := kept.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetEntries() {
			stored = stored || slices.ContainsFunc(e.GetEvents(), func(e *kvcastv1.RouterEvent) bool { return e.GetStored() != nil })
		}
	}
}

// TestConnectionOfAnExpiredCertificateIsClosed has a stream, and a connection for calls, that are open longer than the client's certificate is valid.
func TestConnectionOfAnExpiredCertificateIsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := harness.NewAuthority(t)
		text, err := os.ReadFile(ca.File)
		if err != nil {
			t.Fatal(err)
		}
		cas := x509.NewCertPool()
		cas.AppendCertsFromPEM(text)
		own, err := tls.LoadX509KeyPair(ca.Issue("router"))
		if err != nil {
			t.Fatal(err)
		}
		cert, client := secured(t)
		client.ServerName = "example.com"
		cert.ClientCAs, cert.ClientAuth, client.Certificates = cas, tls.RequireAndVerifyClientCert, []tls.Certificate{own}
		h := inMemory(t, server.Config{TLS: cert, ClientCertificates: true, Limits: server.Limits{StallTimeout: 24 * time.Hour}}, journal.Config{})
		h.addWorker()
		dial := func() kvcastv1.RouterEventServiceClient {
			return kvcastv1.NewRouterEventServiceClient(h.Dial(t, grpc.WithTransportCredentials(credentials.NewTLS(client)), grpc.WithIdleTimeout(0)))
		}
		calls := dial()
		if _, err := calls.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{}); err != nil {
			t.Fatal(err)
		}
		stream, err := dial().Subscribe(t.Context(), earliest())
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now() // the certificate is valid for an hour
		for err == nil {
			_, err = stream.Recv()
		}
		if took := time.Since(began); status.Code(err) != codes.Unavailable || took < time.Hour || took > time.Hour+2*server.DefaultAccessInterval {
			t.Errorf("got %v after %v, want UNAVAILABLE after an hour and at most %v more", err, took, 2*server.DefaultAccessInterval)
		}
		for range 2 { // on the connection, and on another one
			if _, err := calls.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{}); status.Code(err) != codes.Unavailable {
				t.Errorf("got %v for a call, want UNAVAILABLE", err)
			}
		}
	})
}

// TestExpiredCertificateOfAnotherPortIsRefused makes a call as the console does, over the admin port, whose connections the gRPC server cannot close.
func TestExpiredCertificateOfAnotherPortIsRefused(t *testing.T) {
	t.Parallel()
	cert, _ := secured(t)
	h := inMemory(t, server.Config{TLS: cert, ClientCertificates: true}, journal.Config{})
	expired := &x509.Certificate{NotAfter: time.Now().Add(-time.Second)}
	_, err := h.Server.Call(t.Context(), kvcastv1.RouterEventService_GetStatus_FullMethodName, server.Caller{
		Address: &net.TCPAddr{}, TLS: &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{expired}}},
	}, func(proto.Message) error { return nil })
	wantStatus(t, err, codes.Unauthenticated, "UNAUTHENTICATED")
}

// TestProbesNeedNoToken makes the calls of load balancers and grpcurl.
func TestProbesNeedNoToken(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}}, journal.Config{})
	if _, err := healthv1.NewHealthClient(h.conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Errorf("health: %v", err)
	}
	stream, err := reflectionv1.NewServerReflectionClient(h.conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || len(m.GetListServicesResponse().GetService()) == 0 {
		t.Errorf("reflection: got %v, %v", m, err)
	}
}

// TestRefusedSubscriberUsesNoSlot subscribes without a token while the only slot is in use. The error must be
// UNAUTHENTICATED, not TOO_MANY_SUBSCRIBERS.
func TestRefusedSubscriberUsesNoSlot(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Access: access.List{Tokens: tokens(t)}, Limits: server.Limits{MaxSubscribers: 1}}, journal.Config{})
	stranger := h.client
	h.client = kvcastv1.NewRouterEventServiceClient(h.as("Bearer " + routersToken))
	if _, err := h.subscribe(checker.New(checker.Options{}), earliest()).next(); err != nil {
		t.Fatal(err)
	}
	stream, err := stranger.Subscribe(t.Context(), latest())
	wantStatus(t, firstError(t, err, stream.Recv), codes.Unauthenticated, "UNAUTHENTICATED")
	if got := h.subscribers(t); got != 1 {
		t.Errorf("subscribers: got %d, want the one with a token", got)
	}
}

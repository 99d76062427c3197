package main_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// dialWith returns a connection with a client certificate, or without one if cert is empty.
func dialWith(t *testing.T, s *process, ca *harness.Authority, cert, key string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	pem, err := os.ReadFile(ca.File)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{RootCAs: x509.NewCertPool()}
	cfg.RootCAs.AppendCertsFromPEM(pem)
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	conn, err := grpc.NewClient(s.Address(), append(options, grpc.WithTransportCredentials(credentials.NewTLS(cfg)))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// calls returns the codes of GetStatus, which a router may call, and of DeregisterWorker, which an operator may call.
func calls(t *testing.T, conn *grpc.ClientConn) (router, operator codes.Code) {
	t.Helper()
	_, err := kvcastv1.NewRouterEventServiceClient(conn).GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	_, operatorErr := kvcastv1.NewWorkerServiceClient(conn).DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "absent"})
	return status.Code(err), status.Code(operatorErr)
}

func TestClientCertificatesAreRoles(t *testing.T) {
	t.Parallel()
	ca, otherCA := harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	listed := []string{"--auth-certificates", secretFile(t, "names", "operator ops.example.com\nrouter gateway\n")}
	tokens := []string{"--auth-tokens", secretFile(t, "tokens", "router "+routersToken)}
	for _, tt := range []struct {
		name             string
		flags            []string
		issue            func() (cert, key string) // nil: no certificate
		router, operator codes.Code
	}{
		{"any certificate", nil, func() (string, string) { return ca.Issue("anyone") }, codes.OK, codes.PermissionDenied},
		{"listed by its common name", listed, func() (string, string) { return ca.Issue("gateway") }, codes.OK, codes.PermissionDenied},
		{"common name beside another name", listed, func() (string, string) { return ca.Issue("gateway", "else.example.com") }, codes.Unauthenticated, codes.Unauthenticated},
		{"listed by its DNS name", listed, func() (string, string) { return ca.Issue("gateway", "ops.example.com") }, codes.OK, codes.NotFound},
		{"not listed", listed, func() (string, string) { return ca.Issue("anyone") }, codes.Unauthenticated, codes.Unauthenticated},
		{"of another CA", nil, func() (string, string) { return otherCA.Issue("gateway") }, codes.Unavailable, codes.Unavailable},
		{"expired", nil, func() (string, string) {
			return ca.IssueWith("gateway", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })
		}, codes.Unavailable, codes.Unavailable},
		{"not yet valid", nil, func() (string, string) {
			return ca.IssueWith("gateway", func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })
		}, codes.Unavailable, codes.Unavailable},
		{"of a server only", nil, func() (string, string) {
			return ca.IssueWith("gateway", func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
		}, codes.Unavailable, codes.Unavailable},
		{"none", nil, nil, codes.Unavailable, codes.Unavailable},
		{"none, but there are tokens", tokens, nil, codes.Unauthenticated, codes.Unauthenticated},
		{"any, and there are tokens", tokens, func() (string, string) { return ca.Issue("anyone") }, codes.OK, codes.PermissionDenied},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, append([]string{"--bind", "tcp://127.0.0.1:*", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File}, tt.flags...)...)
			var clientCert, clientKey string
			if tt.issue != nil {
				clientCert, clientKey = tt.issue()
			}
			router, operator := calls(t, dialWith(t, s, ca, clientCert, clientKey))
			if router != tt.router || operator != tt.operator {
				t.Errorf("got %v for a router's call and %v for an operator's, want %v and %v", router, operator, tt.router, tt.operator)
			}
		})
	}
}

func TestCommandsSendClientCertificates(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	ca := harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File)
	flags := []string{"status", "--addr", s.Address(), "--ca", ca.File}
	if got := kvcast(t, nil, append(flags, "--cert", cert, "--key", key)...); got.status != 0 {
		t.Errorf("got status %d and %q", got.status, got.err)
	}
	if got := kvcast(t, nil, flags...); got.status != 1 || !strings.Contains(got.err, "--cert") {
		t.Errorf("without a certificate: got status %d and %q, want the flag", got.status, got.err)
	}
	if got := kvcast(t, nil, append(flags, "--cert", cert)...); got.status != 2 || got.err != "kvcast: --cert and --key: want both or neither\n" {
		t.Errorf("without a key: got status %d and %q", got.status, got.err)
	}
}

// TestCredentialsAreReadAgain replaces the tokens, the certificate, and the CA of clients of a server that runs.
func TestCredentialsAreReadAgain(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	ca, next := harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	clientCert, clientKey := ca.Issue("gateway")
	names := secretFile(t, "names", "router gateway")
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File, "--auth-certificates", names)
	conn := dialWith(t, s, ca, clientCert, clientKey)
	if _, operator := calls(t, conn); operator != codes.PermissionDenied {
		t.Errorf("got %v, want PERMISSION_DENIED", operator)
	}
	replace(t, names, "admin gateway")
	s.AwaitLog(`level=ERROR msg="changed tokens or certificates cannot be used; the former stay in use" error="auth.certificates: .*:1: the role is not allowed`)
	if router, _ := calls(t, conn); router != codes.OK {
		t.Errorf("after a mistake: got %v, want OK", router)
	}
	replace(t, names, "operator gateway")
	s.AwaitLog(`msg="tokens and certificates read again, because their files have changed"`)
	if _, operator := calls(t, conn); operator != codes.NotFound { // on the same connection
		t.Errorf("with the role operator: got %v, want NOT_FOUND", operator)
	}

	nextCert, nextKey := next.Issue("server")
	for from, to := range map[string]string{nextCert: cert, nextKey: key, next.File: ca.File} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		replace(t, to, string(text))
	}
	clientCert, clientKey = next.Issue("gateway")
	harness.WaitFor(t, func() bool {
		router, _ := calls(t, dialWith(t, s, next, clientCert, clientKey))
		return router == codes.OK
	})
	pair, err := tls.LoadX509KeyPair(nextCert, nextKey)
	if err != nil {
		t.Fatal(err)
	}
	s.AwaitSample(fmt.Sprintf("kvcast_server_certificate_expiry_timestamp_seconds %v", float64(pair.Leaf.NotAfter.Unix())))
}

// TestHalfReplacedCertificatesChangeNothing replaces a certificate and its key in steps, as by hand. New connections have the former ones until both are there.
func TestHalfReplacedCertificatesChangeNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	ca, next := harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	nextCert, nextKey := next.Issue("server")
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--tls-cert", cert, "--tls-key", key)
	s.Address() // waits until they are loaded
	copyOf := func(file string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, step := range []struct {
		change func()
		logs   string
	}{
		{func() { replace(t, cert, "") }, `msg="changed tokens or certificates cannot be used; the former stay in use" .*tls.cert`},
		{func() { replace(t, cert, copyOf(nextCert)) }, `msg="changed tokens or certificates cannot be used; the former stay in use" .*private key does not match`},
		{func() {
			if err := os.Remove(key); err != nil {
				t.Fatal(err)
			}
		}, `msg="tokens and certificates are not read again; the former stay in use"`},
	} {
		step.change()
		s.AwaitLog(step.logs)
		if router, _ := calls(t, dialWith(t, s, ca, "", "")); router != codes.OK {
			t.Errorf("after %s: got %v, want OK", step.logs, router)
		}
	}
	replace(t, key, copyOf(nextKey))
	s.AwaitLog(`msg="tokens and certificates read again, because their files have changed"`)
	if router, _ := calls(t, dialWith(t, s, next, "", "")); router != codes.OK {
		t.Errorf("with the next certificate: got %v, want OK", router)
	}
}

// replace replaces a file as Kubernetes and cert-manager do: by renaming.
func replace(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

func TestOpenPortsAreReported(t *testing.T) {
	t.Parallel()
	prompts := []string{"--emit-token-ids", "--retain-token-ids"}
	readable := secretFile(t, "tokens", "router "+routersToken)
	if err := os.Chmod(readable, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		flags []string
		want  []string
	}{
		{"loopback", nil, nil},
		{"all addresses", []string{"--listen", ":0"}, []string{`msg="everyone who reaches the gRPC port may call it`}},
		{"all addresses, with tokens", []string{"--listen", ":0", "--auth-tokens", secretFile(t, "tokens", "router "+routersToken)}, []string{`msg="tokens without TLS`}},
		{"tokens on loopback", []string{"--auth-tokens", secretFile(t, "tokens", "router "+routersToken)}, nil},
		{"tokens that everyone may read", []string{"--auth-tokens", readable}, []string{`msg="every user of this host may read a file of secrets`}},
		{"Dynamo's port", []string{"--egress-dynamo-listen", ":0"}, []string{`msg="everyone who reaches the port for Dynamo may query it`}},
		{"prompts for routers", append(prompts, "--egress-zmq-bind", "tcp://*:0"), []string{`msg="prompts are published as token ids`}},
		{"prompts for routers on loopback", append(prompts, "--egress-zmq-bind", "tcp://127.0.0.1:*"), nil},
		{"the admin port with tokens", []string{"--admin", ":0", "--auth-tokens", secretFile(t, "tokens", "router "+routersToken)},
			[]string{`msg="everyone who reaches the admin port may read metrics`, `msg="tokens that browsers send to the console`}},
		{"the admin port", []string{"--admin", ":0"}, []string{`msg="everyone who reaches the admin port may read metrics`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, append([]string{"--bind", "tcp://127.0.0.1:*"}, tt.flags...)...)
			s.Address()
			var warnings []string
			for _, line := range s.Log() {
				if strings.Contains(line, "level=WARN") {
					warnings = append(warnings, line)
				}
			}
			if len(warnings) != len(tt.want) {
				t.Fatalf("got warnings %q, want %q", warnings, tt.want)
			}
			for i, want := range tt.want {
				if !strings.Contains(warnings[i], want) {
					t.Errorf("got %q, want %q", warnings[i], want)
				}
			}
		})
	}
}

func TestWorkersAreNotRegisteredByEveryone(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--auth-open-registration=false", "--reflection=false")
	conn := harness.Dial(t, s.Address())
	client := kvcastv1.NewWorkerServiceClient(conn)
	_, err := client.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{Name: "w"}})
	_, deregisterErr := client.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "w"})
	for _, err := range []error{err, deregisterErr} {
		if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "--auth-open-registration") {
			t.Errorf("got %v, want PERMISSION_DENIED and the flag", err)
		}
	}
	var info any
	if err := conn.Invoke(t.Context(), "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", &kvcastv1.GetStatusRequest{}, info); status.Code(err) != codes.Unimplemented {
		t.Errorf("reflection: got %v, want UNIMPLEMENTED", err)
	}
}

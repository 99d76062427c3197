package main_test

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// certificate writes a certificate for 127.0.0.1 and example.com, which is its own
// CA, and its key.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	known := httptest.NewTLSServer(nil) // used for its certificate only
	defer known.Close()
	pair := known.TLS.Certificates[0]
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return secretFile(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))),
		secretFile(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
}

func secretFile(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const (
	routersToken   = "a-router's-token-0"
	operatorsToken = "an-operator's-token-0"
)

func TestServeWithTLSAndTokens(t *testing.T) {
	testclass.Process(t)
	cert, key := certificate(t)
	file := secretFile(t, "tokens", "# the gateway\nrouter "+routersToken+"\noperator "+operatorsToken+"\n")
	_, s := engine(t, "--auth-tokens", file, "--tls-cert", cert, "--tls-key", key)
	token := secretFile(t, "token", routersToken+"\n")
	subscribe := []string{"subscribe", "--addr", s.Address(), "--after", ":0", "--count", "1"}
	got := kvcast(t, nil, append(subscribe, "--ca", cert, "--token-file", token)...)
	hint := " --addr " + s.Address() + " --ca " + cert + " --token-file " + token + " --after "
	if got.status != 0 || !strings.Contains(got.out, "worker added") || !strings.Contains(got.err, hint) {
		t.Errorf("got status %d, %q and %q; want a worker, and a hint with the same flags", got.status, got.out, got.err)
	}
	t.Setenv("KVCAST_TOKEN", operatorsToken)
	if got = kvcast(t, nil, append(subscribe, "--ca", cert)...); got.status != 0 || !strings.Contains(got.out, "worker added") {
		t.Errorf("with the variable: got status %d and %q", got.status, got.err)
	}
	t.Setenv("KVCAST_TOKEN", routersToken+"x")
	for _, tt := range []struct {
		name  string
		flags []string
		says  string
	}{
		{"a wrong token", []string{"--ca", cert}, "UNAUTHENTICATED: "},
		{"no TLS", nil, "closes the connection; if it uses TLS, add --tls or --ca FILE"},
		{"a CA that the machine does not know", []string{"--tls"}, "is not trusted: certificate signed by unknown authority; give the file of its CA with --ca"},
	} {
		got := kvcast(t, nil, append(subscribe, tt.flags...)...)
		if got.status != 1 || strings.Count(got.err, "\n") != 1 || !strings.Contains(got.err, tt.says) {
			t.Errorf("%s: got status %d and %q; want a line that says %q", tt.name, got.status, got.err, tt.says)
		}
	}
	t.Setenv("KVCAST_TOKEN", "")
	got = kvcast(t, nil, append(subscribe, "--ca", cert)...)
	if want := " (--token-file FILE, or the variable KVCAST_TOKEN)\n"; got.status != 1 || !strings.HasSuffix(got.err, want) {
		t.Errorf("without a token: got status %d and %q, want %q", got.status, got.err, want)
	}
	if log := strings.Join(s.Log(), "\n"); strings.Contains(log, "token-0") || strings.Contains(log, "without TLS") {
		t.Errorf("a token, or a warning that is not due, is in the log:\n%s", log)
	}
}

func TestTokensWithoutTLS(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	_, s := engine(t, "--auth-tokens", secretFile(t, "tokens", "router "+routersToken))
	token := secretFile(t, "token", routersToken)
	if got := kvcast(t, nil, "status", "--addr", s.Address(), "--token-file", token); got.status != 0 {
		t.Errorf("TLS that a proxy terminates: got status %d and %q", got.status, got.err)
	}
	got := kvcast(t, nil, "status", "--addr", s.Address(), "--tls", "--token-file", token)
	if want := "kvcast: the server at " + s.Address() + " does not use TLS; omit --tls and --ca\n"; got.err != want || got.status != 1 {
		t.Errorf("TLS to a server without TLS: got status %d and %q, want %q", got.status, got.err, want)
	}
}

// TestSecretsAreNotInErrors covers mistakes in files of tokens, certificates and keys.
func TestSecretsAreNotInErrors(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	cert, key := certificate(t)
	other := secretFile(t, "other.pem", "secret-0123456789")
	bad := secretFile(t, "bad", "router secret-0123456789\nsecret-9876543210 router\n")
	for _, tt := range []struct {
		name string
		args []string
		says []string
	}{
		{"no such tokens", []string{"serve", "--auth-tokens", "none"}, []string{"auth.tokens: open none: no such file"}},
		{"a line", []string{"serve", "--auth-tokens", bad}, []string{"auth.tokens: " + bad + ":2: the role is not allowed: want router or operator"}},
		{"a line, checked only", []string{"serve", "--check", "--auth-tokens", bad}, []string{"auth.tokens: " + bad + ":2: "}},
		{"no such certificate", []string{"serve", "--tls-cert", "none", "--tls-key", key}, []string{"tls.cert none with tls.key "}},
		{"no such key", []string{"serve", "--tls-cert", cert, "--tls-key", "none"}, []string{": open none: no such file"}},
		{"no key in the key's file", []string{"serve", "--tls-cert", cert, "--tls-key", other}, []string{cert, other, "key input", "want a certificate and its key, each in PEM"}},
		{"swapped", []string{"serve", "--tls-cert", key, "--tls-key", cert}, []string{cert, key, "want a certificate and its key, each in PEM"}},
		{"no such CA", []string{"status", "--ca", "none"}, []string{"--ca: open none: no such file"}},
		{"no CA", []string{"status", "--ca", other}, []string{"--ca: " + other + " has no certificate"}},
		{"no such token", []string{"status", "--token-file", "none"}, []string{"--token-file: open none: no such file"}},
		{"a server's tokens", []string{"status", "--token-file", bad}, []string{"--token-file: " + bad + " is not a token: want visible ASCII"}},
		{"no token", []string{"status", "--token-file", secretFile(t, "empty", "\n")}, []string{"is empty: want a token"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.args[0] == "serve" {
				tt.args = append(tt.args, "--bind", "tcp://127.0.0.1:*")
			}
			got := kvcast(t, nil, tt.args...)
			for _, says := range tt.says {
				if !strings.Contains(got.err, says) {
					t.Errorf("got %q, want it to say %q", got.err, says)
				}
			}
			if got.status != 2 || strings.Count(got.err, "\n") != 1 || strings.Contains(got.err, "secret-") {
				t.Errorf("got status %d and %q, want 2 and a line without the secret", got.status, got.err)
			}
		})
	}
}

package main_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestDynamoQueriesWithCredentials asks a server with TLS and tokens for the worker of a prompt, as Dynamo's router does.
func TestDynamoQueriesWithCredentials(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	cert, key := certificate(t)
	tokens := secretFile(t, "tokens", "router "+routersToken+"\n")
	file := secretFile(t, "kvcast.yaml", "egress: {dynamo: {worker_ids: [{worker: w, id: 7}]}}\n")
	p, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2})
	s := serve(t, "--config", file, "--egress-dynamo-listen", "127.0.0.1:0", "--auth-tokens", tokens, "--tls-cert", cert, "--tls-key", key,
		"--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	address := s.AwaitLog(`msg=serving dynamo=(\S+)`)
	pem, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: waitTimeout}
	call := func(method, user, path, header string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, "https://"+user+address+path, strings.NewReader(`{"token_ids":[1,2,3,4,5],"model_name":"m"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if header != "" {
			req.Header.Set("Authorization", header)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, strings.TrimSpace(string(body))
	}
	want := `{"scores":{"7":{"0":4}},"frequencies":[],"instances":{"7":{"longest_matched":4,"gpu":4,"dp":{"0":4},"cpu":4,"disk":4}}}`
	for _, tt := range []struct {
		name, user, header string
		status             int
	}{
		{"a bearer token", "", "Bearer " + routersToken, http.StatusOK},
		{"a token in the URL", "router:" + routersToken + "@", "", http.StatusOK},
		{"no token", "", "", http.StatusUnauthorized},
		{"a wrong token", "", "Bearer " + routersToken + "x", http.StatusUnauthorized},
		{"a wrong token in the URL", "router:" + routersToken + "x@", "", http.StatusUnauthorized},
	} {
		status, got := call(http.MethodPost, tt.user, "/query", tt.header)
		if status != tt.status || (got == want) != (status == http.StatusOK) {
			t.Errorf("%s: got status %d and %s", tt.name, status, got)
		}
	}
	if status, _ := call(http.MethodGet, "", "/health", ""); status != http.StatusOK {
		t.Errorf("health without a token: got status %d", status)
	}
}

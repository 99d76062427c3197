package main_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// console calls GetStatus over the admin port of a server, and returns the status. credentials are pairs of headers.
func console(t *testing.T, client *http.Client, url string, headers ...string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/console/rpc/kvcast.v1.RouterEventService/GetStatus", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return answered(t, client, r)
}

func fetch(t *testing.T, client *http.Client, url string, host ...string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = strings.Join(host, "")
	return answered(t, client, r)
}

func answered(t *testing.T, client *http.Client, r *http.Request) int {
	t.Helper()
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode
}

// TestConsoleOnLoopbackNeedsNothing also covers that the console can be turned off.
func TestConsoleOnLoopbackNeedsNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	tokens := secretFile(t, "tokens", "router "+routersToken)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for flag, want := range map[string]int{"--console=true": http.StatusOK, "--console=false": http.StatusNotFound} {
		s := serve(t, "--bind", "tcp://127.0.0.1:*", "--auth-tokens", tokens, flag)
		admin, err := s.Admin()
		if err != nil {
			t.Fatal(err)
		}
		if got := fetch(t, client, "http://"+admin+"/"); got != want {
			t.Errorf("%s: got %d for the page, want %d", flag, got, want)
		}
		if got := console(t, client, "http://"+admin); got != want {
			t.Errorf("%s: got %d for a call, want %d", flag, got, want)
		}
		if want == http.StatusOK {
			s.AwaitSample(`kvcast_budget_limit{resource="console_answer_bytes"} 6.7108864e+07`)
		}
		for _, path := range []string{"/metrics", "/healthz", "/readyz", "/debug/pprof/"} {
			if got := fetch(t, client, "http://"+admin+path); got != http.StatusOK {
				t.Errorf("%s: got %d for %s", flag, got, path)
			}
			// The name of another site, which resolves to the port's address.
			if got := fetch(t, client, "http://"+admin+path, "evil.example.com"); got != http.StatusMisdirectedRequest {
				t.Errorf("%s: got %d for %s by another name", flag, got, path)
			}
		}
	}
}

// TestConsoleElsewhereNeedsWhatCallsNeed has a server with TLS, tokens and client certificates, whose admin port is not on
// loopback. Probes and Prometheus need neither.
func TestConsoleElsewhereNeedsWhatCallsNeed(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	ca := harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--admin", ":0", "--admin-tls", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File,
		"--auth-tokens", secretFile(t, "tokens", "router "+routersToken))
	admin, err := s.Admin()
	if err != nil {
		t.Fatal(err)
	}
	url := "https://127.0.0.1" + admin[strings.LastIndexByte(admin, ':'):]
	pem, err := os.ReadFile(ca.File)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	for name, test := range map[string]struct {
		certificate bool
		headers     []string
		want        int
	}{
		"nothing":                {false, nil, http.StatusUnauthorized},
		"a token":                {false, []string{"Authorization", "Bearer " + routersToken}, http.StatusOK},
		"another token":          {false, []string{"Authorization", "Bearer x" + routersToken}, http.StatusUnauthorized},
		"a client's certificate": {true, nil, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
			if test.certificate {
				certFile, keyFile := ca.Issue("gateway")
				pair, err := tls.LoadX509KeyPair(certFile, keyFile)
				if err != nil {
					t.Fatal(err)
				}
				config.Certificates = []tls.Certificate{pair}
			}
			transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
			t.Cleanup(transport.CloseIdleConnections)
			client := &http.Client{Transport: transport}
			if got := console(t, client, url, test.headers...); got != test.want {
				t.Errorf("a call: got %d, want %d", got, test.want)
			}
			for _, path := range []string{"/", "/metrics", "/healthz"} {
				if got := fetch(t, client, url+path, "kvcast.example.com"); got != http.StatusOK {
					t.Errorf("got %d for %s", got, path)
				}
			}
		})
	}
}

var consoleAddress = regexp.MustCompile(`open (http://\S+) in a browser`)

// TestDemoOfTheConsole opens the page that the demo names, and interrupts the demo.
func TestDemoOfTheConsole(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t), "--end-with-stdin", "demo", "--console")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	url := ""
	for url == "" && lines.Scan() {
		if m := consoleAddress.FindStringSubmatch(lines.Text()); m != nil {
			url = m[1]
		}
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if url == "" {
		t.Error("the demo names no address")
	} else if page, call := fetch(t, client, url), console(t, client, strings.TrimSuffix(url, "/")); page != http.StatusOK || call != http.StatusOK {
		t.Errorf("got %d for the page and %d for a call", page, call)
	}
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

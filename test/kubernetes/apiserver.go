package kubernetes

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/test/harness"
)

// readyInterval is the time between two checks whether a server is ready, which takes seconds.
const readyInterval = 50 * time.Millisecond

// APIServer is a running kube-apiserver with its etcd. The test stops both.
type APIServer struct {
	URL        string // https://127.0.0.1:PORT
	Token      string // bearer token of a user who may do everything
	CAFile     string // file of the server's certificate and its CA, in PEM
	Kubeconfig string // file with the three above

	t       testing.TB
	program string
	args    []string
	dir     string
	server  *process // nil while stopped
}

// Start starts etcd and kube-apiserver in a new directory of the test, and waits until they are ready. It skips the test
// if one of the programs is missing.
//
// The admission plugin ServiceAccount is disabled: without controllers, no namespace has a default service account.
func Start(t testing.TB) *APIServer {
	t.Helper()
	apiserver := Program(t, "kube-apiserver", "kube-apiserver")
	etcd := installed(t, "etcd", "etcd-server")
	dir := t.TempDir()
	etcdURL := startEtcd(t, etcd, dir)

	port := harness.FreePort(t)
	s := &APIServer{
		URL: fmt.Sprintf("https://127.0.0.1:%d", port), Token: rand.Text(),
		CAFile: filepath.Join(dir, "certificates", "apiserver.crt"), Kubeconfig: filepath.Join(dir, "kubeconfig"),
		t: t, program: apiserver, dir: dir,
	}
	tokens, key := filepath.Join(dir, "tokens.csv"), filepath.Join(dir, "service-accounts.key")
	write(t, tokens, fmt.Appendf(nil, "%s,admin,admin,system:masters\n", s.Token))
	write(t, key, newKey(t))
	write(t, s.Kubeconfig, []byte(s.kubeconfig()))
	s.args = []string{
		"--etcd-servers", etcdURL, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(port),
		"--endpoint-reconciler-type", "none", // no address of this machine is published in the cluster
		"--cert-dir", filepath.Dir(s.CAFile), "--service-cluster-ip-range", "10.0.0.0/24",
		"--token-auth-file", tokens, "--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount",
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-signing-key-file", key, "--service-account-key-file", key,
	}
	t.Cleanup(func() {
		if s.server != nil {
			s.Kill()
		}
	})
	s.Restart()
	return s
}

// Kill ends kube-apiserver at once, as a crash does. Its connections break.
func (s *APIServer) Kill() { s.end(syscall.SIGKILL) }

// Stop shuts kube-apiserver down. It ends open watches first.
func (s *APIServer) Stop() { s.end(syscall.SIGTERM) }

func (s *APIServer) end(by syscall.Signal) {
	s.t.Helper()
	if s.server == nil {
		s.t.Fatal("kube-apiserver is stopped already")
	}
	s.server.stop(by)
	s.server = nil
}

// Restart starts a kube-apiserver that was stopped or killed, with the same data, URL, token and certificate, and waits
// until it is ready.
func (s *APIServer) Restart() {
	s.t.Helper()
	if s.server != nil {
		s.t.Fatal("kube-apiserver runs already")
	}
	s.server = startProcess(s.t, filepath.Join(s.dir, "kube-apiserver.log"), s.program, s.args...)
	awaitReady(s.t, s.server, func(ctx context.Context) error {
		certificates, err := os.ReadFile(s.CAFile) // written by the server
		if err != nil {
			return err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(certificates)
		return get(ctx, s.URL+"/readyz", s.Token, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})
	})
}

func (s *APIServer) kubeconfig() string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: admin}}]
clusters: [{name: test, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: admin, user: {token: %q}}]
`, s.URL, s.CAFile, s.Token)
}

// startEtcd starts etcd, which the test stops, and returns its URL.
func startEtcd(t testing.TB, program, dir string) string {
	t.Helper()
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", harness.FreePort(t)), fmt.Sprintf("http://127.0.0.1:%d", harness.FreePort(t))
	etcd := startProcess(t, filepath.Join(dir, "etcd.log"), program, "--name", "test", "--data-dir", filepath.Join(dir, "etcd"),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "test="+peer)
	t.Cleanup(func() { etcd.stop(syscall.SIGKILL) })
	awaitReady(t, etcd, func(ctx context.Context) error { return get(ctx, client+"/health", "", nil) })
	return client
}

// awaitReady waits until a check of a program succeeds.
func awaitReady(t testing.TB, p *process, check func(context.Context) error) {
	t.Helper()
	ctx := harness.Context(t)
	poll := time.NewTicker(readyInterval)
	defer poll.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return
		}
		select {
		case <-poll.C:
		case <-p.ended:
			t.Fatalf("%s ended (%v) before it was ready: %v\n%s", p.command.Path, p.command.ProcessState, err, p.logTail())
		case <-ctx.Done():
			t.Fatalf("%s is not ready after %v: %v\n%s", p.command.Path, harness.Timeout, err, p.logTail())
		}
	}
}

// get requests a URL, and returns an error unless the status is 200.
func get(ctx context.Context, url, token string, config *tls.Config) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("get %s: %s: %s", url, response.Status, body)
	}
	return err
}

// newKey returns a new private key in PEM.
func newKey(t testing.TB) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func write(t testing.TB, file string, data []byte) {
	t.Helper()
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

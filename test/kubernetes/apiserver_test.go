package kubernetes_test

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/kubernetes"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// call calls the API server, and returns the status and the body of the response. The test closes the body.
func call(t *testing.T, s *kubernetes.APIServer, method, path, body string) (int, io.Reader) {
	t.Helper()
	certificates, err := os.ReadFile(s.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certificates)
	request, err := http.NewRequestWithContext(harness.Context(t), method, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+s.Token)
	request.Header.Set("Content-Type", "application/json")
	client := http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true,
	}}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.StatusCode, response.Body
}

const (
	pods = "/api/v1/namespaces/default/pods"
	pod  = `{"metadata": {"name": "vllm-0"}, "spec": {"containers": [{"name": "vllm", "image": "vllm"}]}}`
)

func TestAPIServerKeepsItsDataWhenItIsKilled(t *testing.T) {
	testclass.Packaging(t)
	s := kubernetes.Start(t)
	if status, body := call(t, s, http.MethodPost, pods, pod); status != http.StatusCreated {
		text, _ := io.ReadAll(body)
		t.Fatalf("create pod: got %d: %s; want 201", status, text)
	}

	_, events := call(t, s, http.MethodGet, pods+"?watch=true&resourceVersion=0", "")
	watch := bufio.NewReader(events)
	line, err := watch.ReadString('\n')
	var event struct {
		Type   string
		Object struct{ Metadata struct{ Name string } }
	}
	if err == nil {
		err = json.Unmarshal([]byte(line), &event)
	}
	if err != nil || event.Type != "ADDED" || event.Object.Metadata.Name != "vllm-0" {
		t.Fatalf("watch: got %q, %v; want vllm-0 ADDED", line, err)
	}

	s.Kill()
	if _, err := io.ReadAll(watch); err == nil {
		t.Error("the watch ended without an error, although the server was killed")
	}
	s.Restart()
	if status, _ := call(t, s, http.MethodGet, pods+"/vllm-0", ""); status != http.StatusOK {
		t.Errorf("get pod after a restart: got %d, want 200", status)
	}
}

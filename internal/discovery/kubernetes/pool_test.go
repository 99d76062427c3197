package kubernetes_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
)

// pool is an InferencePool that changes.
type pool struct {
	*kubernetes.Pool
	read    atomic.Pointer[poolRead]
	changed chan struct{}
	log     *strings.Builder
}

// poolRead is what a read of a pool returns.
type poolRead struct {
	spec kubernetes.PoolSpec
	err  error
}

func (p *pool) set(spec kubernetes.PoolSpec, err error) { p.read.Store(&poolRead{spec, err}) }

// followPool follows a pool until the test ends. Its pods are those of a client.
func followPool(t *testing.T, client *podServer, err error) *pool {
	t.Helper()
	p := &pool{changed: make(chan struct{}, 1), log: new(strings.Builder)}
	p.set(kubernetes.PoolSpec{}, err)
	p.Pool = (&kubernetes.Pool{
		Get: func(context.Context) (kubernetes.PoolSpec, error) { r := p.read.Load(); return r.spec, r.err },
		Source: func(spec kubernetes.PoolSpec) *kubernetes.Source {
			return &kubernetes.Source{
				Client: client.pods(namespace), Selector: labels.SelectorFromSet(spec.Labels).String(),
				Engines: kubernetes.Engines{HTTPPort: spec.Port},
			}
		},
		Logger: slog.New(slog.NewTextHandler(p.log, nil)),
	}).Open()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Follow(ctx, func() {
			select {
			case p.changed <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return p
}

// want checks the workers, or the error, once the pool was read again.
func (p *pool) want(t *testing.T, want ...string) {
	t.Helper()
	time.Sleep(kubernetes.DefaultPoolInterval + time.Second) // of synctest
	synctest.Wait()
	workers, err := p.Find(t.Context())
	var got []string
	for _, w := range workers {
		got = append(got, w.Name+" "+w.Endpoint)
	}
	if err != nil {
		got = append(got, err.Error())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPodsOfAPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newPodServer(t,
			readyPod("a", "10.0.0.1", labeled("app", "x")), readyPod("b", "10.0.0.2", labeled("app", "y")), readyPod("c", "10.0.0.3"),
		)
		p := followPool(t, client, errors.New("not found"))
		p.want(t, "not found")
		<-p.changed
		spec := kubernetes.PoolSpec{Labels: map[string]string{"app": "x"}, Port: 8000}
		p.set(spec, nil)
		p.want(t, "llm/a 10.0.0.1:8000")
		<-p.changed
		p.set(kubernetes.PoolSpec{}, errors.New("connection refused"))
		for range 2 { // the pods stay
			p.want(t, "llm/a 10.0.0.1:8000")
		}
		if n := strings.Count(p.log.String(), "the pool cannot be read"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, p.log)
		}
		p.set(spec, nil)
		p.want(t, "llm/a 10.0.0.1:8000")
		spec.Port = 9000
		p.set(spec, nil)
		p.want(t, "llm/a 10.0.0.1:9000")
		<-p.changed
		p.set(kubernetes.PoolSpec{Labels: map[string]string{"app": "y"}}, nil)
		p.want(t, "llm/b ")
	})
}

// TestFindEndsWhenThePoolHasChanged has a source whose pods are never listed.
func TestFindEndsWhenThePoolHasChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		block := make(chan struct{})
		client := newPodServer(t)
		var spec atomic.Pointer[kubernetes.PoolSpec]
		spec.Store(&kubernetes.PoolSpec{Labels: map[string]string{"app": "x"}})
		p := (&kubernetes.Pool{
			Get: func(context.Context) (kubernetes.PoolSpec, error) { return *spec.Load(), nil },
			Source: func(kubernetes.PoolSpec) *kubernetes.Source {
				return &kubernetes.Source{Client: blockedPods{client.pods(namespace), block}, Selector: "app"}
			},
		}).Open()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); p.Follow(ctx, func() {}) }()
		defer func() { cancel(); close(block); <-done }()
		synctest.Wait()
		found := make(chan error, 1)
		go func() { _, err := p.Find(ctx); found <- err }()
		synctest.Wait()
		spec.Store(&kubernetes.PoolSpec{Labels: map[string]string{"app": "y"}})
		if err := <-found; err == nil || err.Error() != "the pool has changed, and its pods are not listed yet" {
			t.Errorf("got error %v", err)
		}
	})
}

// blockedPods lists no pods until a channel is closed, or the call ends.
type blockedPods struct {
	fakePods
	block chan struct{}
}

func (b blockedPods) List(ctx context.Context, _ metav1.ListOptions) (*corev1.PodList, error) {
	select {
	case <-b.block:
	case <-ctx.Done():
	}
	return nil, ctx.Err()
}

// TestPoolIsRead reads pools from an API server that answers in different ways.
func TestPoolIsRead(t *testing.T) {
	answers := map[string]struct {
		status int
		body   string
		want   kubernetes.PoolSpec
		err    string
	}{
		"a pool": {http.StatusOK, `{"spec": {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}, {"number": 8001}], "endpointPickerRef": {"name": "epp"}}}`,
			kubernetes.PoolSpec{Labels: map[string]string{"app": "x"}, Port: 8000}, ""},
		"no port":        {http.StatusOK, `{"spec": {"selector": {"matchLabels": {"app": "x"}}}}`, kubernetes.PoolSpec{Labels: map[string]string{"app": "x"}}, ""},
		"no selector":    {http.StatusOK, `{"spec": {}}`, kubernetes.PoolSpec{}, "InferencePool llm/p: spec.selector.matchLabels is empty: want the labels of the pods"},
		"a wrong label":  {http.StatusOK, `{"spec": {"selector": {"matchLabels": {"a b": "x"}}}}`, kubernetes.PoolSpec{}, "InferencePool llm/p: spec.selector.matchLabels:"},
		"a wrong port":   {http.StatusOK, `{"spec": {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 70000}]}}`, kubernetes.PoolSpec{}, "spec.targetPorts[0].number: 70000 is not allowed: want 1 to 65535"},
		"no JSON":        {http.StatusOK, `pool`, kubernetes.PoolSpec{}, "InferencePool llm/p: decode: "},
		"too large":      {http.StatusOK, `{"a": "` + strings.Repeat("a", 1<<20) + `"}`, kubernetes.PoolSpec{}, "bytes are too many: want at most 1048576"},
		"absent":         {http.StatusNotFound, `{"kind": "Status", "reason": "NotFound", "code": 404}`, kubernetes.PoolSpec{}, "read InferencePool llm/p (inference.networking.k8s.io/v1): "},
		"not authorized": {http.StatusForbidden, `{"kind": "Status", "reason": "Forbidden", "code": 403}`, kubernetes.PoolSpec{}, "read InferencePool llm/p (inference.networking.k8s.io/v1): "},
	}
	for name, tt := range answers {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/p" {
					t.Errorf("asked for %s", r.URL)
				}
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(tt.status)
				_, _ = w.Write([]byte(tt.body))
			}))
			defer server.Close()
			file := filepath.Join(t.TempDir(), "kubeconfig")
			kubeconfig := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u}]\nclusters: [{name: c, cluster: {server: \"" + server.URL + "\"}}]\n"
			check(t, "write kubeconfig", os.WriteFile(file, []byte(kubeconfig), 0o600))
			client, err := kubernetes.NewClient(file)
			check(t, "read kubeconfig", err)
			defer client.CloseIdleConnections()
			got, err := client.Pool(t.Context(), namespace, "p")
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Fatalf("got error %v, want %s", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

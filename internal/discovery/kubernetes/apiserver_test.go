package kubernetes_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
	apiserver "github.com/kvcast/kvcast/test/kubernetes"
)

// workerChanges has what a watch adds and removes.
type workerChanges chan string

func (c workerChanges) AddWorker(_ context.Context, w config.Worker) error {
	c <- "add " + w.Name + " " + w.Sources[0].Connect
	return nil
}

func (c workerChanges) RemoveWorker(_ context.Context, name string, _ feed.RemoveReason) error {
	c <- "remove " + name
	return nil
}

func (c workerChanges) want(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for range want {
		select {
		case change := <-c:
			got = append(got, change)
		case <-harness.Context(t).Done():
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Fatalf("got %q, want %q", got, want)
	}
}

// wantNone fails the test if there is a change that was not received yet.
func (c workerChanges) wantNone(t *testing.T) {
	t.Helper()
	select {
	case change := <-c:
		t.Fatalf("got %q, want no change", change)
	default:
	}
}

// podRequest makes a request one about pods.
func podRequest(r *rest.Request) *rest.Request { return r.Namespace("default").Resource("pods") }

func createPod(t *testing.T, client *rest.RESTClient, name, app string) {
	t.Helper()
	check(t, "create", podRequest(client.Post()).Body(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "vllm", Image: "vllm"}}},
	}).Do(t.Context()).Error())
}

func setStatus(t *testing.T, client *rest.RESTClient, name, ip string, ready corev1.ConditionStatus) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
	}})
	check(t, "encode", err)
	check(t, "patch", podRequest(client.Patch(types.MergePatchType)).Name(name).SubResource("status").Body(patch).Do(t.Context()).Error())
}

// TestPodsOfAnAPIServer follows pods of a real API server through an outage.
func TestPodsOfAnAPIServer(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	server := apiserver.Start(t)
	ctx := harness.Context(t)
	client, err := kubernetes.NewClient(server.Kubeconfig)
	check(t, "configure", err)
	t.Cleanup(client.CloseIdleConnections)
	core := client.REST()
	var changedAt time.Time
	create := func(name, app string) {
		t.Helper()
		createPod(t, core, name, app)
	}
	set := func(name, ip string, ready corev1.ConditionStatus) {
		t.Helper()
		changedAt = time.Now()
		setStatus(t, core, name, ip, ready)
	}
	remove := func(name string) {
		t.Helper()
		now := int64(0)
		changedAt = time.Now()
		check(t, "delete", podRequest(core.Delete()).Name(name).Body(&metav1.DeleteOptions{GracePeriodSeconds: &now}).Do(ctx).Error())
	}

	if client.Namespace != "default" {
		t.Errorf("namespace %q, want default", client.Namespace)
	}
	source := (&kubernetes.Source{Client: client.Pods("default"), Selector: "app=vllm"}).Open()
	changes, polls := make(workerChanges, 10), make(chan error, 1000)
	watch := discovery.Watch{
		Name: "pods", Follow: source.Follow, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Find: func(ctx context.Context) ([]config.Worker, error) {
			workers, err := source.Find(ctx)
			polls <- err
			return workers, err
		},
	}
	watching, stop := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- watch.Run(watching, changes) }()
	defer func() {
		stop()
		check(t, "watch", <-done)
	}()

	want := func(change string) {
		t.Helper()
		changes.want(t, change)
		t.Logf("%s: %v after the pod's change", change, time.Since(changedAt).Round(time.Millisecond)) // without a limit, which the machine could miss
	}

	create("other", "router")
	set("other", "127.0.0.9", corev1.ConditionTrue)
	create("a", "vllm")
	create("b", "vllm")
	set("b", "127.0.0.3", corev1.ConditionFalse)
	set("a", "127.0.0.2", corev1.ConditionTrue)
	want("add default/a tcp://127.0.0.2:5557") // and not b, which was changed before
	set("a", "127.0.0.2", corev1.ConditionFalse)
	set("b", "127.0.0.3", corev1.ConditionTrue)
	want("add default/b tcp://127.0.0.3:5557") // and a stays
	remove("a")
	want("remove default/a")

	server.Kill()
	failed := false
	for !failed {
		select {
		case err := <-polls:
			var rejected discovery.Rejected
			failed = err != nil && !errors.As(err, &rejected)
		case <-ctx.Done():
			t.Fatal("the outage of the API server was not noticed")
		}
	}
	changes.wantNone(t)
	server.Restart()
	remove("b")
	create("c", "vllm")
	set("c", "127.0.0.4", corev1.ConditionTrue)
	changes.want(t, "add default/c tcp://127.0.0.4:5557", "remove default/b")
}

// TestPoolOfAnAPIServer follows the pods of an InferencePool, which does not exist at first, and then selects others.
func TestPoolOfAnAPIServer(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	server := apiserver.Start(t)
	ctx := harness.Context(t)
	client, err := kubernetes.NewClient(server.Kubeconfig)
	check(t, "configure", err)
	t.Cleanup(client.CloseIdleConnections)
	core := client.REST()
	const (
		definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
		pools       = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
	)
	check(t, "define InferencePool", core.Post().AbsPath(definitions).SetHeader("Content-Type", "application/json").Body([]byte(`{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
		"spec": {
			"group": "inference.networking.k8s.io", "scope": "Namespaced", "names": {"kind": "InferencePool", "plural": "inferencepools"},
			"versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]
		}}`)).Do(ctx).Error())
	for _, pod := range []struct{ name, app, ip string }{{"a", "x", "127.0.0.2"}, {"b", "y", "127.0.0.3"}} {
		createPod(t, core, pod.name, pod.app)
		setStatus(t, core, pod.name, pod.ip, corev1.ConditionTrue)
	}
	pool := (&kubernetes.Pool{
		Get: func(ctx context.Context) (kubernetes.PoolSpec, error) { return client.Pool(ctx, "default", "p") },
		Source: func(spec kubernetes.PoolSpec) *kubernetes.Source {
			return &kubernetes.Source{Client: client.Pods("default"), Selector: labels.SelectorFromSet(spec.Labels).String()}
		},
		Interval: 50 * time.Millisecond,
	}).Open()
	if _, err := client.Pool(ctx, "default", "p"); !apierrors.IsNotFound(err) {
		t.Errorf("a pool that does not exist: got error %v", err)
	}
	changes := make(workerChanges, 10)
	watch := discovery.Watch{Name: "pool", Follow: pool.Follow, Find: pool.Find, Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}
	watching, stop := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- watch.Run(watching, changes) }()
	defer func() {
		stop()
		check(t, "watch", <-done)
	}()
	spec := func(app string) []byte {
		return []byte(`{"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "p"},
			"spec": {"selector": {"matchLabels": {"app": "` + app + `"}}, "targetPorts": [{"number": 8000}]}}`)
	}
	// The API server serves a resource some time after its definition.
	harness.WaitFor(t, func() bool {
		return core.Post().AbsPath(pools).SetHeader("Content-Type", "application/json").Body(spec("x")).Do(ctx).Error() == nil
	})
	changes.want(t, "add default/a tcp://127.0.0.2:5557")
	check(t, "change the pool", core.Patch(types.MergePatchType).AbsPath(pools+"/p").Body(spec("y")).Do(ctx).Error())
	changes.want(t, "add default/b tcp://127.0.0.3:5557", "remove default/a")
	check(t, "delete the pool", core.Delete().AbsPath(pools+"/p").Do(ctx).Error())
	harness.WaitFor(t, func() bool { _, err := client.Pool(ctx, "default", "p"); return apierrors.IsNotFound(err) })
	changes.wantNone(t)
}

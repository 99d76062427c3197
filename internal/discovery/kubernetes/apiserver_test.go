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
	utilnet "k8s.io/apimachinery/pkg/util/net"
	v1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

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

// TestPodsOfAnAPIServer follows pods of a real API server through an outage.
func TestPodsOfAnAPIServer(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	server := apiserver.Start(t)
	ctx := harness.Context(t)
	restConfig, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig)
	check(t, "configure", err)
	core, err := v1.NewForConfig(restConfig)
	check(t, "configure", err)
	t.Cleanup(func() { utilnet.CloseIdleConnectionsFor(core.RESTClient().(*rest.RESTClient).Client.Transport) })
	pods, changedAt := core.Pods("default"), time.Time{}
	create := func(name, app string) {
		t.Helper()
		_, err := pods.Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "vllm", Image: "vllm"}}},
		}, metav1.CreateOptions{})
		check(t, "create", err)
	}
	setStatus := func(name, ip string, ready corev1.ConditionStatus) {
		t.Helper()
		patch, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
		}})
		check(t, "encode", err)
		changedAt = time.Now()
		_, err = pods.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		check(t, "patch", err)
	}
	remove := func(name string) {
		t.Helper()
		now := int64(0)
		changedAt = time.Now()
		check(t, "delete", pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}

	client, err := kubernetes.NewClient(server.Kubeconfig)
	check(t, "configure", err)
	t.Cleanup(client.CloseIdleConnections)
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
	setStatus("other", "127.0.0.9", corev1.ConditionTrue)
	create("a", "vllm")
	create("b", "vllm")
	setStatus("b", "127.0.0.3", corev1.ConditionFalse)
	setStatus("a", "127.0.0.2", corev1.ConditionTrue)
	want("add default/a tcp://127.0.0.2:5557") // and not b, which was changed before
	setStatus("a", "127.0.0.2", corev1.ConditionFalse)
	setStatus("b", "127.0.0.3", corev1.ConditionTrue)
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
	setStatus("c", "127.0.0.4", corev1.ConditionTrue)
	changes.want(t, "add default/c tcp://127.0.0.4:5557", "remove default/b")
}

// TestPoolOfAnAPIServer follows the pods of an InferencePool, which does not exist at first, and then selects others.
func TestPoolOfAnAPIServer(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	server := apiserver.Start(t)
	ctx := harness.Context(t)
	restConfig, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig)
	check(t, "configure", err)
	core, err := v1.NewForConfig(restConfig)
	check(t, "configure", err)
	t.Cleanup(func() { utilnet.CloseIdleConnectionsFor(core.RESTClient().(*rest.RESTClient).Client.Transport) })
	const (
		definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
		pools       = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
	)
	check(t, "define InferencePool", core.RESTClient().Post().AbsPath(definitions).SetHeader("Content-Type", "application/json").Body([]byte(`{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
		"spec": {
			"group": "inference.networking.k8s.io", "scope": "Namespaced", "names": {"kind": "InferencePool", "plural": "inferencepools"},
			"versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]
		}}`)).Do(ctx).Error())
	for _, pod := range []struct{ name, app, ip string }{{"a", "x", "127.0.0.2"}, {"b", "y", "127.0.0.3"}} {
		_, err := core.Pods("default").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: pod.name, Labels: map[string]string{"app": pod.app}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "vllm", Image: "vllm"}}},
		}, metav1.CreateOptions{})
		check(t, "create", err)
		patch, err := json.Marshal(map[string]any{"status": corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: pod.ip, PodIPs: []corev1.PodIP{{IP: pod.ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		}})
		check(t, "encode", err)
		_, err = core.Pods("default").Patch(ctx, pod.name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		check(t, "patch", err)
	}

	client, err := kubernetes.NewClient(server.Kubeconfig)
	check(t, "configure", err)
	t.Cleanup(client.CloseIdleConnections)
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
		return core.RESTClient().Post().AbsPath(pools).SetHeader("Content-Type", "application/json").Body(spec("x")).Do(ctx).Error() == nil
	})
	changes.want(t, "add default/a tcp://127.0.0.2:5557")
	check(t, "change the pool", core.RESTClient().Patch(types.MergePatchType).AbsPath(pools+"/p").Body(spec("y")).Do(ctx).Error())
	changes.want(t, "add default/b tcp://127.0.0.3:5557", "remove default/a")
	check(t, "delete the pool", core.RESTClient().Delete().AbsPath(pools+"/p").Do(ctx).Error())
	harness.WaitFor(t, func() bool { _, err := client.Pool(ctx, "default", "p"); return apierrors.IsNotFound(err) })
	changes.wantNone(t)
}

package kubernetes_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
)

// watched is an API server that sends what a test says.
type watched struct{ *watch.FakeWatcher }

func (watched) List(context.Context, metav1.ListOptions) (*corev1.PodList, error) {
	return nil, errors.New("the watch begins with a list")
}

func (w watched) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return w.FakeWatcher, nil
}

// TestHugePodsAreTrimmed has pods of a megabyte each, of which all are sent before the list is complete. Of each, no more than what is used is kept.
func TestHugePodsAreTrimmed(t *testing.T) {
	testclass.WithoutRace(t)
	const pods, size = 100, 1 << 20
	api := watched{watch.NewFake()}
	s := (&kubernetes.Source{Client: api, Selector: "app=vllm", Engines: kubernetes.Engines{Labels: []string{"role"}}}).Open()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.Follow(ctx, func() {}) }()
	defer func() { cancel(); <-done }()
	before := heap()
	for i := range pods {
		api.Add(readyPod(fmt.Sprintf("p%03d", i), fmt.Sprintf("10.0.0.%d", i+1), labeled("role", "prefill", "other", strings.Repeat("x", size/4)), withPorts(map[string]int32{"kv-events": 6000}),
			annotated("kvcast.io/replay-port", "6001", "kvcast.io/other", strings.Repeat("x", size/4), "example.com/other", strings.Repeat("x", size/2))))
	}
	if grown := heap() - before; grown > pods*size/10 {
		t.Errorf("%d MiB are kept of %d pods of %d MiB", grown>>20, pods, size>>20)
	}
	api.Action(watch.Bookmark, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		ResourceVersion: "1", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
	}})
	workers, err := s.Find(ctx)
	if err != nil || len(workers) != pods {
		t.Fatalf("%d workers, error %v", len(workers), err)
	}
	w := workers[0]
	if w.Name != namespace+"/p000" || w.Sources[0].Connect != "tcp://10.0.0.1:6000" || w.Sources[0].Replay != "tcp://10.0.0.1:6001" || len(w.Labels) != 1 || w.Labels["role"] != "prefill" {
		t.Errorf("got %+v", w)
	}
}

// heap returns the bytes in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

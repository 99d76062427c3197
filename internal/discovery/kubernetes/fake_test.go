package kubernetes_test

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"
	cachetesting "k8s.io/client-go/tools/cache/testing"
)

// podServer stands for an API server that has pods only. client-go's fake clientset could replace it, but imports 294 packages, for every API group.
type podServer struct {
	source    *cachetesting.FakeControllerSource
	listError atomic.Pointer[error] // nil: none
}

func newPodServer(t *testing.T, pods ...*corev1.Pod) *podServer {
	t.Helper()
	s := &podServer{source: cachetesting.NewFakeControllerSource()}
	t.Cleanup(s.source.Shutdown)
	for _, p := range pods {
		s.source.Add(p.DeepCopy())
	}
	return s
}

// pods returns the pods of a namespace, or of all.
func (s *podServer) pods(namespace string) fakePods { return fakePods{s, namespace} }

// fakePods implements kubernetes.Pods with the pods of a podServer. List applies label selectors, Watch ignores them.
type fakePods struct {
	server    *podServer
	namespace string
}

// IsWatchListSemanticsUnSupported tells the reflector that a watch cannot begin with a list.
func (fakePods) IsWatchListSemanticsUnSupported() bool { return true }

func (f fakePods) has(p *corev1.Pod) bool {
	return f.namespace == metav1.NamespaceAll || p.Namespace == f.namespace
}

func (f fakePods) List(_ context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
	if err := f.server.listError.Load(); err != nil {
		return nil, *err
	}
	selector, err := labels.Parse(o.LabelSelector)
	if err != nil {
		return nil, err
	}
	all, err := f.server.source.List(o)
	if err != nil {
		return nil, err
	}
	list := &corev1.PodList{ListMeta: all.(*corev1.List).ListMeta}
	for _, item := range all.(*corev1.List).Items {
		if p := item.Object.(*corev1.Pod); f.has(p) && selector.Matches(labels.Set(p.Labels)) {
			list.Items = append(list.Items, *p)
		}
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return list, nil
}

func (f fakePods) Watch(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	w, err := f.server.source.Watch(o)
	if err != nil {
		return nil, err
	}
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) { return e, f.has(e.Object.(*corev1.Pod)) }), nil
}

// Package kubernetes finds engines among the pods of a namespace.
//
// A Source lists and watches the pods that a label selector matches. Find returns a worker, named NAMESPACE/POD, for each
// pod that has been ready, with the settings of the time when the pod was last ready:
//
//   - A pod that has not been ready yet is no worker, since nothing may listen on its ports.
//   - A pod that is no longer ready stays a worker: its engine may be overloaded or starting again, and keeps its cache
//     in the first case. Ingest detects a restart, and removes a worker without a connection after the grace time.
//   - A pod that is being deleted, or has succeeded or failed, is no worker: it gets no more requests.
//
// If the API server cannot be reached, Find fails, and the workers found before stay. Pods whose annotations are not valid
// are in the discovery.Rejected that Find returns with the workers.
package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
)

// newBackoff returns the time between two attempts to reach the API server. Its maximum is below client-go's 30 s, since
// there are few instances of kvcast, and deletions should be followed soon after an outage.
func newBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 0.5, Cap: 5 * time.Second, Steps: 10}
}

// Pods lists and watches the pods of a namespace. The pods of a client-go clientset implement it.
type Pods interface {
	List(context.Context, metav1.ListOptions) (*corev1.PodList, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// Source finds the engines among the pods of a namespace. Follow must run while Find is called.
type Source struct {
	// Client lists and watches the pods.
	Client Pods
	// Selector is a label selector.
	Selector string
	// Engines has what the pods do not say.
	Engines Engines
	// MaxWorkers is the maximum number of workers: those of the oldest pods. 0 means config.DefaultMaxWorkers.
	MaxWorkers int
	// Logger is optional.
	Logger *slog.Logger

	store     *store
	truncated bool // reports whether the last Find left out pods
}

// Open prepares the Source for Follow and Find, and returns it.
func (s *Source) Open() *Source {
	s.MaxWorkers = cmp.Or(s.MaxWorkers, config.DefaultMaxWorkers)
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	s.store = &store{
		engines: s.Engines, log: s.Logger, changed: make(chan struct{}),
		pods: make(map[types.NamespacedName]pod), waiting: make(map[types.NamespacedName]types.UID),
	}
	return s
}

// Follow keeps what Find returns up to date until ctx is done. It calls changed after each change.
func (s *Source) Follow(ctx context.Context, changed func()) {
	// client-go logs each attempt. The Watch logs an outage once, from the error of Find.
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(debugHandler{s.Logger.Handler()}))
	list := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = s.Selector
			pods, err := s.Client.List(ctx, o)
			s.store.report(ctx, "list", err)
			if err != nil {
				return nil, err
			}
			for i := range pods.Items {
				pods.Items[i] = *s.Engines.trimmed(&pods.Items[i])
			}
			return pods, nil
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = s.Selector
			w, err := s.Client.Watch(ctx, o)
			if !isUnsupported(o, err) { // otherwise a list follows
				s.store.report(ctx, "watch", err)
			}
			if o.SendInitialEvents != nil && (utilnet.IsConnectionRefused(err) || apierrors.IsTooManyRequests(err)) {
				// Of these errors of a watch that begins with a list, client-go waits some seconds even if ctx ends. It lists
				// instead after others, and then waits for as long as ctx does.
				err = errors.New(err.Error())
			}
			if err != nil {
				return nil, err
			}
			// client-go keeps all pods of a watch that begins with a list until the list is complete.
			return s.Engines.trimmedWatch(w), nil
		},
	}
	logger := klog.FromContext(ctx)
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(list, s.Client), &corev1.Pod{}, s.store,
		cache.ReflectorOptions{Name: "kvcast", Logger: &logger, Backoff: newBackoff()})
	done, next := make(chan struct{}), s.store.next()
	go func() {
		defer close(done)
		s.store.follow(ctx, next, changed)
	}()
	reflector.RunWithContext(ctx)
	<-done
}

// Find returns the workers in the order of their pods' age. It waits for the first list of the pods.
func (s *Source) Find(ctx context.Context) ([]config.Worker, error) {
	pods, err := s.store.wait(ctx)
	if err != nil {
		return nil, err
	}
	rejected := make(discovery.Rejected)
	pods = slices.DeleteFunc(pods, func(p pod) bool {
		if p.err != nil {
			rejected[p.worker.Name] = p.err
		}
		return p.err != nil
	})
	slices.SortFunc(pods, func(a, b pod) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.worker.Name, b.worker.Name))
	})
	truncated := len(pods) > s.MaxWorkers
	if truncated && !s.truncated {
		s.Logger.Warn("more pods than workers are allowed: the youngest are not read; want a selector of fewer pods, or a higher ingest.max_workers",
			"selector", s.Selector, "pods", len(pods), "max_workers", s.MaxWorkers)
	}
	s.truncated = truncated
	workers := make([]config.Worker, min(len(pods), s.MaxWorkers))
	for i := range workers {
		workers[i] = pods[i].worker
	}
	if len(rejected) > 0 {
		return workers, rejected
	}
	return workers, nil
}

// debugHandler logs everything at debug level.
type debugHandler struct{ slog.Handler }

func (h debugHandler) Enabled(ctx context.Context, _ slog.Level) bool {
	return h.Handler.Enabled(ctx, slog.LevelDebug)
}

func (h debugHandler) Handle(ctx context.Context, r slog.Record) error {
	if !h.Handler.Enabled(ctx, slog.LevelDebug) { // errors come without a call of Enabled
		return nil
	}
	r.Level = slog.LevelDebug
	return h.Handler.Handle(ctx, r)
}

func (h debugHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return debugHandler{h.Handler.WithAttrs(attrs)}
}

func (h debugHandler) WithGroup(name string) slog.Handler {
	return debugHandler{h.Handler.WithGroup(name)}
}

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kvcast/kvcast/ingest/config"
)

// store has the pods that have been ready, and whether the API server can be reached. It implements cache.ReflectorStore.
type store struct {
	engines Engines
	log     *slog.Logger

	mu   sync.Mutex // guards what follows
	pods map[types.NamespacedName]pod
	// waiting are the pods that have not been ready yet, each logged once.
	waiting map[types.NamespacedName]types.UID
	listed  bool  // reports whether the pods have been listed
	err     error // why the API server cannot be reached, from the first request that failed for that reason; nil if it can
	// changed is closed and replaced when any of the above changes.
	changed chan struct{}
}

// pod is a pod that has been ready.
type pod struct {
	uid     types.UID
	created time.Time
	// worker is what the pod was when it was last ready with valid annotations.
	worker config.Worker
	err    error // why the annotations are not valid
}

// signal wakes those who wait for a change. s.mu must be held.
func (s *store) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// wait returns the pods when they have been listed, or why the API server cannot be reached.
func (s *store) wait(ctx context.Context) ([]pod, error) {
	for {
		s.mu.Lock()
		err, changed := s.err, s.changed
		if err == nil && s.listed {
			all := make([]pod, 0, len(s.pods))
			for _, p := range s.pods {
				all = append(all, p)
			}
			s.mu.Unlock()
			return all, nil
		}
		s.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// next returns a channel that is closed by the next change.
func (s *store) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// follow calls changed after the change that closes next, and each later one, until ctx is done.
func (s *store) follow(ctx context.Context, next <-chan struct{}, changed func()) {
	for {
		select {
		case <-next:
			next = s.next() // before the call, so that no later change is missed
			changed()
		case <-ctx.Done():
			return
		}
	}
}

// report stores the result of a request to the API server.
func (s *store) report(ctx context.Context, verb string, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil && s.err == nil:
	case err == nil:
		s.err = nil
		s.signal()
	case s.err == nil || apierrors.ReasonForError(err) != apierrors.ReasonForError(s.err):
		s.err = requestError(verb, err)
		s.signal()
	}
}

// requestError describes why a request failed: without the query of its URL, and with what is needed if it is forbidden.
func requestError(verb string, err error) error {
	var request *url.Error
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%s pods: %w; want a role with get, list and watch of pods", verb, err)
	case errors.As(err, &request):
		server, parseErr := url.Parse(request.URL)
		if parseErr != nil {
			return fmt.Errorf("%s pods: %w", verb, request.Err)
		}
		return fmt.Errorf("%s pods at API server %s://%s: %w", verb, server.Scheme, server.Host, request.Err)
	default:
		return fmt.Errorf("%s pods: %w", verb, err)
	}
}

// isUnsupported reports whether an API server refused a watch because it cannot begin with a list.
func isUnsupported(o metav1.ListOptions, err error) bool {
	return o.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err))
}

func (s *store) Add(object any) error { return s.Update(object) }

func (s *store) Update(object any) error {
	p, err := podOf(object)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.update(p) {
		s.signal()
	}
	return nil
}

func (s *store) Delete(object any) error {
	p, err := podOf(object)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.remove(key(p)) {
		s.signal()
	}
	return nil
}

func (s *store) Replace(objects []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed, listed := !s.listed, make(map[types.NamespacedName]bool, len(objects))
	for _, object := range objects {
		p, err := podOf(object)
		if err != nil {
			return err
		}
		listed[key(p)] = true
		changed = s.update(p) || changed
	}
	for k := range s.pods {
		changed = !listed[k] && s.remove(k) || changed
	}
	for k := range s.waiting {
		if !listed[k] {
			s.remove(k)
		}
	}
	s.listed = true
	if changed {
		s.signal()
	}
	return nil
}

func (*store) Resync() error { return nil }

// update stores the state of a pod, and reports whether it has changed. s.mu must be held.
func (s *store) update(p *corev1.Pod) bool {
	k := key(p)
	before, known := s.pods[k]
	isSame := known && before.uid == p.UID
	switch {
	case isEnding(p):
		return s.remove(k)
	case !isReady(p) && isSame:
		return false
	case !isReady(p):
		if s.waiting[k] != p.UID {
			s.log.Info("pod is not ready yet: its worker is added when it is", "pod", k.String(), "phase", p.Status.Phase)
		}
		removed := s.remove(k) // of the former pod of that name
		s.waiting[k] = p.UID
		return removed
	}
	delete(s.waiting, k)
	now := pod{uid: p.UID, created: p.CreationTimestamp.Time}
	now.worker, now.err = s.engines.worker(p)
	if now.err != nil {
		now.worker = config.Worker{Name: k.String()}
		if isSame {
			now.worker = before.worker
		}
	}
	s.pods[k] = now
	return !isSame || !reflect.DeepEqual(now.worker, before.worker) || !sameError(now.err, before.err)
}

// remove forgets a pod, and reports whether it was a worker. s.mu must be held.
func (s *store) remove(k types.NamespacedName) bool {
	_, known := s.pods[k]
	delete(s.pods, k)
	delete(s.waiting, k)
	return known
}

func sameError(a, b error) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Error() == b.Error()
}

func podOf(object any) (*corev1.Pod, error) {
	p, ok := object.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("watch pods: the API server sent a %T", object)
	}
	return p, nil
}

func key(p *corev1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
}

package client

import (
	"context"
	"iter"
	"maps"
	"slices"
)

// Change describes how a View has changed since the previous Change.
type Change struct {
	// Status is the current status.
	Status ViewStatus
	// Workers are the names of the workers that have changed, ascending, including removed workers. It is empty
	// if only the Status has changed.
	Workers []string
	// Snapshot reports whether a snapshot has replaced the state.
	Snapshot bool
}

// watcher collects the changes for one range over Changes. Changes are merged until the range receives them, so
// that a slow range needs no queue.
type watcher struct {
	signal chan struct{} // has one element if there is a change to receive

	// Guarded by View.mu.
	change    Change
	workers   map[string]struct{}
	signalled bool
}

// notify signals the watcher if there is a change. The caller must hold View.mu.
func (w *watcher) notify(s ViewStatus) {
	if s == w.change.Status && len(w.workers) == 0 && !w.change.Snapshot {
		return
	}
	w.change.Status = s
	if !w.signalled {
		w.signalled = true
		w.signal <- struct{}{}
	}
}

// workerChanged records a change of a worker for all watchers. The caller must hold v.mu.
func (v *View) workerChanged(name string) {
	for w := range v.watchers {
		w.workers[name] = struct{}{}
	}
}

// Changes returns the changes of the View until ctx ends. The first Change has the current status and comes at
// once. If the caller is slow, further changes are merged into one Change.
func (v *View) Changes(ctx context.Context) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		w := &watcher{signal: make(chan struct{}, 1), workers: make(map[string]struct{}), signalled: true}
		w.signal <- struct{}{}
		v.mu.Lock()
		w.change.Status = v.status
		v.watchers[w] = struct{}{}
		v.mu.Unlock()
		defer func() {
			v.mu.Lock()
			defer v.mu.Unlock()
			delete(v.watchers, w)
		}()
		for {
			select {
			case <-w.signal:
			case <-ctx.Done():
				return
			}
			if !yield(v.receive(w)) {
				return
			}
		}
	}
}

// receive returns a watcher's merged changes and resets them.
func (v *View) receive(w *watcher) Change {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := w.change
	c.Workers = slices.Sorted(maps.Keys(w.workers))
	w.change.Snapshot, w.signalled = false, false
	clear(w.workers)
	return c
}

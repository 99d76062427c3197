package client

import (
	"context"
	"iter"
	"maps"
	"slices"
)

// Change is what has changed in a View since the previous Change.
type Change struct {
	// Status is the newest status.
	Status ViewStatus
	// Workers are the names of the workers with entries, ascending, including removed
	// workers. It is empty if only the Status changed.
	Workers []string
	// Snapshot reports whether a snapshot has replaced the state.
	Snapshot bool
}

// watcher collects the changes for one range over Changes. They are merged until the range
// receives them, so a slow one needs no queue.
type watcher struct {
	signal chan struct{} // of size 1; has an element when a change is to be received

	// Guarded by the View's mu.
	change    Change
	workers   map[string]struct{}
	signalled bool
}

// notify signals the watcher if there is a change.
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

// workerChanged records a change of a worker for all watchers. mu is held.
func (v *View) workerChanged(name string) {
	for w := range v.watchers {
		w.workers[name] = struct{}{}
	}
}

// Changes returns the changes of the View until ctx ends. The first comes at once, with the
// current status. A slow caller misses none: changes are merged until it continues.
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

package client

import (
	"context"
	"iter"
	"maps"
	"slices"
)

// Change is what has changed in a View since the Change before.
type Change struct {
	// Status is how the View stood at the last of it.
	Status ViewStatus
	// Workers are the names of those of which something was told, ascending,
	// including any that have left. It may be empty, where the Status alone changed.
	Workers []string
	// Snapshot tells that a snapshot has taken the place of everything.
	Snapshot bool
}

// watch is one who wants to know of changes. Nothing is queued for it but the names
// of workers: who is slow is told more at a time.
type watch struct {
	signal chan struct{} // has room for one; guarded by itself

	// Guarded by the View's mu.
	change  Change
	workers map[string]struct{}
	woken   bool
}

func (w *watch) wake(s ViewStatus) {
	if s == w.change.Status && len(w.workers) == 0 && !w.change.Snapshot {
		return
	}
	w.change.Status = s
	if !w.woken {
		w.woken = true
		w.signal <- struct{}{}
	}
}

func (w *watch) snapshot() { w.change.Snapshot = true }

// changed notes for all who watch that a worker's state is another.
func (v *View) changed(worker string) {
	for w := range v.watchers {
		w.workers[worker] = struct{}{}
	}
}

// Changes returns what changes in the View from the call of the range on, until ctx is
// done. The first Change comes at once, with how the View stands. A caller that takes
// long over one misses none: the next tells of all since.
func (v *View) Changes(ctx context.Context) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		w := &watch{signal: make(chan struct{}, 1), workers: make(map[string]struct{}), woken: true}
		v.mu.Lock()
		w.change.Status = v.about
		v.watchers[w] = struct{}{}
		v.mu.Unlock()
		defer func() {
			v.mu.Lock()
			defer v.mu.Unlock()
			delete(v.watchers, w)
		}()
		w.signal <- struct{}{}
		for {
			select {
			case <-w.signal:
			case <-ctx.Done():
				return
			}
			if !yield(v.take(w)) {
				return
			}
		}
	}
}

// take takes what has changed.
func (v *View) take(w *watch) Change {
	v.mu.Lock()
	defer v.mu.Unlock()
	c := w.change
	c.Workers = slices.Sorted(maps.Keys(w.workers))
	w.change.Snapshot, w.woken = false, false
	clear(w.workers)
	return c
}

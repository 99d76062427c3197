package simulator

import (
	"context"
	"sync"
)

// counts are numbers of subscriptions and requests, of all peers.
type counts struct {
	subscriptions int // current subscriptions
	requests      int // received replay requests
	replays       int // answered replay requests
	snapshots     int // received requests for snapshots
}

// counters are counts that goroutines can wait for.
type counters struct {
	mu      sync.Mutex
	counts  counts        // guarded by mu
	changed chan struct{} // guarded by mu; closed at the next change
}

func newCounters() *counters { return &counters{changed: make(chan struct{})} }

func (t *counters) add(more counts) {
	t.change(func(c *counts) {
		c.subscriptions += more.subscriptions
		c.requests += more.requests
		c.replays += more.replays
		c.snapshots += more.snapshots
	})
}

// disconnected sets the number of subscriptions to 0.
func (t *counters) disconnected() { t.change(func(c *counts) { c.subscriptions = 0 }) }

func (t *counters) change(do func(*counts)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	do(&t.counts)
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *counters) now() (counts, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts, t.changed
}

func (t *counters) subscriptions() int {
	c, _ := t.now()
	return c.subscriptions
}

// wait returns once enough returns true. It returns the context's error if the context ends first, and ErrClosed if done
// is closed first.
func (t *counters) wait(ctx context.Context, done <-chan struct{}, enough func(counts) bool) error {
	for {
		c, changed := t.now()
		if enough(c) {
			return nil
		}
		select {
		case <-changed:
		case <-done:
			return ErrClosed
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

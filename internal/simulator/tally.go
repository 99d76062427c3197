package simulator

import (
	"context"
	"sync"
)

// counts are what others have asked of the sockets.
type counts struct {
	subscriptions int // those that are there now
	requests      int // for replay, so far
	replays       int // of them answered
}

// tally keeps the counts, for goroutines to wait on.
type tally struct {
	mu      sync.Mutex
	counts  counts        // guarded by mu
	changed chan struct{} // guarded by mu; closed at the next change
}

func newTally() *tally { return &tally{changed: make(chan struct{})} }

func (t *tally) add(more counts) {
	t.change(func(c *counts) {
		c.subscriptions += more.subscriptions
		c.requests += more.requests
		c.replays += more.replays
	})
}

// disconnected forgets the subscriptions, whose sockets are closed.
func (t *tally) disconnected() { t.change(func(c *counts) { c.subscriptions = 0 }) }

func (t *tally) change(do func(*counts)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	do(&t.counts)
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *tally) now() (counts, <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts, t.changed
}

func (t *tally) subscriptions() int {
	c, _ := t.now()
	return c.subscriptions
}

// wait returns once enough holds, with the context's error when that ends first,
// or with ErrClosed when done is closed.
func (t *tally) wait(ctx context.Context, done <-chan struct{}, enough func(counts) bool) error {
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

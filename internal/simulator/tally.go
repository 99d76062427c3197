package simulator

import (
	"context"
	"sync"
)

// tally counts what others have asked of the sockets, for goroutines to wait on.
type tally struct {
	mu            sync.Mutex
	subscriptions int           // guarded by mu; those that are there now
	replays       int           // guarded by mu; requests answered so far
	changed       chan struct{} // guarded by mu; closed at the next change
}

func newTally() *tally { return &tally{changed: make(chan struct{})} }

func (t *tally) add(subscriptions, replays int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.subscriptions += subscriptions
	t.replays += replays
	close(t.changed)
	t.changed = make(chan struct{})
}

func (t *tally) counts() (subscriptions, replays int, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.subscriptions, t.replays, t.changed
}

// wait returns once enough holds, with the context's error when that ends first,
// or with ErrClosed when done is closed.
func (t *tally) wait(ctx context.Context, done <-chan struct{}, enough func(subscriptions, replays int) bool) error {
	for {
		subscriptions, replays, changed := t.counts()
		if enough(subscriptions, replays) {
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

package harness

import (
	"context"
	"testing"
	"time"
)

// Context returns a context that is done after Timeout, or when the test ends.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	t.Cleanup(cancel)
	return ctx
}

// WaitFor polls a condition until it is true. The test fails after Timeout.
func WaitFor(t testing.TB, condition func() bool) {
	t.Helper()
	poll := time.NewTicker(time.Millisecond)
	defer poll.Stop()
	for ctx := Context(t); !condition(); {
		select {
		case <-poll.C:
		case <-ctx.Done():
			t.Fatal("the condition did not become true in time")
		}
	}
}

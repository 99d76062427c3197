package ingest_test

import (
	"context"
	"testing"
	"time"
)

// patient returns a context that is done when a test has waited long enough.
func patient(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// waitFor waits until a condition is true.
func waitFor(t *testing.T, condition func() bool) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for ctx := patient(t); !condition(); {
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatal("the condition did not become true in time")
		}
	}
}

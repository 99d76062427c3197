package server

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestGracefulStopWaitsForWrites writes to connections at an interval until a time, and stops at another.
func TestGracefulStopWaitsForWrites(t *testing.T) {
	const never = time.Hour
	for name, c := range map[string]struct {
		interval, until, stops time.Duration
		stopped                bool
		want                   time.Duration
	}{
		"nothing is written":      {never, never, never, false, gracefulStopTimeout},
		"it stops at once":        {never, never, time.Millisecond, true, time.Millisecond},
		"a slow subscriber":       {900 * time.Millisecond, 3 * time.Second, 2500 * time.Millisecond, true, 2500 * time.Millisecond},
		"a subscriber that hangs": {900 * time.Millisecond, 2 * time.Second, never, false, 3 * time.Second},
		"writes without end":      {900 * time.Millisecond, never, never, false, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				began := time.Now()
				writes := func() uint64 { return uint64(min(time.Since(began), c.until) / c.interval) }
				stopped := make(chan struct{})
				timer := time.AfterFunc(c.stops, func() { close(stopped) })
				defer timer.Stop()
				if got, took := awaitStop(ctx, stopped, writes), time.Since(began); got != c.stopped || took != c.want {
					t.Errorf("got %t after %v, want %t after %v", got, took, c.stopped, c.want)
				}
			})
		})
	}
}

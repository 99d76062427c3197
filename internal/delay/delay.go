// Package delay measures how late goroutines run.
package delay

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	interval = 100 * time.Millisecond
	// longest bounds what a process learns that was stopped, or whose machine slept.
	longest = time.Second
)

// Meter measures how late goroutines run, because there is less CPU than work. It is safe for concurrent use. The zero Meter has
// measured nothing.
type Meter struct {
	recent atomic.Int64
}

// Run measures ten times a second, until ctx is done.
func (m *Meter) Run(ctx context.Context) {
	timer := time.NewTimer(interval)
	defer timer.Stop()
	for due := time.Now().Add(interval); ; due = time.Now().Add(interval) {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		m.recent.Store(int64(next(m.Recent(), time.Since(due))))
		timer.Reset(interval)
	}
}

// Recent returns the longest delay of late, at most 1 s. It counts for half after two seconds.
func (m *Meter) Recent() time.Duration { return time.Duration(m.recent.Load()) }

// next returns what Recent returns after another measurement.
func next(recent, late time.Duration) time.Duration {
	return max(min(late, longest), recent-recent/30)
}

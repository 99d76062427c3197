// Package loglimit suppresses log lines that what goes on failing would cause again and again.
package loglimit

import (
	"sync"
	"time"
)

// Interval is the time in which a Limit allows some lines of one kind.
const Interval = 10 * time.Second

// Limit suppresses log lines of one kind. The zero value is ready for use. It is safe for concurrent use.
type Limit struct {
	// Burst is how many lines are allowed in each Interval; 0: one. It must not change.
	Burst int

	mu         sync.Mutex // guards all below
	start      time.Time  // of the present interval
	logged     int        // lines in the present interval
	suppressed int        // lines since the last one that was allowed
}

// Allow reports whether a line may be logged now. suppressed is how many lines were not logged since the last.
func (l *Limit) Allow(now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.start) >= Interval {
		l.start, l.logged = now, 0
	}
	if l.logged >= max(1, l.Burst) {
		l.suppressed++
		return 0, false
	}
	l.logged++
	suppressed, l.suppressed = l.suppressed, 0
	return suppressed, true
}

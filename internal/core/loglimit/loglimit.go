// Package loglimit suppresses log lines that what goes on failing would cause again and again.
package loglimit

import "time"

// Interval is the minimum time between two log lines of one kind.
const Interval = 10 * time.Second

// Limit suppresses log lines of one kind. The zero value allows the first one. It is not safe for concurrent use.
type Limit struct {
	next       time.Time
	suppressed int
}

// Allow reports whether a line may be logged now. suppressed is how many lines were not logged since the last.
func (l *Limit) Allow(now time.Time) (suppressed int, ok bool) {
	if now.Before(l.next) {
		l.suppressed++
		return 0, false
	}
	suppressed = l.suppressed
	l.suppressed, l.next = 0, now.Add(Interval)
	return suppressed, true
}

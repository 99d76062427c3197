package server

import (
	"sync"
	"time"
)

// How many lines of a kind are logged within a time, whatever clients do.
const (
	throttleLines = 20
	throttleTime  = 10 * time.Second
)

// logThrottle bounds how many lines of a kind are logged.
type logThrottle struct {
	mu    sync.Mutex // guards all below
	began time.Time  // of the time in which lines are counted
	lines int
	held  int // back since the last line
}

// line tells whether a line may be logged, and how many were held back before it.
func (l *logThrottle) line() (heldBack int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := time.Now(); now.Sub(l.began) >= throttleTime {
		l.began, l.lines = now, 0
	}
	if l.lines >= throttleLines {
		l.held++
		return 0, false
	}
	l.lines++
	heldBack, l.held = l.held, 0
	return heldBack, true
}

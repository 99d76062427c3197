package loglimit_test

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/loglimit"
)

func TestLinesAreSuppressed(t *testing.T) {
	var l loglimit.Limit
	began := time.Unix(1000, 0)
	for i, s := range []struct {
		after      time.Duration
		suppressed int
		ok         bool
	}{
		{0, 0, true},
		{time.Second, 0, false},
		{loglimit.Interval - 1, 0, false},
		{loglimit.Interval, 2, true},
		{loglimit.Interval + 1, 0, false},
		{3 * loglimit.Interval, 1, true},
	} {
		if suppressed, ok := l.Allow(began.Add(s.after)); suppressed != s.suppressed || ok != s.ok {
			t.Errorf("step %d: got %d, %t; want %d, %t", i, suppressed, ok, s.suppressed, s.ok)
		}
	}
}

func TestBurstIsAllowed(t *testing.T) {
	l := loglimit.Limit{Burst: 20}
	log := func(n int, at time.Time) (logged, suppressed int) {
		for range n {
			if before, ok := l.Allow(at); ok {
				logged++
				suppressed += before
			}
		}
		return logged, suppressed
	}
	began := time.Unix(1000, 0)
	if logged, suppressed := log(25, began); logged != 20 || suppressed != 0 {
		t.Errorf("first: %d lines, %d suppressed, want 20 and 0", logged, suppressed)
	}
	if logged, suppressed := log(2, began.Add(loglimit.Interval)); logged != 2 || suppressed != 5 {
		t.Errorf("then: %d lines, %d suppressed, want 2 and 5", logged, suppressed)
	}
}

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

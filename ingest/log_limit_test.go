package ingest

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/loglimit"
)

func TestLogLinesAreSuppressed(t *testing.T) {
	t.Parallel()
	var n logLimiter
	at := time.Unix(1000, 0)
	steps := []struct {
		kind       logKind
		after      time.Duration
		suppressed int
		due        bool
	}{
		{logGap, 0, 0, true},
		{logGap, time.Second, 0, false},
		{logRestart, time.Second, 0, true},
		{logGap, loglimit.Interval - 1, 0, false},
		{logGap, loglimit.Interval, 2, true},
		{logGap, loglimit.Interval + 1, 0, false},
		{logGap, 2 * loglimit.Interval, 1, true},
	}
	for i, s := range steps {
		if suppressed, due := n[s.kind].Allow(at.Add(s.after)); suppressed != s.suppressed || due != s.due {
			t.Errorf("step %d: allow = %d, %v; want %d, %v", i, suppressed, due, s.suppressed, s.due)
		}
	}
}

package serve

import (
	"errors"
	"log/slog"
	"testing"
	"time"
)

// scriptedListeners are listeners whose first calls of ResumeListeners fail.
type scriptedListeners struct {
	suspended bool
	failures  int
}

func (l *scriptedListeners) SuspendListeners() { l.suspended = true }

func (l *scriptedListeners) ResumeListeners() error {
	if l.failures > 0 {
		l.failures--
		return errors.New("no socket")
	}
	l.suspended = false
	return nil
}

func TestEnginesAreRefusedWhileOthersMayTakeThem(t *testing.T) {
	t.Parallel()
	type look struct{ unanswered, others, want bool }
	for name, tt := range map[string]struct {
		failures int
		looks    []look
	}{
		"from the second look on, until there is an answer": {0, []look{
			{false, true, false}, {true, true, false}, {true, true, true}, {true, true, true}, {false, true, false},
		}},
		"not after a pause":               {0, []look{{true, true, false}, {false, true, false}, {true, true, false}}},
		"not by the only server":          {0, []look{{true, false, false}, {true, false, false}, {true, false, false}}},
		"though others are forgotten":     {0, []look{{true, true, false}, {true, true, true}, {true, false, true}, {false, false, false}}},
		"until the listeners are resumed": {2, []look{{true, true, false}, {true, true, true}, {false, true, true}, {false, true, true}, {false, true, false}}},
	} {
		listeners := &scriptedListeners{failures: tt.failures}
		l := listening{listeners: listeners, log: slog.New(slog.DiscardHandler)}
		for i, at := range tt.looks {
			if l.look(at.unanswered, at.others); listeners.suspended != at.want {
				t.Errorf("%s: look %d: suspended %v, want %v", name, i, listeners.suspended, at.want)
			}
		}
	}
}

func TestServerIsUnansweredAfterTheTTL(t *testing.T) {
	t.Parallel()
	now, ttl := time.Now(), 3*time.Second
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, tt := range map[string]struct {
		confirmed, isolated time.Time
		want                bool
	}{
		"confirmed":                      {ago(time.Second), time.Time{}, false},
		"not confirmed":                  {ago(ttl + 1), time.Time{}, true},
		"never confirmed":                {time.Time{}, time.Time{}, true},
		"isolated for a short time":      {ago(time.Second), ago(ttl), false},
		"isolated, the stream confirmed": {ago(time.Second), ago(ttl + 1), true},
	} {
		if got := isUnanswered(now, tt.confirmed, tt.isolated, ttl); got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}

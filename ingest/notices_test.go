package ingest

import (
	"testing"
	"time"
)

func TestNoticesAreHeldBack(t *testing.T) {
	var n notices
	at := time.Unix(1000, 0)
	steps := []struct {
		kind  notice
		after time.Duration
		held  int
		due   bool
	}{
		{noticeGap, 0, 0, true},
		{noticeGap, time.Second, 0, false},
		{noticeRestart, time.Second, 0, true},
		{noticeGap, noticeInterval - 1, 0, false},
		{noticeGap, noticeInterval, 2, true},
		{noticeGap, noticeInterval + 1, 0, false},
		{noticeGap, 2 * noticeInterval, 1, true},
	}
	for i, s := range steps {
		if held, due := n.due(s.kind, at.Add(s.after)); held != s.held || due != s.due {
			t.Errorf("step %d: due = %d, %v; want %d, %v", i, held, due, s.held, s.due)
		}
	}
}

package sequence

import (
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// TestPartialBatch delivers a batch that tells a part of the blocks, and then reports that the others are not known.
func TestPartialBatch(t *testing.T) {
	m, now := New(Config{}), time.Unix(1, 0)
	m.Connect(now, Connection{ID: 1})
	for seq := range uint64(2) {
		actions := m.Arrival(now, 1, &Batch{Seq: seq, Partial: seq == 1})
		delivered := 0
		for i, a := range actions {
			if a.Kind != Deliver {
				continue
			}
			delivered++
			reported := i+1 < len(actions) && actions[i+1].Kind == ReportGap && actions[i+1].Reason == feed.GapJoinedLate
			if reported != (seq == 1) {
				t.Errorf("batch %d: got %+v", seq, actions)
			}
		}
		if delivered != 1 {
			t.Errorf("batch %d was delivered %d times", seq, delivered)
		}
	}
}

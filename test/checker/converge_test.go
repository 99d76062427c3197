package checker_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

const device = kvcastv1.Tier_TIER_DEVICE

// withBlocks returns a Checker that has seen worker "a" store blocks 1, 2 and 3 at rank 0, and then the
// given events, each in an entry.
func withBlocks(t *testing.T, events ...*kvcastv1.RouterEvent) *checker.Checker {
	t.Helper()
	entries := make([]*kvcastv1.Entry, 0, 2+len(events))
	entries = append(entries, added(1, "a", 1), entry(2, "a", store(2, 0, 1, 2, 3)))
	for i, ev := range events {
		ev.EventId = uint64(3 + i)
		entries = append(entries, entry(uint64(3+i), "a", ev))
	}
	c, err := play(t, []stream{{fromEarliest(), []*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_EARLIEST, 0, 0), message(0, entries...),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestConverged(t *testing.T) {
	tests := []struct {
		name   string
		events []*kvcastv1.RouterEvent
		want   map[uint64]struct{}
		broken checker.Property
	}{
		{"the same", nil, set(1, 2, 3), ""},
		{"one missing", nil, set(1, 2, 3, 4), checker.Convergent},
		{"one too many", nil, set(1, 2), checker.Convergent},
		{"the engine is empty", nil, nil, checker.Convergent},
		{"a gap was reported", []*kvcastv1.RouterEvent{gap(0, 0)}, set(1, 9), ""},
		{"a gap of another rank was reported", []*kvcastv1.RouterEvent{gap(0, 1)}, set(1, 9), checker.Convergent},
		{"healed since the gap", []*kvcastv1.RouterEvent{
			gap(0, 0), clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED),
		}, set(9), checker.Convergent},
		{"one tier cleared since the gap", []*kvcastv1.RouterEvent{
			gap(0, 0), clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED, device),
		}, set(9), ""},
		{"cleared because of a gap", []*kvcastv1.RouterEvent{
			clearAll(0, 0, kvcastv1.Cleared_REASON_UNREPAIRED_GAP),
		}, set(9), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wantProperty(t, withBlocks(t, tt.events...).Converged("a", 0, device, tt.want), tt.broken)
		})
	}
}

func TestDifferenceNamesHashes(t *testing.T) {
	c := withBlocks(t)
	got := c.Difference("a", 0, device, set(3, 17, 16))
	if diff := cmp.Diff(checker.Difference{Missing: []uint64{16, 17}, Extra: []uint64{1, 2}}, got); diff != "" {
		t.Errorf("Difference (-want +got):\n%s", diff)
	}
	err := c.Converged("a", 0, device, set(3, 17, 16))
	if err == nil || !strings.Contains(err.Error(), "2 0000000000000010 0000000000000011 missing") {
		t.Errorf("got %v, want the hashes in it", err)
	}
}

func TestConvergedOfAnUnknownWorker(t *testing.T) {
	c := withBlocks(t)
	wantProperty(t, c.Converged("z", 0, device, set(1)), checker.Convergent)
	wantProperty(t, c.Converged("z", 0, device, nil), "")
}

func TestConvergedAfterALateStart(t *testing.T) {
	c, err := play(t, []stream{{fromAfter(5), []*kvcastv1.SubscribeResponse{
		accepted(kvcastv1.Accepted_MODE_RESUME, 5, 5),
		message(5, entry(6, "a", store(30, 0, 1)), entry(7, "a", store(31, 1, 2)),
			entry(8, "a", clearAll(32, 1, kvcastv1.Cleared_REASON_ENGINE_CLEARED))),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	wantProperty(t, c.Converged("a", 0, device, set(1, 9)), "")
	wantProperty(t, c.Converged("a", 0, device, set(9)), checker.Convergent)
	wantProperty(t, c.Converged("a", 1, device, set(9)), checker.Convergent)
}

func TestReported(t *testing.T) {
	wantProperty(t, withBlocks(t).Reported("a", 0), checker.Reported)
	wantProperty(t, withBlocks(t, gap(0, 0)).Reported("a", 0), "")
	wantProperty(t, withBlocks(t, gap(0, 0)).Reported("a", 1), checker.Reported)
	unproved := gap(0, 0)
	unproved.Event = &kvcastv1.RouterEvent_Gap{Gap: &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_UNPROVED}}
	wantProperty(t, withBlocks(t, unproved).Reported("a", 0), checker.Reported)
	wantProperty(t, withBlocks(t, clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_RESTARTED)).Reported("a", 0), "")
	wantProperty(t, withBlocks(t, clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED)).Reported("a", 0), checker.Reported)
}

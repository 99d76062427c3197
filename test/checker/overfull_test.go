package checker_test

import (
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// TestTooManyBlocksIsReportedOnce follows the contract of REASON_TOO_MANY_BLOCKS and
// REASON_TOO_MANY_ATTRIBUTES.
func TestTooManyBlocksIsReportedOnce(t *testing.T) {
	attributes := func() *kvcastv1.RouterEvent {
		ev := overfull(0, 0)
		ev.GetGap().Reason = kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES
		return ev
	}
	all := func(reason kvcastv1.Cleared_Reason, tiers ...kvcastv1.Tier) *kvcastv1.RouterEvent {
		return clearAll(0, 0, reason, tiers...)
	}
	tests := map[string]struct {
		events []*kvcastv1.RouterEvent
		want   checker.Property
	}{
		"once":                          {[]*kvcastv1.RouterEvent{overfull(0, 0)}, ""},
		"twice":                         {[]*kvcastv1.RouterEvent{overfull(0, 0), store(0, 0, 4), overfull(0, 0)}, checker.Protocol},
		"of two ranks":                  {[]*kvcastv1.RouterEvent{overfull(0, 0), overfull(0, 1)}, ""},
		"repeated after a clear":        {[]*kvcastv1.RouterEvent{overfull(0, 0), all(kvcastv1.Cleared_REASON_ENGINE_CLEARED), overfull(0, 0)}, ""},
		"repeated after a cleared gap":  {[]*kvcastv1.RouterEvent{overfull(0, 0), all(kvcastv1.Cleared_REASON_UNREPAIRED_GAP), overfull(0, 0)}, ""},
		"repeated after a clear of one": {[]*kvcastv1.RouterEvent{overfull(0, 0), all(kvcastv1.Cleared_REASON_SOURCE_CLEARED, device), overfull(0, 0)}, ""},
		"of both reasons":               {[]*kvcastv1.RouterEvent{overfull(0, 0), attributes()}, ""},
		"twice of the second":           {[]*kvcastv1.RouterEvent{attributes(), overfull(0, 0), attributes()}, checker.Protocol},
		"the second after a clear":      {[]*kvcastv1.RouterEvent{attributes(), all(kvcastv1.Cleared_REASON_ENGINE_CLEARED), attributes()}, ""},
		"repeated after a gap":          {[]*kvcastv1.RouterEvent{overfull(0, 0), gap(0, 0), overfull(0, 0)}, checker.Protocol},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := checker.New(checker.Options{})
			msgs := []*kvcastv1.SubscribeResponse{accepted(kvcastv1.Accepted_MODE_RESUME, 0, 0), message(0, added(1, "a", 1))}
			for i, ev := range tt.events {
				seq := uint64(i + 2)
				ev.EventId = seq
				msgs = append(msgs, message(seq-1, entry(seq, "a", ev)))
			}
			err := playOn(t, c, []stream{{fromAfter(0), msgs}})
			wantProperty(t, err, tt.want)
			if err == nil {
				wantProperty(t, c.Reported("a", 0), "")
				if got, want := c.View().Incomplete("a", 0), tt.events[len(tt.events)-1].GetGap() != nil; got != want {
					t.Errorf("incomplete: got %v, want %v", got, want)
				}
			}
		})
	}
}

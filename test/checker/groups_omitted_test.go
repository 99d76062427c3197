package checker_test

import (
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// TestGroupsOmittedIsSentOnce follows the contract of GroupsOmitted.
func TestGroupsOmittedIsSentOnce(t *testing.T) {
	const restarted = kvcastv1.Cleared_REASON_ENGINE_RESTARTED
	type events = []*kvcastv1.RouterEvent
	tests := map[string]struct {
		events events
		want   checker.Property
		holds  bool // at the end, of rank 0
	}{
		"once":                            {events{omitGroups(0, 0), store(0, 0, 1)}, "", true},
		"twice":                           {events{omitGroups(0, 0), store(0, 0, 1), omitGroups(0, 0)}, checker.Protocol, false},
		"of two ranks":                    {events{omitGroups(0, 1), omitGroups(0, 0)}, "", true},
		"of another rank":                 {events{omitGroups(0, 1), store(0, 0, 1)}, "", false},
		"until a restart":                 {events{omitGroups(0, 0), clearAll(0, 0, restarted)}, "", false},
		"again after a restart":           {events{omitGroups(0, 0), clearAll(0, 0, restarted), omitGroups(0, 0)}, "", true},
		"after a restart of another rank": {events{omitGroups(0, 0), clearAll(0, 1, restarted), omitGroups(0, 0)}, checker.Protocol, false},
		"after a restart of one tier":     {events{omitGroups(0, 0), clearAll(0, 0, restarted, device)}, "", true},
		"again after a restart of one tier": {
			events{omitGroups(0, 0), clearAll(0, 0, restarted, device), omitGroups(0, 0)}, checker.Protocol, false},
		"after a clear": {events{omitGroups(0, 0), clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED)}, "", true},
		"again after a clear": {
			events{omitGroups(0, 0), clearAll(0, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED), omitGroups(0, 0)}, checker.Protocol, false},
		"again after a gap":   {events{omitGroups(0, 0), gap(0, 0), omitGroups(0, 0)}, checker.Protocol, false},
		"with a tier":         {events{onDisk(omitGroups(0, 0))}, checker.Protocol, false},
		"of no rank":          {events{{Event: omitGroups(0, 0).Event}}, checker.Protocol, false},
		"changes no blocks":   {events{store(0, 0, 1), omitGroups(0, 0)}, "", true},
		"is no loss reported": {events{omitGroups(0, 0)}, "", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := checker.New(checker.Options{})
			msgs := []*kvcastv1.SubscribeResponse{accepted(kvcastv1.Accepted_MODE_RESUME, 0, 0), message(0, added(1, "a", 1))}
			blocks := set()
			for i, ev := range tt.events {
				seq := uint64(i + 2)
				ev.EventId = seq
				msgs = append(msgs, message(seq-1, entry(seq, "a", ev)))
				if ev.GetDpRank() == 0 {
					for _, h := range ev.GetStored().GetBlockHashes() {
						blocks[h] = struct{}{}
					}
				}
			}
			err := playOn(t, c, []stream{{fromAfter(0), msgs}})
			wantProperty(t, err, tt.want)
			if err != nil {
				return
			}
			if got := c.View().GroupsOmitted("a", 0); got != tt.holds {
				t.Errorf("GroupsOmitted: got %v, want %v", got, tt.holds)
			}
			if c.View().Incomplete("a", 0) {
				t.Error("the rank is incomplete")
			}
			wantProperty(t, c.Converged("a", 0, device, blocks), "")
		})
	}
}

// TestSnapshotReportsGroupsOmitted checks that a snapshot's report counts like the event.
func TestSnapshotReportsGroupsOmitted(t *testing.T) {
	announced := announced(1, 4)
	of := func(rank uint32) *kvcastv1.SubscribeResponse {
		m := snapshotWorker("a", 4)
		m.GetSnapshotWorker().Ranks = []*kvcastv1.SnapshotRank{{DpRank: rank, GroupsOmitted: true}}
		return m
	}
	for rank, want := range []checker.Property{checker.Protocol, ""} {
		c, err := play(t, []stream{{fromSnapshot(), []*kvcastv1.SubscribeResponse{
			announced, snapshotBegin(), of(uint32(rank)), snapshotEnd(4), message(4, entry(5, "a", omitGroups(5, 0))),
		}}})
		wantProperty(t, err, want)
		if !c.View().GroupsOmitted("a", 0) && err == nil {
			t.Error("the event has no effect")
		}
		if !c.View().GroupsOmitted("a", uint32(rank)) {
			t.Errorf("rank %d of the snapshot: GroupsOmitted is false", rank)
		}
	}
}

package index_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func gap(reason kvcastv1.Gap_Reason, missed uint64) *kvcastv1.Gap {
	return &kvcastv1.Gap{Reason: reason, MissedBatches: missed}
}

func cleared(reason kvcastv1.Cleared_Reason, tiers ...kvcastv1.Tier) *kvcastv1.Cleared {
	return &kvcastv1.Cleared{Reason: reason, Tiers: tiers}
}

// TestTrustFollowsFromEvents checks the reasons, gaps and trust of rank 0 after events, and that a snapshot has them.
func TestTrustFollowsFromEvents(t *testing.T) {
	const (
		lost      = kvcastv1.DegradedReason_DEGRADED_REASON_GAP
		late      = kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE
		restarted = kvcastv1.DegradedReason_DEGRADED_REASON_POSSIBLE_RESTART
		conflict  = kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT
		omitted   = kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED
		shared    = kvcastv1.DegradedReason_DEGRADED_REASON_SHARED_TIER
	)
	const (
		exact    = kvcastv1.Trust_TRUST_EXACT
		upper    = kvcastv1.Trust_TRUST_UPPER_BOUND
		degraded = kvcastv1.Trust_TRUST_DEGRADED
	)
	groups, added := &kvcastv1.GroupsOmitted{}, &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}
	type reasons = []kvcastv1.DegradedReason
	for name, test := range map[string]struct {
		events       []any
		reasons      reasons
		gaps, missed uint64
		groups       bool
		trust        kvcastv1.Trust
	}{
		"no events of the rank":               {events: []any{added}, trust: exact},
		"blocks only":                         {events: []any{stored(1), removed(1)}, trust: exact},
		"joined late":                         {events: []any{gap(kvcastv1.Gap_REASON_JOINED_LATE, 0)}, reasons: reasons{late}, gaps: 1, trust: degraded},
		"replay unavailable":                  {events: []any{gap(kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE, 3)}, reasons: reasons{lost}, gaps: 1, missed: 3, trust: degraded},
		"replay incomplete":                   {events: []any{gap(kvcastv1.Gap_REASON_REPLAY_INCOMPLETE, 3)}, reasons: reasons{lost}, gaps: 1, missed: 3, trust: degraded},
		"replay forgotten":                    {events: []any{gap(kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, 3)}, reasons: reasons{lost}, gaps: 1, missed: 3, trust: degraded},
		"possible restart":                    {events: []any{gap(kvcastv1.Gap_REASON_POSSIBLE_RESTART, 0)}, reasons: reasons{restarted}, gaps: 1, trust: degraded},
		"two publishers":                      {events: []any{gap(kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER, 0)}, reasons: reasons{conflict}, gaps: 1, trust: degraded},
		"too many blocks":                     {events: []any{gap(kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, 0)}, reasons: reasons{omitted}, gaps: 1, trust: degraded},
		"too many attributes":                 {events: []any{gap(kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES, 0)}, reasons: reasons{omitted}, gaps: 1, trust: degraded},
		"a shared tier":                       {events: []any{gap(kvcastv1.Gap_REASON_SHARED_TIER, 0)}, reasons: reasons{shared}, gaps: 1, trust: degraded},
		"a reason of a later version":         {events: []any{gap(99, 0)}, reasons: reasons{lost}, gaps: 1, trust: degraded},
		"no reason":                           {events: []any{gap(0, 0)}, reasons: reasons{lost}, gaps: 1, trust: degraded},
		"two reasons":                         {events: []any{gap(kvcastv1.Gap_REASON_SHARED_TIER, 0), gap(kvcastv1.Gap_REASON_JOINED_LATE, 0)}, reasons: reasons{late, shared}, gaps: 2, trust: degraded},
		"missed batches that overflow":        {events: []any{gap(99, math.MaxUint64), gap(99, 5)}, reasons: reasons{lost}, gaps: 2, missed: math.MaxUint64, trust: degraded},
		"stores do not repair":                {events: []any{gap(99, 0), stored(1), removed(1)}, reasons: reasons{lost}, gaps: 1, trust: degraded},
		"cleared by the engine":               {events: []any{gap(99, 1), cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED)}, gaps: 1, missed: 1, trust: exact},
		"restarted":                           {events: []any{gap(99, 1), cleared(kvcastv1.Cleared_REASON_ENGINE_RESTARTED)}, gaps: 1, missed: 1, trust: exact},
		"cleared for a gap":                   {events: []any{gap(kvcastv1.Gap_REASON_JOINED_LATE, 1), cleared(kvcastv1.Cleared_REASON_UNREPAIRED_GAP)}, reasons: reasons{lost}, gaps: 2, missed: 1, trust: degraded},
		"some tiers cleared":                  {events: []any{gap(99, 1), cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED, device)}, reasons: reasons{lost}, gaps: 1, missed: 1, trust: degraded},
		"a gap after a clear":                 {events: []any{gap(99, 1), cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED), gap(kvcastv1.Gap_REASON_JOINED_LATE, 1)}, reasons: reasons{late}, gaps: 2, missed: 2, trust: degraded},
		"other groups":                        {events: []any{groups}, groups: true, trust: upper},
		"other groups and a gap":              {events: []any{groups, gap(99, 0)}, reasons: reasons{lost}, gaps: 1, groups: true, trust: degraded},
		"other groups, cleared by the engine": {events: []any{groups, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED)}, groups: true, trust: upper},
		"other groups, cleared for a gap":     {events: []any{groups, cleared(kvcastv1.Cleared_REASON_UNREPAIRED_GAP)}, reasons: reasons{lost}, gaps: 1, groups: true, trust: degraded},
		"other groups, restarted":             {events: []any{groups, cleared(kvcastv1.Cleared_REASON_ENGINE_RESTARTED)}, trust: exact},
		"added again":                         {events: []any{groups, gap(99, 1), added}, trust: exact},
		"removed and added":                   {events: []any{groups, gap(99, 1), &kvcastv1.WorkerRemoved{}, added}, trust: exact},
		"a kind of a later version":           {events: []any{groups, nil}, groups: true, trust: upper},
	} {
		t.Run(name, func(t *testing.T) {
			x := index.New()
			for i, kind := range test.events {
				x.ApplyEntry(entryOf(uint64(i+1), event(0, kind), event(1, stored(1))))
			}
			want := index.Rank{Gaps: test.gaps, MissedBatches: test.missed, GroupsOmitted: test.groups}
			for _, r := range test.reasons {
				want.Reasons |= 1 << r
			}
			ignored := cmpopts.IgnoreFields(index.Rank{}, "Blocks", "UsedTiers", "LastGap")
			w, _ := x.Worker("w")
			if diff := cmp.Diff(want, w.Ranks[0], ignored); diff != "" {
				t.Errorf("rank (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.reasons, w.Ranks[0].Reasons.List()); diff != "" {
				t.Errorf("reasons (-want +got):\n%s", diff)
			}
			if got := w.Ranks[0].Trust(); got != test.trust {
				t.Errorf("trust: got %v, want %v", got, test.trust)
			}
			if got := w.Ranks[1].Trust(); got != exact {
				t.Errorf("trust of another rank: got %v, want exact", got)
			}
			copied := index.New()
			copyWorker(t, x, copied, "w", 0xff)
			if diff := compare(x, copied, afterSnapshot); diff != "" {
				t.Errorf("after a snapshot: %s", diff)
			}
		})
	}
}

func TestLastGapIsTheLastOfTheRank(t *testing.T) {
	x := index.New()
	for i, e := range []*kvcastv1.RouterEvent{
		event(0, gap(kvcastv1.Gap_REASON_JOINED_LATE, 0)), event(0, gap(kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, 7)),
		event(1, gap(kvcastv1.Gap_REASON_SHARED_TIER, 0)), event(0, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED)),
	} {
		x.ApplyEntry(entryOf(uint64(i+1), e))
	}
	w, _ := x.Worker("w")
	if want := gap(kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, 7); !proto.Equal(want, w.Ranks[0].LastGap) {
		t.Errorf("last gap: got %v, want %v", w.Ranks[0].LastGap, want)
	}
	x.ApplyEntry(entryOf(5, event(0, &kvcastv1.WorkerAdded{Ranks: []uint32{0}})))
	if w, _ := x.Worker("w"); w.Ranks[0].LastGap != nil {
		t.Errorf("last gap of a worker added again: got %v, want none", w.Ranks[0].LastGap)
	}
}

// TestSnapshotOfAnEarlierServerHasAReason applies a snapshot whose incomplete ranks have no reports.
func TestSnapshotOfAnEarlierServerHasAReason(t *testing.T) {
	x := index.New()
	x.ApplySnapshotWorker(&kvcastv1.SnapshotWorker{
		Worker: "w", Added: &kvcastv1.WorkerAdded{Ranks: []uint32{0, 1}}, IncompleteRanks: []uint32{1}, LastEventId: 9,
	})
	want := []index.Worker{{Name: "w", Added: &kvcastv1.WorkerAdded{Ranks: []uint32{0, 1}}, LastEventID: 9, Ranks: []index.Rank{
		{Rank: 0}, {Rank: 1, Reasons: 1 << kvcastv1.DegradedReason_DEGRADED_REASON_GAP},
	}}}
	got, _ := x.Workers(nil)
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("workers (-want +got):\n%s", diff)
	}
}

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
	t.Parallel()
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
	var (
		groups  = &kvcastv1.GroupsOmitted{}
		added   = &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}
		newGap  = gap(99, 1) // a reason of a later version
		joined  = gap(kvcastv1.Gap_REASON_JOINED_LATE, 0)
		shares  = gap(kvcastv1.Gap_REASON_SHARED_TIER, 0)
		clears  = kvcastv1.Cleared_REASON_ENGINE_CLEARED
		starts  = kvcastv1.Cleared_REASON_ENGINE_RESTARTED
		unknown = kvcastv1.Cleared_REASON_UNREPAIRED_GAP
	)
	type reasons = []kvcastv1.DegradedReason
	for name, test := range map[string]struct {
		events       []any
		reasons      reasons
		gaps, missed uint64
		groups       bool
		trust        kvcastv1.Trust
	}{
		"no events of the rank": {[]any{added}, nil, 0, 0, false, exact},
		"blocks only":           {[]any{stored(1), removed(1)}, nil, 0, 0, false, exact},
		"source cleared":        {[]any{cleared(kvcastv1.Cleared_REASON_SOURCE_CLEARED)}, nil, 0, 0, false, exact},

		"joined late":         {[]any{joined}, reasons{late}, 1, 0, false, degraded},
		"replay unavailable":  {[]any{gap(kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE, 3)}, reasons{lost}, 1, 3, false, degraded},
		"replay incomplete":   {[]any{gap(kvcastv1.Gap_REASON_REPLAY_INCOMPLETE, 3)}, reasons{lost}, 1, 3, false, degraded},
		"replay forgotten":    {[]any{gap(kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, 3)}, reasons{lost}, 1, 3, false, degraded},
		"possible restart":    {[]any{gap(kvcastv1.Gap_REASON_POSSIBLE_RESTART, 0)}, reasons{restarted}, 1, 0, false, degraded},
		"two publishers":      {[]any{gap(kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER, 0)}, reasons{conflict}, 1, 0, false, degraded},
		"too many blocks":     {[]any{gap(kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, 0)}, reasons{omitted}, 1, 0, false, degraded},
		"too many attributes": {[]any{gap(kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES, 0)}, reasons{omitted}, 1, 0, false, degraded},
		"a shared tier":       {[]any{shares}, reasons{shared}, 1, 0, false, degraded},
		"a new reason":        {[]any{newGap}, reasons{lost}, 1, 1, false, degraded},
		"no reason":           {[]any{gap(0, 0)}, reasons{lost}, 1, 0, false, degraded},
		"two reasons":         {[]any{shares, joined}, reasons{late, shared}, 2, 0, false, degraded},
		"many missed batches": {[]any{gap(99, math.MaxUint64), newGap}, reasons{lost}, 2, math.MaxUint64, false, degraded},

		"stores do not repair":     {[]any{newGap, stored(1), removed(1)}, reasons{lost}, 1, 1, false, degraded},
		"cleared by the engine":    {[]any{newGap, cleared(clears)}, nil, 1, 1, false, exact},
		"restarted":                {[]any{newGap, cleared(starts)}, nil, 1, 1, false, exact},
		"cleared for a gap":        {[]any{joined, cleared(unknown)}, reasons{lost}, 2, 0, false, degraded},
		"a tier cleared":           {[]any{newGap, cleared(clears, device)}, reasons{lost}, 1, 1, false, degraded},
		"a tier cleared for a gap": {[]any{joined, cleared(unknown, device)}, reasons{late, lost}, 2, 0, false, degraded},
		"a gap after a clear":      {[]any{newGap, cleared(clears), joined}, reasons{late}, 2, 1, false, degraded},

		"other groups":                         {[]any{groups}, nil, 0, 0, true, upper},
		"other groups and a gap":               {[]any{groups, newGap}, reasons{lost}, 1, 1, true, degraded},
		"other groups, cleared":                {[]any{groups, cleared(clears)}, nil, 0, 0, true, upper},
		"other groups, cleared for a gap":      {[]any{groups, cleared(unknown)}, reasons{lost}, 1, 0, true, degraded},
		"other groups, restarted":              {[]any{groups, cleared(starts)}, nil, 0, 0, false, exact},
		"other groups, a tier restarted":       {[]any{groups, cleared(starts, device)}, nil, 0, 0, true, upper},
		"other groups, an event of a new kind": {[]any{groups, nil}, nil, 0, 0, true, upper},

		"added again":       {[]any{groups, newGap, added}, nil, 0, 0, false, exact},
		"removed and added": {[]any{groups, newGap, &kvcastv1.WorkerRemoved{}, added}, nil, 0, 0, false, exact},
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
	t.Parallel()
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
	t.Parallel()
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

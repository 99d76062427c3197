package index_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
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
		unread    = kvcastv1.DegradedReason_DEGRADED_REASON_EVENTS_SKIPPED
		sizes     = kvcastv1.DegradedReason_DEGRADED_REASON_BLOCK_SIZE_MISMATCH
		unsure    = kvcastv1.DegradedReason_DEGRADED_REASON_UNKNOWN_CONTENT
		kept      = kvcastv1.DegradedReason_DEGRADED_REASON_TIER_NOT_CLEARED
	)
	const (
		exact    = kvcastv1.Trust_TRUST_EXACT
		upper    = kvcastv1.Trust_TRUST_UPPER_BOUND
		degraded = kvcastv1.Trust_TRUST_DEGRADED
	)
	var (
		groups  = &kvcastv1.GroupsOmitted{}
		skipped = gap(kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0)
		size    = &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_HOST_PINNED}, Detail: "16 for 32"}
		content = &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_UNKNOWN_CONTENT, Tiers: []kvcastv1.Tier{device}}
		stays   = &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_TIER_NOT_CLEARED, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_HOST_PINNED, kvcastv1.Tier_TIER_DISK}}
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
		byTier       []reasons // nil: the same in all
		detail       string
	}{
		"no events of the rank": {[]any{added}, nil, 0, 0, false, exact, nil, ""},
		"blocks only":           {[]any{stored(1), removed(1)}, nil, 0, 0, false, exact, nil, ""},
		"source cleared":        {[]any{cleared(kvcastv1.Cleared_REASON_SOURCE_CLEARED)}, nil, 0, 0, false, exact, nil, ""},

		"joined late":         {[]any{joined}, reasons{late}, 1, 0, false, degraded, nil, ""},
		"replay unavailable":  {[]any{gap(kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE, 3)}, reasons{lost}, 1, 3, false, degraded, nil, ""},
		"replay incomplete":   {[]any{gap(kvcastv1.Gap_REASON_REPLAY_INCOMPLETE, 3)}, reasons{lost}, 1, 3, false, degraded, nil, ""},
		"replay forgotten":    {[]any{gap(kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, 3)}, reasons{lost}, 1, 3, false, degraded, nil, ""},
		"possible restart":    {[]any{gap(kvcastv1.Gap_REASON_POSSIBLE_RESTART, 0)}, reasons{restarted}, 1, 0, false, degraded, nil, ""},
		"two publishers":      {[]any{gap(kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER, 0)}, reasons{conflict}, 1, 0, false, degraded, nil, ""},
		"too many blocks":     {[]any{gap(kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, 0)}, reasons{omitted}, 1, 0, false, degraded, nil, ""},
		"too many attributes": {[]any{gap(kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES, 0)}, reasons{omitted}, 1, 0, false, degraded, nil, ""},
		"a shared tier":       {[]any{shares}, reasons{shared}, 1, 0, false, degraded, nil, ""},
		"a new reason":        {[]any{newGap}, reasons{lost}, 1, 1, false, degraded, nil, ""},
		"no reason":           {[]any{gap(0, 0)}, reasons{lost}, 1, 0, false, degraded, nil, ""},
		"two reasons":         {[]any{shares, joined}, reasons{late, shared}, 2, 0, false, degraded, nil, ""},
		"many missed batches": {[]any{gap(99, math.MaxUint64), newGap}, reasons{lost}, 2, math.MaxUint64, false, degraded, nil, ""},

		"events skipped":                     {[]any{skipped}, reasons{unread}, 1, 0, false, degraded, nil, ""},
		"blocks of another size":             {[]any{size}, reasons{sizes}, 1, 0, false, degraded, []reasons{nil, {sizes}, nil, nil}, "16 for 32"},
		"unknown content":                    {[]any{content}, reasons{unsure}, 1, 0, false, degraded, []reasons{{unsure}, nil, nil, nil}, ""},
		"tiers that may be cleared":          {[]any{stays}, reasons{kept}, 1, 0, false, degraded, []reasons{nil, {kept}, {kept}, nil}, ""},
		"reasons of two tiers":               {[]any{size, content}, reasons{sizes, unsure}, 2, 0, false, degraded, []reasons{{unsure}, {sizes}, nil, nil}, "16 for 32"},
		"reasons of two tiers, one cleared":  {[]any{size, content, cleared(clears, kvcastv1.Tier_TIER_HOST_PINNED)}, reasons{unsure}, 2, 0, false, degraded, []reasons{{unsure}, nil, nil, nil}, "16 for 32"},
		"reasons of two tiers, both cleared": {[]any{size, content, cleared(clears, kvcastv1.Tier_TIER_HOST_PINNED, device)}, nil, 2, 0, false, exact, nil, ""},
		"reasons of a tier, all cleared":     {[]any{size, cleared(clears)}, nil, 1, 0, false, exact, nil, ""},
		"reasons of a tier and all":          {[]any{size, skipped}, reasons{unread, sizes}, 2, 0, false, degraded, []reasons{{unread}, {unread, sizes}, {unread}, {unread}}, "16 for 32"},

		"stores do not repair":     {[]any{newGap, stored(1), removed(1)}, reasons{lost}, 1, 1, false, degraded, nil, ""},
		"cleared by the engine":    {[]any{newGap, cleared(clears)}, nil, 1, 1, false, exact, nil, ""},
		"restarted":                {[]any{newGap, cleared(starts)}, nil, 1, 1, false, exact, nil, ""},
		"cleared for a gap":        {[]any{joined, cleared(unknown)}, reasons{lost}, 2, 0, false, degraded, nil, ""},
		"a tier cleared":           {[]any{newGap, cleared(clears, device)}, reasons{lost}, 1, 1, false, degraded, []reasons{nil, {lost}, {lost}, {lost}}, ""},
		"a tier cleared for a gap": {[]any{joined, cleared(unknown, device)}, reasons{late, lost}, 2, 0, false, degraded, []reasons{{lost}, {late}, {late}, {late}}, ""},
		"a gap after a clear":      {[]any{newGap, cleared(clears), joined}, reasons{late}, 2, 1, false, degraded, nil, ""},

		"other groups":                         {[]any{groups}, nil, 0, 0, true, upper, nil, ""},
		"other groups and a gap":               {[]any{groups, newGap}, reasons{lost}, 1, 1, true, degraded, nil, ""},
		"other groups, cleared":                {[]any{groups, cleared(clears)}, nil, 0, 0, true, upper, nil, ""},
		"other groups, cleared for a gap":      {[]any{groups, cleared(unknown)}, reasons{lost}, 1, 0, true, degraded, nil, ""},
		"other groups, restarted":              {[]any{groups, cleared(starts)}, nil, 0, 0, false, exact, nil, ""},
		"other groups, a tier restarted":       {[]any{groups, cleared(starts, device)}, nil, 0, 0, true, upper, nil, ""},
		"other groups, an event of a new kind": {[]any{groups, nil}, nil, 0, 0, true, upper, nil, ""},

		"added again":       {[]any{groups, newGap, added}, nil, 0, 0, false, exact, nil, ""},
		"removed and added": {[]any{groups, newGap, &kvcastv1.WorkerRemoved{}, added}, nil, 0, 0, false, exact, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := index.New()
			for i, kind := range test.events {
				x.ApplyEntry(entryOf(uint64(i+1), event(0, kind), event(1, stored(1))))
			}
			want := index.Rank{Gaps: test.gaps, MissedBatches: test.missed, GroupsOmitted: test.groups, Detail: test.detail}
			for _, r := range test.reasons {
				want.Reasons |= 1 << r
			}
			for tier := range want.TierReasons {
				if test.byTier == nil {
					want.TierReasons[tier] = want.Reasons
					continue
				}
				for _, r := range test.byTier[tier] {
					want.TierReasons[tier] |= 1 << r
				}
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
	const lost = index.Reasons(1 << kvcastv1.DegradedReason_DEGRADED_REASON_GAP)
	want := []index.Worker{{Name: "w", Added: &kvcastv1.WorkerAdded{Ranks: []uint32{0, 1}}, LastEventID: 9, Ranks: []index.Rank{
		{Rank: 0}, {Rank: 1, Reasons: lost, TierReasons: [kvblock.NumTiers]index.Reasons{lost, lost, lost, lost}},
	}}}
	got, _ := x.Workers(nil)
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("workers (-want +got):\n%s", diff)
	}
}

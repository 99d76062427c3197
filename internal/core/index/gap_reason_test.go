package index

import (
	"testing"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestReasonsOfGaps(t *testing.T) {
	t.Parallel()
	want := map[kvcastv1.Gap_Reason]kvcastv1.DegradedReason{
		kvcastv1.Gap_REASON_UNSPECIFIED:         kvcastv1.DegradedReason_DEGRADED_REASON_GAP,
		kvcastv1.Gap_REASON_REPLAY_UNAVAILABLE:  kvcastv1.DegradedReason_DEGRADED_REASON_GAP,
		kvcastv1.Gap_REASON_REPLAY_INCOMPLETE:   kvcastv1.DegradedReason_DEGRADED_REASON_GAP,
		kvcastv1.Gap_REASON_REPLAY_FORGOTTEN:    kvcastv1.DegradedReason_DEGRADED_REASON_GAP,
		kvcastv1.Gap_REASON_POSSIBLE_RESTART:    kvcastv1.DegradedReason_DEGRADED_REASON_POSSIBLE_RESTART,
		kvcastv1.Gap_REASON_AMBIGUOUS_PUBLISHER: kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT,
		kvcastv1.Gap_REASON_TOO_MANY_BLOCKS:     kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED,
		kvcastv1.Gap_REASON_JOINED_LATE:         kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE,
		kvcastv1.Gap_REASON_SHARED_TIER:         kvcastv1.DegradedReason_DEGRADED_REASON_SHARED_TIER,
		kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES: kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED,
		kvcastv1.Gap_REASON_EVENTS_SKIPPED:      kvcastv1.DegradedReason_DEGRADED_REASON_EVENTS_SKIPPED,
		kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH: kvcastv1.DegradedReason_DEGRADED_REASON_BLOCK_SIZE_MISMATCH,
		kvcastv1.Gap_REASON_UNKNOWN_CONTENT:     kvcastv1.DegradedReason_DEGRADED_REASON_UNKNOWN_CONTENT,
		kvcastv1.Gap_REASON_TIER_NOT_CLEARED:    kvcastv1.DegradedReason_DEGRADED_REASON_TIER_NOT_CLEARED,
		kvcastv1.Gap_REASON_REPLAY_UNPROVED:     kvcastv1.DegradedReason_DEGRADED_REASON_REPLAY_UNPROVED,
		kvcastv1.Gap_REASON_REPLAY_FOREIGN:      kvcastv1.DegradedReason_DEGRADED_REASON_REPLAY_FOREIGN,
		kvcastv1.Gap_REASON_COPIES_UNSURE:       kvcastv1.DegradedReason_DEGRADED_REASON_COPIES_UNSURE,
		kvcastv1.Gap_REASON_CONNECTOR_TIER:      kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER,
		kvcastv1.Gap_REASON_RELAYED:             kvcastv1.DegradedReason_DEGRADED_REASON_RELAYED,
		1000:                                    kvcastv1.DegradedReason_DEGRADED_REASON_GAP,
	}
	for number, name := range kvcastv1.Gap_Reason_name {
		if _, ok := want[kvcastv1.Gap_Reason(number)]; !ok {
			t.Errorf("the test does not have %s", name)
		}
	}
	for reason, want := range want {
		if got := gapReason(reason); got != want {
			t.Errorf("%v: got %v, want %v", reason, got, want)
		}
	}
}

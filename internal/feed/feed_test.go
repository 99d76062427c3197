package feed_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/feed"
)

// TestReasonsHaveNames pins the names, which are in logs and metrics.
func TestReasonsHaveNames(t *testing.T) {
	gaps := map[feed.GapReason]string{
		0:                          "unknown",
		feed.GapReplayUnavailable:  "replay_unavailable",
		feed.GapReplayIncomplete:   "replay_incomplete",
		feed.GapReplayForgotten:    "replay_forgotten",
		feed.GapPossibleRestart:    "possible_restart",
		feed.GapAmbiguousPublisher: "ambiguous_publisher",
		6:                          "too_many_blocks",
		feed.GapJoinedLate:         "joined_late",
		8:                          "shared_tier",
		9:                          "too_many_attributes",
		feed.GapEventsSkipped:      "events_skipped",
		feed.GapBlockSizeMismatch:  "block_size_mismatch",
		feed.GapUnknownContent:     "unknown_content",
		feed.GapTierNotCleared:     "tier_not_cleared",
		feed.GapReplayUnproved:     "replay_unproved",
		feed.GapReplayForeign:      "replay_foreign",
		feed.GapCopiesUnsure:       "copies_unsure",
		feed.GapConnectorTier:      "connector_tier",
		feed.GapRelayed:            "relayed",
		19:                         "unknown",
		255:                        "unknown",
	}
	for reason, want := range gaps {
		if diff := cmp.Diff(want, reason.String()); diff != "" {
			t.Errorf("gap reason %d (-want +got):\n%s", reason, diff)
		}
	}
	removals := map[feed.RemoveReason]string{
		0: "unknown", feed.RemovedDeregistered: "deregistered", feed.RemovedDisconnected: "disconnected", feed.RemovedDiscovery: "discovery", 4: "unknown",
	}
	for reason, want := range removals {
		if diff := cmp.Diff(want, reason.String()); diff != "" {
			t.Errorf("remove reason %d (-want +got):\n%s", reason, diff)
		}
	}
}

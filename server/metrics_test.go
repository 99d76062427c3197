package server_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// TestDegradedRanksAreCountedByReason checks the reasons of a dp rank in the metrics, until a clear resolves them.
func TestDegradedRanksAreCountedByReason(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	lane := h.Pipeline.AddWorker(feed.Worker{Name: "w", Model: "m", Ranks: []uint32{0, 1}})
	want := func(when string, want map[string]float64) {
		t.Helper()
		applied, bounds := matchOf(1), h.Journal.Bounds()
		applied.After = &kvcastv1.Position{Epoch: bounds.Epoch, Seq: bounds.Newest}
		h.match(applied)
		got := harness.Gather(t, h.registry).By("kvcast_index_degraded", "reason")
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	want("at the beginning", nil)
	lane.Gap(feed.Gap{Rank: 1, Reason: feed.GapReplayForgotten})
	lane.Batch(&feed.Batch{Rank: 1, IngestTime: 1, Doubts: []feed.Doubt{{Reason: feed.GapBlockSizeMismatch, Tiers: 1 << kvblock.TierDevice}}})
	want("after a gap and a block of another size", map[string]float64{"gap": 1, "block_size_mismatch": 1})
	lane.Restarted(feed.Restart{Rank: 1})
	want("after a restart", nil)
}

package pipeline_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Results of describe for events of full and emptied ranks.
const (
	textOverfull  = "gap TOO_MANY_BLOCKS 0: 0-0"
	textForgotten = "cleared [] UNREPAIRED_GAP"
)

// inOrder sorts the blocks of removes, whose order depends on the table's layout.
func inOrder(entries []*kvcastv1.Entry) []*kvcastv1.Entry {
	for _, entry := range entries {
		for _, e := range entry.GetEvents() {
			slices.Sort(e.GetRemoved().GetBlockHashes())
		}
	}
	return entries
}

func TestBlocksPerRankAreBounded(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	full := batch(store(1, 2, 3))
	tests := map[string]struct {
		calls []call
		want  [][]string
	}{
		"as many as are allowed": {
			calls: []call{batch(store(1, 2)), batch(store(3))},
			want:  [][]string{{"store [1 2]"}, {"store [3]"}},
		},
		"blocks beyond the limit are refused, which is reported": {
			calls: []call{batch(store(1, 2, 3, 4))},
			want:  [][]string{{"store [1 2 3]", textOverfull}},
		},
		"the refusal is reported only once": {
			calls: []call{full, batch(store(4)), batch(store(5)), batch(store(6))},
			want:  [][]string{{"store [1 2 3]"}, {textOverfull}},
		},
		"blocks that are there pass": {
			calls: []call{full, batch(store(3)), batch(store(1, 2))},
			want:  [][]string{{"store [1 2 3]"}, {"store [3]"}, {"store [1 2]"}},
		},
		"they pass between refused blocks, and continue those": {
			calls: []call{full, batch(after(9, store(7, 1, 2, 8))), batch(after(9, store(1, 7, 2)))},
			want:  [][]string{{"store [1 2 3]"}, {"store [1 2] after 7", textOverfull}, {"store [1] after 9", "store [2] after 7"}},
		},
		"they count as copies": {
			calls: []call{full, batch(store(1, 4)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1 2 3]"}, {"store [1]", textOverfull}, {"remove [1]"}},
		},
		"a block twice in a store takes one place": {
			calls: []call{batch(store(1, 1, 2, 2)), batch(store(3, 3, 4, 4))},
			want:  [][]string{{"store [1 1 2 2]"}, {"store [3 3]", textOverfull}},
		},
		"where blocks left others get in": {
			calls: []call{full, batch(store(4)), batch(remove(2)), batch(store(5, 6)), batch(remove(1, 3)), batch(store(6, 7, 8))},
			want: [][]string{
				{"store [1 2 3]"}, {textOverfull}, {"remove [2]"}, {"store [5]"}, {"remove [1 3]"}, {"store [6 7]"},
			},
		},
		"a remove of a refused block passes": {
			calls: []call{batch(store(1, 2, 3, 4)), batch(remove(4))},
			want:  [][]string{{"store [1 2 3]", textOverfull}, {"remove [4]"}},
		},
		"tiers count together": {
			calls: []call{batch(store(1, 2)), batch(host(store(1, 3)))},
			want:  [][]string{{"store [1 2]"}, {"HOST_PINNED store [1]", textOverfull}},
		},
		"ranks count apart": {
			calls: []call{full, rankBatch(1, store(4, 5, 6)), rankBatch(1, store(7))},
			want:  [][]string{{"store [1 2 3]"}, {"rank 1 store [4 5 6]"}, {"rank 1 " + textOverfull}},
		},
		"a cleared rank reports a refusal again": {
			calls: []call{full, batch(store(4)), batch(cleared()), batch(store(5, 6, 7, 8))},
			want:  [][]string{{"store [1 2 3]"}, {textOverfull}, {textCleared}, {"store [5 6 7]", textOverfull}},
		},
		"a gap does not repeat the report": {
			calls: []call{full, batch(store(4)), gap(0), batch(store(5, 6, 7, 8))},
			want:  [][]string{{"store [1 2 3]"}, {textOverfull}, {textGap}, {"store [5 6 7]", "remove [1 2 3]"}},
		},
		"blocks from before a gap stay while there is room": {
			calls: []call{batch(store(1)), gap(0), batch(store(2, 3))},
			want:  [][]string{{"store [1]"}, {textGap}, {"store [2 3]"}},
		},
		"blocks from before a gap are evicted": {
			calls: []call{full, gap(0), batch(store(4, 5, 6))},
			want:  [][]string{{"store [1 2 3]"}, {textGap}, {"store [4 5 6]", "remove [1 2 3]"}},
		},
		"no more of them than need": {
			calls: []call{full, gap(0), batch(store(2, 3)), batch(store(4)), batch(store(5))},
			want:  [][]string{{"store [1 2 3]"}, {textGap}, {"store [2 3]"}, {"store [4]", "remove [1]"}, {textOverfull}},
		},
		"those of all tiers do": {
			calls: []call{batch(store(1)), batch(host(store(2))), gap(0), batch(host(store(3, 4, 5)))},
			want: [][]string{
				{"store [1]"}, {"HOST_PINNED store [2]"}, {textGap},
				{"HOST_PINNED store [3 4 5]", "remove [1]", "HOST_PINNED remove [2]"},
			},
		},
		"those of a further tier only then": {
			calls: []call{batch(store(1)), batch(host(store(2))), gap(0), batch(store(3)), batch(store(4)), batch(store(5))},
			want: [][]string{
				{"store [1]"}, {"HOST_PINNED store [2]"}, {textGap},
				{"store [3]"}, {"store [4]", "remove [1]"}, {"store [5]", "HOST_PINNED remove [2]"},
			},
		},
		"those of other ranks do not": {
			calls: []call{full, gap(1), batch(store(4))},
			want:  [][]string{{"store [1 2 3]"}, {"rank 1 " + textGap}, {textOverfull}},
		},
		"a block that is stored again is not from before": {
			calls: []call{full, gap(0), batch(after(1, hashOnly(store(2)))), batch(store(1)), batch(store(4)), batch(store(5))},
			want: [][]string{
				{"store [1 2 3]"}, {textGap}, {"store [2] after 1 hash only"}, {"store [1]"}, {"store [4]", "remove [3]"}, {textOverfull},
			},
		},
		"nor is one that is stored again further on": {
			calls: []call{full, gap(0), batch(store(4, 1, 2, 3))},
			want:  [][]string{{"store [1 2 3]"}, {textGap}, {"store [1 2 3] after 4", textOverfull}},
		},
		"after a second gap all are from before": {
			calls: []call{full, gap(0), batch(store(1, 2, 3)), gap(0), batch(store(4, 5, 6))},
			want:  [][]string{{"store [1 2 3]"}, {textGap}, {"store [1 2 3]"}, {textGap}, {"store [4 5 6]", "remove [1 2 3]"}},
		},
		"a remove of a block that made way passes": {
			calls: []call{batch(store(1)), gap(0), batch(store(4, 5, 6)), batch(remove(1))},
			want:  [][]string{{"store [1]"}, {textGap}, {"store [4 5 6]", "remove [1]"}, {"remove [1]"}},
		},
		"copies from before a gap do not count": {
			calls: []call{batch(store(1), store(1)), gap(0), batch(store(4, 5, 6)), batch(remove(4)), batch(store(1)), batch(remove(1))},
			want: [][]string{
				{"store [1]", "store [1]"}, {textGap}, {"store [4 5 6]", "remove [1]"}, {"remove [4]"}, {"store [1]"}, {"remove [1]"},
			},
		},
		"a remove of one from before makes room": {
			calls: []call{full, gap(0), batch(remove(2)), batch(store(4)), batch(store(1, 3)), batch(store(5))},
			want:  [][]string{{"store [1 2 3]"}, {textGap}, {"remove [2]"}, {"store [4]"}, {"store [1 3]"}, {textOverfull}},
		},
		"each event of a batch finds room by itself": {
			calls: []call{full, batch(store(4), remove(1), store(5))},
			want:  [][]string{{"store [1 2 3]"}, {textOverfull, "remove [1]", "store [5]"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{MaxBlocksPerRank: 3}, func(t *testing.T, s *subject) {
				got := s.play(t, test.calls...)
				if diff := cmp.Diff(test.want, describe(inOrder(got))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				for i, id := range eventIDs(got) {
					if want := uint64(i + 2); id != want {
						t.Fatalf("event id: got %d, want %d", id, want)
					}
				}
			})
		})
	}
}

func TestRefusedBlocksAreCountedAndReported(t *testing.T) {
	withWorker(t, pipeline.Config{MaxBlocksPerRank: 3}, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1, 2, 3, 4)), batch(store(5, 6)))
		const omitted = index.Reasons(1 << kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED)
		want := []index.Rank{{Blocks: inDevice(3), Reasons: omitted, TierReasons: [kvblock.NumTiers]index.Reasons{omitted}, Gaps: 1}}
		if diff := cmp.Diff(want, s.ranks(), rankCounts); diff != "" {
			t.Errorf("ranks (-want +got):\n%s", diff)
		}
		s.play(t, gap(0), batch(store(7, 8)))
		got := s.metrics(t)
		for metric, want := range map[string]float64{
			"blocks_refused_total": 3, "stale_blocks_removed_total": 2, "blocks_removed_total": 2,
			"blocks_stored_total": 5, "gaps_total": 1,
		} {
			if got := got.By("kvcast_pipeline_"+metric, "worker")[testWorker]; got != want {
				t.Errorf("%s: got %v, want %v", metric, got, want)
			}
		}
	})
}

// ranks returns the ranks of the worker that follow from the entries.
func (s *subject) ranks() []index.Rank {
	w, _ := s.journal.index.Worker(testWorker)
	return w.Ranks
}

// rankCounts ignores fields of index.Rank that do not follow from its counts.
var rankCounts = cmp.Options{
	cmpopts.IgnoreFields(index.Rank{}, "LastGap", "UsedTiers"), cmpopts.IgnoreFields(index.Digest{}, "XOR"),
}

// inDevice returns the counts of a rank with n blocks in the device tier.
func inDevice(n uint64) (all [kvblock.NumTiers]index.Digest) {
	all[0].Blocks = n
	return all
}

// TestLargestEventExpiresStaleBlocksAtOnce sends an event of MaxBlocks blocks that displaces
// as many.
func TestLargestEventExpiresStaleBlocksAtOnce(t *testing.T) {
	hashes := func(from uint64) (all []uint64) {
		for i := range uint64(128) {
			all = append(all, from+i)
		}
		return all
	}
	withWorker(t, pipeline.Config{MaxBlocksPerRank: 256}, func(t *testing.T, s *subject) {
		s.play(t, batch(store(hashes(0)...)), batch(store(hashes(128)...)), gap(0))
		got := inOrder(s.play(t, batch(store(append(hashes(1000), hashes(2000)...)...))))
		if diff := cmp.Diff([]int{4}, lengths(got)); diff != "" {
			t.Fatalf("events of each entry (-want +got):\n%s", diff)
		}
		var gone []uint64
		for i, e := range got[0].GetEvents() {
			if n := len(e.GetRemoved().GetBlockHashes()); i%2 == 1 && n != 128 {
				t.Errorf("blocks of event %d: got %d, want 128", i, n)
			}
			gone = append(gone, e.GetRemoved().GetBlockHashes()...)
		}
		slices.Sort(gone)
		if diff := cmp.Diff(hashes(0), gone[:128]); diff != "" || len(gone) != 256 {
			t.Errorf("%d blocks removed (-want +got):\n%s", len(gone), diff)
		}
	})
}

// TestPartlyRefusedRunKeepsParallelFields refuses blocks in the middle of a store.
func TestPartlyRefusedRunKeepsParallelFields(t *testing.T) {
	cfg := pipeline.Config{MaxBlocksPerRank: 3, EmitTokenIDs: true}
	withWorker(t, cfg, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1, 2, 3)))
		e := after(9, withLoRA("a", withBlockSize(2, withTokens(10, store(7, 1, 2, 8, 3)))))
		got := s.play(t, batch(e))[0].GetEvents()
		lora := "a"
		part := func(parent uint64, hashes []uint64, tokens ...uint32) *kvcastv1.Stored {
			s := &kvcastv1.Stored{ParentHash: &parent, BlockHashes: hashes, BlockSize: 2, LoraName: &lora, TokenIds: tokens}
			for _, h := range hashes {
				s.TokensHashes = append(s.TokensHashes, h+1000)
			}
			return s
		}
		want := []*kvcastv1.Stored{part(7, []uint64{1, 2}, 2, 3, 4, 5), part(8, []uint64{3}, 8, 9)}
		if diff := cmp.Diff(want, []*kvcastv1.Stored{got[0].GetStored(), got[1].GetStored()}, protocmp.Transform()); diff != "" {
			t.Errorf("parts (-want +got):\n%s", diff)
		}
	})
}

func TestOnGapClear(t *testing.T) {
	withWorker(t, pipeline.Config{OnGap: pipeline.OnGapClear}, func(t *testing.T, s *subject) {
		for reason := feed.GapReplayUnavailable; reason <= feed.GapAmbiguousPublisher; reason++ {
			lost := call{Worker: testWorker, Gap: &feed.Gap{Rank: 1, Reason: reason, At: 7}}
			got := s.play(t, rankBatch(1, store(1), inTier(kvblock.TierDisk, store(2))), rankBatch(0, store(1)), lost, rankBatch(1, remove(1)))
			want := [][]string{
				{"rank 1 store [1]", "rank 1 DISK store [2]"}, {"store [1]"}, {"rank 1 " + textForgotten}, {"rank 1 remove [1]"},
			}
			if diff := cmp.Diff(want, describe(got)); diff != "" {
				t.Errorf("entries after a gap of reason %d (-want +got):\n%s", reason, diff)
			}
			if diff := cmp.Diff([2]int64{0, 7}, times(got)[2]); diff != "" {
				t.Errorf("times (-want +got):\n%s", diff)
			}
		}
		s.play(t, gap(1))
		const lost = index.Reasons(1 << kvcastv1.DegradedReason_DEGRADED_REASON_GAP)
		want := []index.Rank{
			{Rank: 0, Blocks: inDevice(1)},
			{Rank: 1, Reasons: lost, TierReasons: [kvblock.NumTiers]index.Reasons{lost, lost, lost, lost}, Gaps: 6},
		}
		if diff := cmp.Diff(want, s.ranks(), rankCounts); diff != "" {
			t.Errorf("ranks (-want +got):\n%s", diff)
		}
		got := s.metrics(t)
		for metric, want := range map[string]float64{"gaps_total": 6, "missed_batches_total": 3} {
			if got := got.By("kvcast_pipeline_"+metric, "worker")[testWorker]; got != want {
				t.Errorf("%s: got %v, want %v", metric, got, want)
			}
		}
		if diff := cmp.Diff([][]string{{"rank 1 " + textRestarted}}, describe(s.play(t, restarted(1)))); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if s.ranks()[1].Reasons != 0 {
			t.Error("rank 1 is incomplete after a restart, want it whole")
		}
	})
}

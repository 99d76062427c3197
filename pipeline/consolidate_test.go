package pipeline_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// by2 returns the call, made by the worker's second source.
func by2(c call) call {
	switch {
	case c.Batch != nil:
		c.Batch.Source = 1
	case c.Gap != nil:
		c.Gap.Source = 1
	case c.Restarted != nil:
		c.Restarted.Source = 1
	}
	return c
}

// sharing adds a worker with several sources.
func sharing(mode feed.Consolidate, sources ...feed.Engine) call {
	return call{Worker: testWorker, Add: &feed.Worker{Name: testWorker, Model: "m", Sources: sources, Consolidate: mode}}
}

// withSharing runs a test on a pipeline with one worker of two sources.
func withSharing(t *testing.T, cfg pipeline.Config, mode feed.Consolidate, f func(*testing.T, *subject)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, err := newSubject(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		s.play(t, sharing(mode, feed.EngineVLLM, feed.EngineKVBM))
		f(t, s)
	})
}

// named returns the store with other block hashes.
func named(e wire.Event, hashes ...uint64) wire.Event {
	e.BlockHashes = hashes
	return e
}

const (
	textSourceCleared = "cleared [] SOURCE_CLEARED"
	textSharedTier    = "gap SHARED_TIER 0: 0-0"
)

func TestConsolidateDedup(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	disk := func(e wire.Event) wire.Event { return inTier(kvblock.TierDisk, e) }
	both := []call{batch(store(1, 2)), by2(batch(host(named(store(1, 2), 11, 12))))}
	tests := map[string]struct {
		cfg   pipeline.Config
		calls []call
		want  [][]string
	}{
		"store and remove are of the device, whatever the source's tier": {
			calls: []call{by2(batch(disk(store(1, 2)))), by2(batch(host(remove(1, 2))))},
			want:  [][]string{{"store [1 2]"}, {"remove [1 2]"}},
		},
		"a second store by another source is not emitted": {
			calls: append(both, batch(remove(1, 2)), by2(batch(host(remove(11, 12))))),
			want:  [][]string{{"store [1 2]"}, {"remove [1 2]"}},
		},
		"the LoRA name goes through, and is absent for the base model": {
			calls: []call{batch(withLoRA("a", store(1))), by2(batch(store(1))), batch(remove(1)), by2(batch(remove(1)))},
			want:  [][]string{{`store [1] lora "a"`}, {"store [1]"}, {"remove [1]"}},
		},
		"the tokens of emitted blocks go through": {
			cfg: pipeline.Config{EmitTokenIDs: true},
			calls: []call{
				batch(withTokens(32, store(1, 2))),
				by2(batch(withTokens(48, named(store(1, 2, 3), 11, 12, 13)))),
				by2(batch(withTokens(40, after(13, store(4, 5, 6))))), // too few for all blocks
			},
			want: [][]string{{"store [1 2] 32 tokens"}, {"store [13] after 2 16 tokens"}, {"store [4 5 6] after 13"}},
		},
		"too few tokens for a store are none for a part of it": {
			cfg: pipeline.Config{EmitTokenIDs: true},
			calls: []call{
				batch(withTokens(32, store(1, 2))), by2(batch(withTokens(47, named(store(1, 2, 3), 11, 12, 13)))),
			},
			want: [][]string{{"store [1 2] 32 tokens"}, {"store [13] after 2"}},
		},
		"ranks are independent": {
			calls: []call{
				batch(store(1)), by2(rankBatch(1, store(1))), by2(rankBatch(1, remove(1))), by2(batch(remove(1))), by2(rankBatch(1, cleared())), batch(remove(1)),
			},
			want: [][]string{{"store [1]"}, {"rank 1 store [1]"}, {"rank 1 remove [1]"}, {"rank 1 " + textSourceCleared}, {"remove [1]"}},
		},
		"a store with an unknown parent is emitted unchanged": {
			calls: []call{batch(after(9, store(1, 2)))},
			want:  [][]string{{"store [1 2] after 9"}},
		},
		"hash-only stores are emitted as such": {
			calls: []call{batch(withBlockSize(0, hashOnly(store(1, 2)))), by2(batch(withBlockSize(0, hashOnly(store(2, 3))))), batch(remove(1, 2))},
			want:  [][]string{{"store [1 2] block size 0 hash only"}, {"store [3] after 2 block size 0 hash only"}, {"remove [1]"}},
		},
		"pieces of one store go out together": {
			calls: []call{batch(store(1, 2, 3)), batch(remove(2)), by2(batch(named(store(1, 2, 3), 11, 12, 13)))},
			want:  [][]string{{"store [1 2 3]"}, {"remove [2]"}, {"store [12] after 1"}},
		},
		"a clear of one source removes the blocks that no other source has": {
			calls: append(both, batch(store(3)), batch(cleared(), store(4)), by2(batch(remove(11)))),
			want:  [][]string{{"store [1 2]"}, {"store [3]"}, {"remove [3]", "store [4]"}, {"remove [1]"}},
		},
		"a clear of the last holder is emitted as Cleared": {
			calls: append(both, by2(batch(cleared())), batch(cleared()), batch(store(1))),
			want:  [][]string{{"store [1 2]"}, {textSourceCleared}, {"store [1]"}},
		},
		"a clear of an empty rank is emitted": {
			calls: []call{batch(cleared())},
			want:  [][]string{{textSourceCleared}},
		},
		"a restart of one source removes the blocks that no other source has": {
			calls: append(both, batch(store(3)), restarted(0), batch(store(3)), by2(restarted(0)), restarted(0)),
			want:  [][]string{{"store [1 2]"}, {"store [3]"}, {"remove [3]"}, {"store [3]"}, {"remove [1 2]"}, {textSourceCleared}},
		},
		"a gap of one source does not pin another's blocks": {
			calls: append(both, gap(0), by2(batch(remove(11))), batch(remove(2)), by2(batch(remove(12)))),
			want:  [][]string{{"store [1 2]"}, {textGap}, {"remove [1]"}, {"remove [2]"}},
		},
		"a clear that empties the rank leaves another source incomplete": {
			calls: []call{batch(store(1)), by2(gap(0)), batch(cleared()), by2(batch(cleared()))},
			want:  [][]string{{"store [1]"}, {textGap}, {"cleared [] UNREPAIRED_GAP"}, {textSourceCleared}},
		},
		"a gap with on_gap clear empties the rank": {
			cfg:   pipeline.Config{OnGap: pipeline.OnGapClear},
			calls: append(both, by2(gap(0)), batch(remove(1)), batch(store(1))),
			want:  [][]string{{"store [1 2]"}, {"cleared [] UNREPAIRED_GAP"}, {"store [1]"}},
		},
		"blocks beyond the limit are refused, which is reported once": {
			cfg:   pipeline.Config{MaxBlocksPerRank: 2},
			calls: append(both, batch(store(3, 4)), by2(batch(store(5))), batch(remove(1)), by2(batch(remove(11))), batch(store(5)), batch(store(6))),
			want:  [][]string{{"store [1 2]"}, {"gap TOO_MANY_BLOCKS 0: 0-0"}, {"remove [1]"}, {"store [5]"}},
		},
		"a full rank that was emptied reports again": {
			cfg:   pipeline.Config{MaxBlocksPerRank: 1},
			calls: []call{batch(store(1, 2)), batch(store(3)), batch(cleared()), batch(store(1, 2))},
			want: [][]string{
				{"store [1]", "gap TOO_MANY_BLOCKS 0: 0-0"}, {textSourceCleared}, {"store [1]", "gap TOO_MANY_BLOCKS 0: 0-0"},
			},
		},
		"stale blocks are removed to make room": {
			cfg:   pipeline.Config{MaxBlocksPerRank: 3},
			calls: []call{batch(store(1, 2)), by2(batch(store(7))), gap(0), by2(batch(store(3, 4)))},
			want:  [][]string{{"store [1 2]"}, {"store [7]"}, {textGap}, {"remove [1]", "store [3]", "remove [2]", "store [4] after 3"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withSharing(t, test.cfg, feed.ConsolidateDedup, func(t *testing.T, s *subject) {
				got := s.play(t, test.calls...)
				if diff := cmp.Diff(test.want, describe(got)); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				for i, id := range eventIDs(got) {
					if want := uint64(i + 2); id != want { // WorkerAdded has the first
						t.Fatalf("event id: got %d, want %d", id, want)
					}
				}
			})
		})
	}
}

func TestConsolidatePassthrough(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	disk := func(e wire.Event) wire.Event { return inTier(kvblock.TierDisk, e) }
	tests := map[string]struct {
		cfg   pipeline.Config
		calls []call
		want  [][]string
	}{
		"duplicate stores go on": {
			calls: []call{batch(store(1)), batch(store(1)), by2(batch(store(1)))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {"store [1]"}},
		},
		"stores and removes go on with their tiers and names": {
			calls: []call{batch(store(1)), by2(batch(host(named(store(1), 11)))), batch(remove(1)), by2(batch(host(remove(11))))},
			want:  [][]string{{"store [1]"}, {"HOST_PINNED store [11]"}, {"remove [1]"}, {"HOST_PINNED remove [11]"}},
		},
		"a remove of an unknown block goes on": {
			calls: []call{by2(batch(host(remove(5))))},
			want:  [][]string{{"HOST_PINNED remove [5]"}},
		},
		"a clear names the tiers that its source has used": {
			calls: []call{
				batch(store(1)), by2(batch(host(store(1)), disk(store(2)))), by2(batch(cleared())), batch(remove(1)), by2(batch(host(remove(1)))),
			},
			want: [][]string{
				{"store [1]"}, {"HOST_PINNED store [1]", "DISK store [2]"}, {"cleared [TIER_HOST_PINNED TIER_DISK] ENGINE_CLEARED"},
				{"remove [1]"}, {"HOST_PINNED remove [1]"},
			},
		},
		"so does a restart": {
			calls: []call{batch(store(1)), by2(batch(host(store(1)))), restarted(0), by2(restarted(0))},
			want: [][]string{
				{"store [1]"}, {"HOST_PINNED store [1]"}, {"cleared [TIER_DEVICE] ENGINE_RESTARTED"}, {textRestarted},
			},
		},
		"a tier with blocks of another source stays, stale, and the others are cleared": {
			calls: []call{batch(store(1)), by2(batch(store(2), host(store(3)))), by2(restarted(0)), batch(remove(1)), restarted(0)},
			want: [][]string{
				{"store [1]"}, {"store [2]", "HOST_PINNED store [3]"}, {"cleared [TIER_HOST_PINNED] ENGINE_RESTARTED", textSharedTier},
				{"remove [1]"}, {textRestarted},
			},
		},
		"the copies of a released source pin no block": {
			calls: []call{batch(store(1)), by2(batch(store(1))), batch(cleared()), by2(batch(remove(1)))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {textSharedTier}, {"remove [1]"}},
		},
		"a source that has stored nothing since leaves a tier to the other": {
			calls: []call{batch(store(1)), by2(batch(store(2))), batch(cleared()), batch(cleared()), by2(batch(cleared()))},
			want:  [][]string{{"store [1]"}, {"store [2]"}, {textSharedTier}, {textCleared}},
		},
		"an empty tier causes no gap": {
			calls: []call{batch(store(1)), by2(batch(store(2))), batch(remove(1, 2)), batch(cleared())},
			want:  [][]string{{"store [1]"}, {"store [2]"}, {"remove [1 2]"}},
		},
		"with on_gap clear what another has in a tier goes, too": {
			cfg: pipeline.Config{OnGap: pipeline.OnGapClear},
			calls: []call{
				batch(store(1), disk(store(5))), by2(batch(store(2), host(store(3)))), by2(restarted(0)), batch(remove(1)), restarted(0),
			},
			want: [][]string{
				{"store [1]", "DISK store [5]"}, {"store [2]", "HOST_PINNED store [3]"}, {"cleared [TIER_DEVICE TIER_HOST_PINNED] UNREPAIRED_GAP"},
				{"remove [1]"}, {textRestarted},
			},
		},
		"a clear of the last blocks leaves another source incomplete": {
			calls: []call{batch(store(1)), by2(gap(0)), batch(cleared()), by2(batch(cleared()))},
			want:  [][]string{{"store [1]"}, {textGap}, {"cleared [] UNREPAIRED_GAP"}, {textCleared}},
		},
		"a clear by a source that has used no tier is not one of all": {
			calls: []call{batch(store(1)), by2(batch(cleared(), remove(7))), by2(rankBatch(1, host(store(1)))), by2(batch(cleared())), batch(remove(1))},
			want:  [][]string{{"store [1]"}, {"remove [7]"}, {"rank 1 HOST_PINNED store [1]"}, {"remove [1]"}},
		},
		"a gap lets each block count once": {
			calls: []call{batch(store(1)), by2(batch(store(1))), gap(0), batch(remove(1))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {textGap}, {"remove [1]"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withSharing(t, test.cfg, feed.ConsolidatePassthrough, func(t *testing.T, s *subject) {
				if diff := cmp.Diff(test.want, describe(s.play(t, test.calls...))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				if got := s.metrics(t).By("kvcast_pipeline_consolidated_blocks", "worker"); got != nil {
					t.Errorf("blocks counted: got %v, want none", got)
				}
			})
		})
	}
}

// TestOneSourceIsNotConsolidated sets a consolidation mode for a single source, and sends
// events that name another source.
func TestOneSourceIsNotConsolidated(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		s.play(t, removed(), sharing(feed.ConsolidateDedup, feed.EngineVLLM))
		host := inTier(kvblock.TierHostPinned, store(1))
		got := describe(s.play(t, batch(host), by2(batch(host)), batch(cleared())))
		if diff := cmp.Diff([][]string{{"HOST_PINNED store [1]"}, {"HOST_PINNED store [1]"}, {textCleared}}, got); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
	})
}

// TestSharedRankIsIncompleteUntilItsSourcesAreKnown checks that a rank with several sources
// becomes complete only when each uncertain source has restarted and the rank is empty,
// which Cleared reports to routers.
func TestSharedRankIsIncompleteUntilItsSourcesAreKnown(t *testing.T) {
	stored := batch(store(1), store(2))
	tests := map[string]struct {
		mode  feed.Consolidate
		cfg   pipeline.Config
		calls []call
		want  bool
	}{
		"gap":                                      {calls: []call{gap(0)}, want: true},
		"gap and clear":                            {calls: []call{gap(0), batch(cleared())}},
		"gap and restart":                          {calls: []call{gap(0), restarted(0)}},
		"gap and another's clear":                  {calls: []call{gap(0), by2(batch(cleared()))}, want: true},
		"gaps and one clear":                       {calls: []call{gap(0), by2(gap(0)), batch(cleared())}, want: true},
		"gaps and two clears":                      {calls: []call{gap(0), by2(gap(0)), batch(cleared()), by2(batch(cleared()))}},
		"passed through: gap and clear":            {mode: feed.ConsolidatePassthrough, calls: []call{stored, gap(0), batch(cleared())}},
		"passed through: gap, other's clear":       {mode: feed.ConsolidatePassthrough, calls: []call{stored, gap(0), by2(batch(cleared()))}, want: true},
		"joined late":                              {calls: []call{joinedLate(0)}, want: true},
		"joined late and restart":                  {calls: []call{joinedLate(0), restarted(0)}},
		"joined late and another's restart":        {calls: []call{joinedLate(0), by2(restarted(0))}, want: true},
		"emptied for a gap":                        {cfg: pipeline.Config{OnGap: pipeline.OnGapClear}, calls: []call{gap(0), batch(cleared())}, want: true},
		"too many blocks":                          {cfg: pipeline.Config{MaxBlocksPerRank: 1}, calls: []call{stored, by2(batch(cleared()))}, want: true},
		"gap and clear, another source has blocks": {calls: []call{gap(0), by2(batch(store(7))), batch(cleared())}, want: true},
		"then that clears, too":                    {calls: []call{gap(0), by2(batch(store(7))), batch(cleared()), by2(batch(cleared()))}},
		"blocks refused, the others removed": {
			cfg: pipeline.Config{MaxBlocksPerRank: 1}, calls: []call{stored, batch(remove(1)), by2(batch(cleared()))}, want: true,
		},
		"passed through: a tier of two": {
			mode: feed.ConsolidatePassthrough, calls: []call{stored, by2(batch(store(3))), batch(cleared())}, want: true,
		},
		"passed through: a tier of two, and both clear": {
			mode: feed.ConsolidatePassthrough, calls: []call{stored, by2(batch(store(3))), batch(cleared()), by2(batch(cleared()))},
		},
		"too many blocks, then none": {cfg: pipeline.Config{MaxBlocksPerRank: 1}, calls: []call{stored, batch(cleared())}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withSharing(t, test.cfg, test.mode, func(t *testing.T, s *subject) {
				s.play(t, test.calls...)
				if got := s.ranks()[0].Reasons != 0; got != test.want {
					t.Errorf("incomplete: got %v, want %v", got, test.want)
				}
			})
		})
	}
}

// holders looks blocks up in all workers and tiers.
func (s *subject) holders(t harness.Fataler, q index.Lookup) []*kvcastv1.BlockHolder {
	t.Helper()
	q.Tiers, q.Alias = ^kvblock.Tiers(0), s.pipeline.Aliases
	found, err := s.journal.index.Holders(context.Background(), &q)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestLookupNamesTheSources(t *testing.T) {
	lookup := func(t *testing.T, s *subject) map[uint64][]string {
		t.Helper()
		found := s.holders(t, index.Lookup{Limit: 100, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{1003}})
		sources := make(map[uint64][]string)
		for _, h := range found {
			sources[h.GetBlockHash()] = h.GetSources()
			if h.GetTier() != kvcastv1.Tier_TIER_DEVICE {
				t.Errorf("tier of block %d: got %s, want the device", h.GetBlockHash(), h.GetTier())
			}
		}
		return sources
	}
	calls := []call{batch(store(1), store(2)), by2(batch(inTier(kvblock.TierDevice, named(store(2), 12)), named(store(3), 13))), batch(store(2), remove(2), remove(2))}
	tests := map[string]struct {
		add  call
		want map[uint64][]string
	}{
		"several engines":       {sharing("", feed.EngineVLLM, feed.EngineKVBM), map[uint64][]string{1: {"vllm"}, 2: {"kvbm"}, 13: {"kvbm"}}},
		"several of one engine": {sharing("", feed.EngineVLLM, feed.EngineVLLM, feed.EngineKVBM), map[uint64][]string{1: {"vllm[0]"}, 2: {"vllm[1]"}, 13: {"vllm[1]"}}},
		"passthrough":           {sharing(feed.ConsolidatePassthrough, feed.EngineVLLM, feed.EngineKVBM), map[uint64][]string{1: nil, 13: nil}},
		"one source":            {added(), map[uint64][]string{1: nil, 13: nil}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
				s.play(t, removed(), test.add)
				s.play(t, calls...)
				if diff := cmp.Diff(test.want, lookup(t, s)); diff != "" {
					t.Errorf("sources (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestLookupFindsABlockByAnyName looks blocks up by each source's current and former names,
// some of which are ambiguous.
func TestLookupFindsABlockByAnyName(t *testing.T) {
	calls := []call{
		batch(store(1, 2, 3)), by2(batch(named(store(1, 2), 11, 12))), batch(remove(2)),
		batch(named(store(9), 1)), // the first source's 1 is now another block
	}
	tests := map[string]struct {
		hashes []uint64
		limit  int
		want   map[uint64][]string
	}{
		"by the name that routers know":       {[]uint64{3}, 1, map[uint64][]string{3: {"vllm"}}},
		"by a second source's name":           {[]uint64{12}, 1, map[uint64][]string{2: {"kvbm"}}},
		"by a name that was released":         {[]uint64{2}, 1, map[uint64][]string{2: {"kvbm"}}},
		"by several names at once":            {[]uint64{12, 2, 12}, 1, map[uint64][]string{2: {"kvbm"}}},
		"by a name that means another block":  {[]uint64{1}, 1, map[uint64][]string{1: {"vllm"}}},
		"by the only name that is left of it": {[]uint64{11}, 1, map[uint64][]string{1: {"vllm", "kvbm"}}},
		"by what nobody calls a block":        {[]uint64{13, 99}, 1, map[uint64][]string{}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withSharing(t, pipeline.Config{}, "", func(t *testing.T, s *subject) {
				s.play(t, calls...)
				found := s.holders(t, index.Lookup{Limit: test.limit, BlockHashes: test.hashes})
				got := make(map[uint64][]string)
				for _, h := range found {
					got[h.GetBlockHash()] = append(got[h.GetBlockHash()], h.GetSources()...)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestConsolidationIsCounted(t *testing.T) {
	withSharing(t, pipeline.Config{MaxBlocksPerRank: 3}, "", func(t *testing.T, s *subject) {
		s.play(t,
			batch(store(1, 2, 3)), by2(batch(named(store(1, 2), 11, 12))), by2(rankBatch(1, store(5))),
			batch(remove(2)), batch(remove(2)), batch(remove(9, 10)), by2(batch(store(4))), gap(0), by2(batch(store(6))),
		)
		got := s.metrics(t)
		for metric, want := range map[string]struct {
			label  string
			values map[string]float64
		}{
			"consolidated_blocks":        {"dp_rank", map[string]float64{"0": 3, "1": 1}},
			"consolidated_names":         {"source", map[string]float64{"vllm": 2, "kvbm": 4}},
			"removes_ignored_total":      {"reason", map[string]float64{"unknown": 2, "not_held": 1}},
			"removes_suppressed_total":   {"worker", map[string]float64{testWorker: 1}},
			"blocks_refused_total":       {"worker", map[string]float64{testWorker: 1}},
			"stale_blocks_removed_total": {"worker", map[string]float64{testWorker: 1}},
		} {
			if diff := cmp.Diff(want.values, got.By("kvcast_pipeline_"+metric, want.label)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", metric, diff)
			}
		}
	})
}

// TestRunsOfSeveralSourcesMerge checks that a pending run of one source is merged with a store of
// another source, and that a restart ends a pending run.
func TestRunsOfSeveralSourcesMerge(t *testing.T) {
	withSharing(t, pipeline.Config{Timeout: time.Second}, "", func(t *testing.T, s *subject) {
		got := describe(s.play(t,
			batch(store(1)), by2(batch(named(store(1, 2), 11, 12))), batch(store(3)), restarted(0),
			by2(batch(remove(11))), by2(restarted(0)), pass(time.Minute),
		))
		want := [][]string{{"store [1 12]"}, {"store [3]"}, {"remove [3]"}, {"remove [1]"}, {textSourceCleared}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
	})
}

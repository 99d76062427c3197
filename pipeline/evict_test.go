package pipeline_test

import (
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

var removedHashes = regexp.MustCompile(`remove \[(.*)\]$`)

// textEvictions describes entries with the tiers of their Gaps, and the number of blocks of each remove: which blocks are evicted
// is unspecified.
func textEvictions(entries []*kvcastv1.Entry) [][]string {
	all := textDoubts(entries)
	for _, events := range all {
		for i, text := range events {
			if m := removedHashes.FindStringSubmatch(text); m != nil {
				events[i] = fmt.Sprintf("%s%d", text[:len(text)-len(m[1])-2], len(strings.Fields(m[1])))
			}
		}
	}
	return all
}

func onHost(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
func onDisk(e wire.Event) wire.Event { return inTier(kvblock.TierDisk, e) }

const textHostGap = "gap TOO_MANY_BLOCKS HOST_PINNED"

// TestLowerTiersMakeRoom fills a limit with blocks of lower tiers. Entries of another worker are those without its addition.
func TestLowerTiersMakeRoom(t *testing.T) {
	other := func(c call) call { return of("other", c) }
	tests := map[string]struct {
		limit int64
		rank  int              // limit of a dp rank
		mode  feed.Consolidate // for two sources; empty for one
		calls []call
		want  [][]string
		other [][]string
		used  int64
	}{
		"of another worker": {
			limit: 4, calls: []call{other(batch(onHost(store(1, 2, 3, 4)))), batch(store(1, 2)), batch(store(3))},
			want:  [][]string{{"store [1 2]"}, {"store [3]"}},
			other: [][]string{{"HOST_PINNED store [1 2 3 4]"}, {"HOST_PINNED remove 2", textHostGap}, {"HOST_PINNED remove 1"}}, used: 4,
		},
		"of the worker itself": {
			limit: 4, calls: []call{batch(onDisk(store(1, 2, 3, 4))), batch(store(1, 2)), batch(onDisk(store(7)))},
			want: [][]string{
				{"DISK store [1 2 3 4]"}, {"DISK remove 2", "gap TOO_MANY_BLOCKS DISK", "store [1 2]"}, {"DISK remove 1", "DISK store [7]"},
			},
			used: 4,
		},
		"of the largest holder": {
			limit: 5, calls: []call{batch(onHost(store(1, 2))), other(batch(onDisk(store(1, 2, 3)))), batch(onHost(store(3)))},
			want:  [][]string{{"HOST_PINNED store [1 2]"}, {"HOST_PINNED store [3]"}},
			other: [][]string{{"DISK store [1 2 3]"}, {"DISK remove 1", "gap TOO_MANY_BLOCKS DISK"}}, used: 5,
		},
		"of all holders": {
			limit: 4, calls: []call{batch(onHost(store(1))), other(batch(onDisk(store(1, 2, 3)))), batch(store(1, 2, 3, 4))},
			want:  [][]string{{"HOST_PINNED store [1]"}, {"HOST_PINNED remove 1", textHostGap, "store [1 2 3 4]"}},
			other: [][]string{{"DISK store [1 2 3]"}, {"DISK remove 3", "gap TOO_MANY_BLOCKS DISK"}}, used: 4,
		},
		"not device memory": {
			limit: 4, calls: []call{other(batch(store(1, 2, 3), onHost(store(1)))), batch(store(1, 2)), batch(onHost(store(1)))},
			want:  [][]string{{"store [1]", "gap TOO_MANY_BLOCKS DEVICE"}, {textHostGap}},
			other: [][]string{{"store [1 2 3]", "HOST_PINNED store [1]"}, {"HOST_PINNED remove 1", textHostGap}}, used: 4,
		},
		"only for what is new": {
			limit: 4, calls: []call{batch(store(1, 2), onHost(store(1, 2))), batch(store(1, 2)), batch(onHost(store(1)), onHost(store(1, 2)))},
			want: [][]string{{"store [1 2]", "HOST_PINNED store [1 2]"}, {"store [1 2]"}, {"HOST_PINNED store [1]", "HOST_PINNED store [1 2]"}}, used: 4,
		},
		"but no block that is stored again": {
			limit: 4, calls: []call{batch(onHost(store(1, 2, 3, 4))), batch(onHost(store(2, 3, 9, 8)))},
			want: [][]string{{"HOST_PINNED store [1 2 3 4]"}, {"HOST_PINNED remove 2", textHostGap, "HOST_PINNED store [2 3 9 8]"}}, used: 4,
		},
		"stale blocks of the dp rank leave first": {
			limit: 4, calls: []call{batch(store(1)), gap(0), other(batch(onHost(store(1, 2, 3)))), batch(store(2, 3))},
			want:  [][]string{{"store [1]"}, {textGapTiers}, {"store [2 3]", "remove 1"}},
			other: [][]string{{"HOST_PINNED store [1 2 3]"}, {"HOST_PINNED remove 1", textHostGap}}, used: 4,
		},
		"after a clear it is reported again": {
			limit: 2, calls: []call{
				other(batch(onHost(store(1, 2)))), batch(store(1)), other(batch(cleared())), other(batch(onHost(store(1)))), batch(store(2)),
			},
			want: [][]string{{"store [1]"}, {"store [2]"}},
			other: [][]string{
				{"HOST_PINNED store [1 2]"}, {"HOST_PINNED remove 1", textHostGap}, {"cleared [TIER_HOST_PINNED] ENGINE_CLEARED", textCleared}, {"HOST_PINNED store [1]"}, {"HOST_PINNED remove 1", textHostGap},
			}, used: 2,
		},
		"of a full dp rank": {
			rank: 4, calls: []call{batch(store(1), onHost(store(1, 2, 3))), batch(store(2, 3)), batch(onHost(store(7))), batch(store(4, 5))},
			want: [][]string{
				{"store [1]", "HOST_PINNED store [1 2 3]"}, {"HOST_PINNED remove 2", textHostGap, "store [2 3]"},
				{"HOST_PINNED remove 1", "HOST_PINNED store [7]"}, {"HOST_PINNED remove 1", "store [4]", "gap TOO_MANY_BLOCKS DEVICE"},
			},
		},
		"of the largest tier of a full dp rank": {
			rank: 4, calls: []call{batch(onHost(store(1)), onDisk(store(1, 2, 3))), batch(store(1, 2))},
			want: [][]string{{"HOST_PINNED store [1]", "DISK store [1 2 3]"}, {"DISK remove 2", "gap TOO_MANY_BLOCKS DISK", "store [1 2]"}},
		},
		"of another dp rank only for the limit of all workers": {
			rank: 2, calls: []call{rankBatch(1, onHost(store(1, 2))), batch(store(1, 2, 3))},
			want: [][]string{{"rank 1 HOST_PINNED store [1 2]"}, {"store [1 2]", "gap TOO_MANY_BLOCKS DEVICE"}},
		},
		"for deduplicated sources": {
			limit: 4, mode: feed.ConsolidateDedup, calls: []call{other(batch(onHost(store(1, 2, 3)))), batch(store(1)), batch(store(2))},
			want:  [][]string{{"store [1]"}, {textTooManyAllTiers}},
			other: [][]string{{"HOST_PINNED store [1 2 3]"}, {"HOST_PINNED remove 3", textHostGap}}, used: 3,
		},
		"of sources that are passed through": {
			limit: 3, mode: feed.ConsolidatePassthrough, calls: []call{by2(batch(onDisk(store(1, 2, 3)))), batch(store(1))},
			want: [][]string{{"DISK store [1 2 3]"}, {"DISK remove 1", "gap TOO_MANY_BLOCKS DISK", "store [1]"}}, used: 3,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := pipeline.Config{MaxBlocksPerRank: test.rank, Blocks: budget.New("blocks", test.limit)}
			withWorker(t, cfg, func(t *testing.T, s *subject) {
				if test.mode != "" {
					s.play(t, removed(), sharing(test.mode, feed.EngineVLLM, feed.EngineKVBM))
				}
				call{Worker: "other", Add: &feed.Worker{Name: "other"}}.on(s)
				got := textEvictions(s.play(t, test.calls...))
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(append([][]string{{"added"}}, test.other...), textEvictions(s.journal.all()["other"])); diff != "" {
					t.Errorf("entries of the other worker (-want +got):\n%s", diff)
				}
				if used := cfg.Blocks.Used(); test.limit > 0 && used != test.used {
					t.Errorf("blocks that are accounted for: got %d, want %d", used, test.used)
				}
			})
		})
	}
}

// TestLimitsAreLogged checks that lines name the limit and the worker whose blocks are evicted or refused.
func TestLimitsAreLogged(t *testing.T) {
	var log harness.Log
	cfg := pipeline.Config{MaxBlocksPerRank: 3, Blocks: budget.New("blocks", 4), AttributeBytes: budget.New("attribute_bytes", 1), Logger: log.Logger()}
	withWorker(t, cfg, func(t *testing.T, s *subject) {
		call{Worker: "other", Add: &feed.Worker{Name: "other"}}.on(s)
		s.play(t, of("other", batch(onHost(store(1, 2, 3)))), batch(store(1, 2)), batch(store(3)), batch(store(4, 5)), batch(store(6)), batch(withLoRA("a", store(7))))
		s.play(t, of("other", rankBatch(1, store(1, 2))))
		if n := strings.Count(log.String(), "\n"); n != 6 {
			t.Errorf("%d lines, want 6:\n%s", n, log.String())
		}
	})
	log.Want(t,
		`level=WARN msg="blocks of a lower tier evicted" worker=other rank=0 tiers=host_pinned blocks=2 limit=ingest.max_blocks value=4 `+
			`hint="raise the limit, unless the tier is one that the engine never removes blocks from"`,
		`level=WARN msg="blocks refused" worker=w rank=0 tiers=device blocks=2 limit=ingest.max_blocks_per_rank value=3 `+
			`hint="raise the limit; or does the engine report stores without the removes?"`,
		`level=WARN msg="blocks refused" worker=w rank=0 tiers=device blocks=1 limit=ingest.max_blocks_per_rank value=3 `+
			`hint="raise the limit; or does the engine report stores without the removes?"`,
		`level=WARN msg="blocks of a lower tier evicted" worker=other rank=0 tiers=host_pinned blocks=1 limit=ingest.max_blocks value=4 `+
			`hint="raise the limit, unless the tier is one that the engine never removes blocks from"`,
		`level=WARN msg="blocks refused" worker=w rank=0 tiers=device blocks=1 limit=ingest.max_attribute_bytes value=1 `+
			`hint="raise the limit; or does the engine report stores without the removes?"`,
		`level=WARN msg="blocks refused" worker=other rank=1 tiers=device blocks=1 limit=ingest.max_blocks value=4 `+
			`hint="raise the limit; or does the engine report stores without the removes?"`,
	)
}

const (
	textGapTiers        = "gap REPLAY_FORGOTTEN"
	textTooManyAllTiers = "gap TOO_MANY_BLOCKS"
)

// TestSharedStorageLeavesRoomForDevices stores blocks of workers concurrently: one never removes its blocks of external storage,
// the others replace their blocks in device memory. No block in device memory is refused.
func TestSharedStorageLeavesRoomForDevices(t *testing.T) {
	const limit, devices, each = 4096, 3, 500
	const window = 40 // batches of a device; those of all need less than what a busy worker may owe
	cfg := pipeline.Config{Blocks: budget.New("blocks", limit)}
	s, err := newSubject(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	storage := s.pipeline.AddWorker(feed.Worker{Name: "storage"})
	fill := func(from uint64) {
		for i := range uint64(200) {
			var hashes []uint64
			for k := range uint64(100) {
				hashes = append(hashes, from+100*i+k)
			}
			storage.Batch(batch(inTier(kvblock.TierExternal, store(hashes...))).Batch)
		}
	}
	fill(0)
	group.Go(func() { fill(1 << 20) })
	for w := range devices {
		worker := feed.Worker{Name: fmt.Sprint("w", w)}
		if w == 1 {
			worker.Sources = []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}
		}
		lane := s.pipeline.AddWorker(worker)
		group.Go(func() {
			for i := range uint64(each) {
				lane.Batch(batch(store(4*i, 4*i+1, 4*i+2, 4*i+3)).Batch)
				if i >= window {
					lane.Batch(batch(remove(4*(i-window), 4*(i-window)+1, 4*(i-window)+2, 4*(i-window)+3)).Batch)
				}
			}
		})
	}
	group.Wait()
	storage.Batch(batch().Batch) // pays what it owes
	if used := cfg.Blocks.Used(); used > limit {
		t.Errorf("blocks that are accounted for: got %d, want at most %d", used, limit)
	}
	metrics := s.metrics(t)
	for w := range devices {
		name := fmt.Sprint("w", w)
		if n := metrics.By("kvcast_pipeline_blocks_refused_total", "worker")[name]; n != 0 {
			t.Errorf("blocks of %s that are refused: got %v, want none", name, n)
		}
		if n := metrics.By("kvcast_pipeline_blocks_stored_total", "worker")[name]; n != 4*each {
			t.Errorf("blocks of %s that are stored: got %v, want %v", name, n, 4*each)
		}
	}
	held := make(map[string]uint64)
	for at, blocks := range s.tables() {
		held[at.worker] += uint64(len(blocks))
	}
	for name, n := range held {
		if got := s.blocks(name); got != n {
			t.Errorf("blocks of %s in the index: got %d, want %d", name, got, n)
		}
	}
}

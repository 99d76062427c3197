package pipeline_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/pipeline"
)

const (
	textTooMany     = "gap TOO_MANY_BLOCKS 0: 0-0"
	textTooManyAttr = "gap TOO_MANY_ATTRIBUTES 0: 0-0"
)

// of returns the call, made for another worker.
func of(worker string, c call) call {
	c.Worker = worker
	return c
}

// TestBlocksOfAllWorkersAreBounded fills part of the budget with another worker's blocks.
func TestBlocksOfAllWorkersAreBounded(t *testing.T) {
	other := func(c call) call { return of("other", c) }
	tests := map[string]struct {
		limit int64
		mode  feed.Consolidate // for two sources; empty for one
		cfg   pipeline.Config
		calls []call
		want  [][]string
		used  int64
	}{
		"a block beyond the limit is refused, which is reported once": {
			limit: 4, calls: []call{other(batch(store(1, 2))), batch(store(1, 2, 3, 4)), batch(store(5))},
			want: [][]string{{"store [1 2]", textTooMany}}, used: 4,
		},
		"stored blocks pass": {
			limit: 4, calls: []call{other(batch(store(1, 2))), batch(store(1, 2)), batch(store(2, 3, 1))},
			want: [][]string{{"store [1 2]"}, {"store [2]", "store [1] after 3", textTooMany}}, used: 4,
		},
		"a second copy takes nothing": {
			limit: 4, calls: []call{batch(store(1)), batch(store(1)), batch(store(1)), batch(store(1)), batch(store(2, 3, 4))},
			want: [][]string{{"store [1]"}, {"store [1]"}, {"store [1]"}, {"store [1]"}, {"store [2 3 4]"}}, used: 4,
		},
		"what another worker removes is free": {
			limit: 2, calls: []call{other(batch(store(1, 2))), batch(store(1)), other(batch(remove(1, 2, 9))), batch(store(3, 4, 5))},
			want: [][]string{{textTooMany}, {"store [3 4]"}}, used: 2,
		},
		"so is what a clear empties": {
			limit: 2, calls: []call{other(batch(store(1, 2))), other(batch(cleared())), batch(store(3, 4))},
			want: [][]string{{"store [3 4]"}}, used: 2,
		},
		"removed workers release their blocks": {
			limit: 2, calls: []call{other(batch(store(1, 2))), other(removed()), batch(store(3, 4))},
			want: [][]string{{"store [3 4]"}}, used: 2,
		},
		"after a gap the rank's own old blocks make room": {
			limit: 2, calls: []call{other(batch(store(1))), batch(store(1)), gap(0), batch(store(3, 4))},
			want: [][]string{{"store [1]"}, {textGap}, {"store [3]", "remove [1]", textTooMany}}, used: 2,
		},
		"one that leaves for a block in a full rank is the one that makes room": {
			limit: 2, cfg: pipeline.Config{MaxBlocksPerRank: 1},
			calls: []call{batch(store(1)), gap(0), other(batch(store(1))), batch(store(2))},
			want:  [][]string{{"store [1]"}, {textGap}, {"store [2]", "remove [1]"}}, used: 2,
		},
		"one that leaves a full rank is free": {
			limit: 3, cfg: pipeline.Config{MaxBlocksPerRank: 1},
			calls: []call{batch(store(1)), gap(0), other(batch(store(1))), batch(store(2))},
			want:  [][]string{{"store [1]"}, {textGap}, {"store [2]", "remove [1]"}}, used: 2,
		},
		"of two sources a block takes more, and a name too": {
			limit: 7, mode: feed.ConsolidateDedup, calls: []call{batch(store(1, 2)), by2(batch(named(store(1, 2), 11, 12)))},
			want: [][]string{{"store [1 2]"}, {textTooMany}}, used: 7,
		},
		"what the last source removes is free": {
			limit: 4, mode: feed.ConsolidateDedup, calls: []call{batch(store(1)), by2(batch(named(store(1), 11))), batch(remove(1)), by2(batch(remove(11))), batch(store(2))},
			want: [][]string{{"store [1]"}, {"remove [1]"}, {"store [2]"}}, used: 3,
		},
		"what sources clear is free": {
			limit: 4, mode: feed.ConsolidateDedup, calls: []call{batch(store(1)), by2(batch(named(store(1), 11))), batch(cleared()), by2(batch(cleared())), batch(store(2))},
			want: [][]string{{"store [1]"}, {textSourceCleared}, {"store [2]"}}, used: 3,
		},
		"a clear of one source frees the blocks that no other source has": {
			limit: 9, mode: feed.ConsolidateDedup, calls: []call{batch(store(1, 2)), by2(batch(store(3))), batch(cleared())},
			want: [][]string{{"store [1 2]"}, {"store [3]"}, {"remove [1 2]"}}, used: 3,
		},
		"so is what is emptied for a gap": {
			limit: 4, mode: feed.ConsolidateDedup, cfg: pipeline.Config{OnGap: pipeline.OnGapClear},
			calls: []call{batch(store(1)), by2(batch(named(store(1), 11))), gap(0), batch(store(2))},
			want:  [][]string{{"store [1]"}, {"cleared [] UNREPAIRED_GAP"}, {"store [2]"}}, used: 3,
		},
		"a stale block is removed to make room": {
			limit: 6, mode: feed.ConsolidateDedup, calls: []call{batch(store(1)), batch(store(2)), gap(0), batch(store(3)), by2(batch(store(4))), by2(batch(store(5)))},
			want: [][]string{{"store [1]"}, {"store [2]"}, {textGap}, {"remove [1]", "store [3]"}, {"remove [2]", "store [4]"}, {textTooMany}}, used: 6,
		},
		"passed through, each source's blocks take one": {
			limit: 2, mode: feed.ConsolidatePassthrough,
			calls: []call{batch(store(1)), by2(batch(inTier(kvblock.TierDisk, store(1)))), batch(store(2)), by2(batch(cleared())), batch(store(3))},
			want: [][]string{
				{"store [1]"}, {"DISK store [1]"}, {"DISK remove [1]", textTooMany, "store [2]"}, {"cleared [TIER_DISK] ENGINE_CLEARED"}, {textTooMany},
			}, used: 2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.cfg.Blocks = budget.New("blocks", test.limit)
			withWorker(t, test.cfg, func(t *testing.T, s *subject) {
				if test.mode != "" {
					s.play(t, removed(), sharing(test.mode, feed.EngineVLLM, feed.EngineKVBM))
				}
				call{Worker: "other", Add: &feed.Worker{Name: "other"}}.on(s)
				if diff := cmp.Diff(test.want, describe(s.play(t, test.calls...))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				if got := test.cfg.Blocks.Used(); got != test.used {
					t.Errorf("blocks that are accounted for: got %d, want %d", got, test.used)
				}
			})
		})
	}
}

// TestAttributesOfAllWorkersAreBounded has a budget for two adapter names.
func TestAttributesOfAllWorkersAreBounded(t *testing.T) {
	const oneName = 16 + 160 // its bytes, and its slot
	other := func(c call) call { return of("other", c) }
	both := []call{batch(withLoRA("a", store(1))), other(batch(withLoRA("a", store(1))))}
	tests := map[string]struct {
		mode  feed.Consolidate // for two sources; empty for one
		calls []call
		want  [][]string
		used  int64
	}{
		"an adapter beyond the limit is refused, which is reported once": {
			calls: append(both, batch(withLoRA("b", store(2, 3))), batch(withLoRA("c", store(4)))),
			want:  [][]string{{`store [1] lora "a"`}, {textTooManyAttr}}, used: 2 * oneName,
		},
		"one that is known passes, and so does the base model": {
			calls: append(both, batch(withLoRA("a", store(2))), batch(store(3))),
			want:  [][]string{{`store [1] lora "a"`}, {`store [2] lora "a"`}, {"store [3]"}}, used: 2 * oneName,
		},
		"what another worker removes is free": {
			calls: append(both, other(batch(remove(1))), batch(withLoRA("b", store(2)))),
			want:  [][]string{{`store [1] lora "a"`}, {`store [2] lora "b"`}}, used: 2 * oneName,
		},
		"so is what a worker had that is gone": {
			calls: append(both, other(removed()), batch(withLoRA("b", store(2)))),
			want:  [][]string{{`store [1] lora "a"`}, {`store [2] lora "b"`}}, used: 2 * oneName,
		},
		"so is what a clear empties": {
			calls: append(both, batch(cleared()), batch(withLoRA("b", store(2)))),
			want:  [][]string{{`store [1] lora "a"`}, {textCleared}, {`store [2] lora "b"`}}, used: 2 * oneName,
		},
		"a refusal after a clear is reported again": {
			calls: append(both, batch(withLoRA("b", store(2))), batch(cleared()), batch(withLoRA("b", store(2))), batch(withLoRA("c", store(3)))),
			want:  [][]string{{`store [1] lora "a"`}, {textTooManyAttr}, {textCleared}, {`store [2] lora "b"`}, {textTooManyAttr}}, used: 2 * oneName,
		},
		"the slot stays until the last name has gone": {
			calls: []call{batch(withLoRA("a", store(1))), batch(withLoRA("b", store(2))), batch(remove(2))},
			want:  [][]string{{`store [1] lora "a"`}, {`store [2] lora "b"`}, {"remove [2]"}}, used: 2*oneName - 16,
		},
		"a slot is used again": {
			calls: []call{batch(withLoRA("a", store(1))), batch(withLoRA("b", store(2))), batch(remove(2)), batch(withLoRA("c", store(3)))},
			want:  [][]string{{`store [1] lora "a"`}, {`store [2] lora "b"`}, {"remove [2]"}, {`store [3] lora "c"`}}, used: 2 * oneName,
		},
		"consolidated sources use an attribute for emitted blocks and one for salts": {
			mode:  feed.ConsolidateDedup,
			calls: []call{batch(withLoRA("a", store(1))), batch(withSalt("b", store(2))), by2(batch(store(3))), batch(remove(1))},
			want:  [][]string{{`store [1] lora "a"`}, {textTooManyAttr}, {"store [3]"}, {"remove [1]"}}, used: 2 * 160,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := pipeline.Config{AttributeBytes: budget.New("attribute_bytes", 2*oneName)}
			withWorker(t, cfg, func(t *testing.T, s *subject) {
				if test.mode != "" {
					s.play(t, removed(), sharing(test.mode, feed.EngineVLLM, feed.EngineKVBM))
				}
				call{Worker: "other", Add: &feed.Worker{Name: "other"}}.on(s)
				if diff := cmp.Diff(test.want, describe(s.play(t, test.calls...))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				if got := cfg.AttributeBytes.Used(); got != test.used {
					t.Errorf("bytes that are accounted for: got %d, want %d", got, test.used)
				}
			})
		})
	}
}

func TestRefusedBlocksAreCountedByReason(t *testing.T) {
	cfg := pipeline.Config{MaxBlocksPerRank: 2, Blocks: budget.New("blocks", 4), AttributeBytes: budget.New("attribute_bytes", 1)}
	withWorker(t, cfg, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1, 2, 3)), rankBatch(1, withLoRA("a", store(1, 2))), rankBatch(2, store(1, 2)), rankBatch(3, store(1, 2, 3)))
		want := map[string]float64{"rank": 1, "attributes": 2, "total": 3}
		if diff := cmp.Diff(want, s.metrics(t).By("kvcast_pipeline_blocks_refused_total", "reason")); diff != "" {
			t.Errorf("blocks left out (-want +got):\n%s", diff)
		}
	})
}

// TestBudgetsAreReleasedCompletely adds and removes workers at random, with small budgets.
func TestBudgetsAreReleasedCompletely(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		cfg.Blocks = budget.New("blocks", rapid.SampledFrom([]int64{0, 4, 9, 16, 30}).Draw(t, "blocks"))
		cfg.AttributeBytes = budget.New("attribute_bytes", rapid.SampledFrom([]int64{0, 200, 400, 1000}).Draw(t, "attribute bytes"))
		s, err := newSubject(cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range drawCalls(t, false, true) {
			if c.Close {
				continue
			}
			c.on(s)
			for _, b := range []*budget.Budget{cfg.Blocks, cfg.AttributeBytes} {
				if n := b.Used(); n < 0 || b.Limit() > 0 && n > b.Limit() {
					t.Fatalf("accounted for: got %d, want 0 to %d", n, b.Limit())
				}
			}
		}
		for name := range s.lanes {
			s.remove(name, feed.RemovedDiscovery)
		}
		if blocks, bytes := cfg.Blocks.Used(), cfg.AttributeBytes.Used(); blocks != 0 || bytes != 0 {
			t.Errorf("accounted for without workers: got %d blocks and %d bytes, want none", blocks, bytes)
		}
		if n := s.pipeline.LowerBlocks(); n != 0 {
			t.Errorf("blocks in lower tiers without workers: got %d, want none", n)
		}
	})
}

// TestConcurrentWorkersShareTheBudget reserves and releases blocks concurrently.
func TestConcurrentWorkersShareTheBudget(t *testing.T) {
	const limit = 40
	cfg := pipeline.Config{Blocks: budget.New("blocks", limit)}
	s, err := newSubject(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for w := range 4 {
		worker := feed.Worker{Name: fmt.Sprint("w", w)}
		if w%2 == 1 {
			worker.Sources = []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}
		}
		lane := s.pipeline.AddWorker(worker)
		group.Go(func() {
			for i := range uint64(200) {
				lane.Batch(batch(store(i, i+1, i+2, i+3)).Batch)
				if used := cfg.Blocks.Used(); used < 0 {
					t.Errorf("blocks that are accounted for: got %d", used)
				}
				if i%3 == 0 {
					lane.Batch(batch(remove(i, i+1, i+2)).Batch)
				}
			}
			s.pipeline.RemoveWorker(worker.Name, feed.RemovedDiscovery)
		})
	}
	group.Wait()
	if got := cfg.Blocks.Used(); got != 0 {
		t.Errorf("blocks that are accounted for without workers: got %d, want 0", got)
	}
}

// TestMemoryOfAttributesIsWithinItsBudget compares the accounted bytes with the heap, for
// tables and for consolidated sources.
func TestMemoryOfAttributesIsWithinItsBudget(t *testing.T) {
	testclass.WithoutRace(t)
	for _, length := range []int{8, 100, 1000} {
		for _, sources := range []int{1, 2} {
			t.Run(fmt.Sprintf("names of %d bytes, %d sources", length, sources), func(t *testing.T) {
				const names = 30_000
				measure := func(distinct int) (bytes uint64, counted int64) {
					cfg := pipeline.Config{AttributeBytes: budget.New("attribute_bytes", 0)}
					p, err := pipeline.New(cfg, &nowhere{})
					if err != nil {
						t.Fatal(err)
					}
					lane := p.AddWorker(feed.Worker{Name: "w", Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}[:sources]})
					before := heap()
					for i := range names {
						lora := fmt.Sprintf("%0*d", length, i%distinct)
						lane.Batch(batch(withLoRA(strings.Clone(lora), store(uint64(i)))).Batch)
					}
					bytes = heap() - before
					runtime.KeepAlive(lane)
					return bytes, cfg.AttributeBytes.Used()
				}
				base, _ := measure(1)
				all, counted := measure(names)
				if bytes := int64(all - base); counted < bytes/2 || counted > bytes*2 {
					t.Errorf("accounted for: got %d bytes, want about %d", counted, bytes)
				} else {
					t.Logf("accounted for %d bytes, took %d", counted, bytes)
				}
			})
		}
	}
}

// TestOneAddressLeavesBlocksToOthers has workers that an address names store all that they can. Others can store the blocks that are left to
// them, and lose no blocks of lower tiers.
func TestOneAddressLeavesBlocksToOthers(t *testing.T) {
	const limit = 80
	blocks := budget.New("blocks", limit)
	s, err := newSubject(pipeline.Config{Blocks: blocks})
	if err != nil {
		t.Fatal(err)
	}
	add := func(name, peer string) {
		w := feed.Worker{Name: name}
		if peer != "" {
			w.Peer = netip.MustParseAddr(peer)
		}
		s.add(w)
	}
	wantUsed := func(want int64) {
		t.Helper()
		if got := blocks.Used(); got != want {
			t.Errorf("%d blocks are reserved, want %d", got, want)
		}
	}
	storeIn := func(name string, tier kvblock.Tier, n uint64) {
		for hash := range n {
			s.batch(name, *batch(inTier(tier, store(hash+1))).Batch)
		}
	}
	add("honest", "192.0.2.1")
	add("configured", "")
	add("greedy 1", "192.0.2.9")
	add("greedy 2", "192.0.2.9")
	storeIn("honest", kvblock.TierHostPinned, 3)
	storeIn("configured", kvblock.TierHostPinned, 3)
	storeIn("greedy 1", kvblock.TierDevice, limit)
	storeIn("greedy 2", kvblock.TierDevice, limit)
	wantUsed(71) // 6, and 65, which is seven times what is left
	storeIn("honest", kvblock.TierDevice, 5)
	storeIn("configured", kvblock.TierDevice, 4)
	wantUsed(limit)
	for name, want := range map[string]uint64{"honest": 8, "configured": 7} {
		if got := s.blocks(name); got != want {
			t.Errorf("%s holds %d blocks, want %d", name, got, want)
		}
	}
	s.pipeline.RemoveWorker("greedy 1", feed.RemovedDeregistered)
	s.pipeline.RemoveWorker("greedy 2", feed.RemovedDeregistered)
	wantUsed(15)
}

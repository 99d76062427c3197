package pipeline_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

// TestFlush covers each flush reason alone. Time stands still, so that only the rule under
// test ends a run.
func TestFlush(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	tests := map[string]struct {
		cfg   pipeline.Config
		calls []call
		// flushed are the events emitted by the calls, left those still pending afterwards.
		flushed [][]string
		left    [][]string
		// why counts the flushes by reason, without the flush of left.
		why map[string]float64
	}{
		"a store that continues the last one joins it": {
			calls: []call{batch(store(1, 2), after(2, store(3)))},
			left:  [][]string{{"store [1 2 3]"}},
		},
		"a store joins that of an earlier batch": {
			calls: []call{batch(after(9, store(1, 2))), batch(after(2, store(3))), batch(after(3, store(4)))},
			left:  [][]string{{"store [1 2 3 4] after 9"}},
		},
		"a store with the same attributes joins": {
			calls: []call{batch(
				host(withLoRA("a", withSalt("s", withBlockSize(4, hashOnly(store(1)))))),
				host(withLoRA("a", withSalt("s", withBlockSize(4, hashOnly(after(1, store(2))))))),
			)},
			left: [][]string{{`HOST_PINNED store [1 2] lora "a" block size 4 hash only`}},
		},
		"removes join": {
			calls: []call{rankBatch(3, host(remove(1)), host(remove(2, 3))), rankBatch(3, host(remove(4)))},
			left:  [][]string{{"rank 3 HOST_PINNED remove [1 2 3 4]"}},
		},
		"a remove ends a run of stores": {
			calls:   []call{batch(store(1), remove(2))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"remove [2]"}},
			why:     map[string]float64{"kind": 1},
		},
		"a store ends a run of removes": {
			calls:   []call{batch(remove(2), store(1))},
			flushed: [][]string{{"remove [2]"}},
			left:    [][]string{{"store [1]"}},
			why:     map[string]float64{"kind": 1},
		},
		"another rank ends a run of stores": {
			calls:   []call{batch(store(1)), rankBatch(1, after(1, store(2)))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"rank 1 store [2] after 1"}},
			why:     map[string]float64{"dp_rank": 1},
		},
		"another rank ends a run of removes": {
			calls:   []call{batch(remove(1)), rankBatch(1, remove(2))},
			flushed: [][]string{{"remove [1]"}},
			left:    [][]string{{"rank 1 remove [2]"}},
			why:     map[string]float64{"dp_rank": 1},
		},
		"another tier ends a run of stores": {
			calls:   []call{batch(store(1), host(after(1, store(2))))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"HOST_PINNED store [2] after 1"}},
			why:     map[string]float64{"tier": 1},
		},
		"another tier ends a run of removes": {
			calls:   []call{batch(remove(1), host(remove(2)))},
			flushed: [][]string{{"remove [1]"}},
			left:    [][]string{{"HOST_PINNED remove [2]"}},
			why:     map[string]float64{"tier": 1},
		},
		"another LoRA ends a run": {
			calls:   []call{batch(withLoRA("a", store(1)), withLoRA("b", after(1, store(2))))},
			flushed: [][]string{{`store [1] lora "a"`}},
			left:    [][]string{{`store [2] after 1 lora "b"`}},
			why:     map[string]float64{"lora": 1},
		},
		"the base model ends a run of a LoRA": {
			calls:   []call{batch(withLoRA("a", store(1)), after(1, store(2)))},
			flushed: [][]string{{`store [1] lora "a"`}},
			left:    [][]string{{"store [2] after 1"}},
			why:     map[string]float64{"lora": 1},
		},
		"another salt ends a run": {
			calls:   []call{batch(withSalt("a", store(1)), withSalt("b", after(1, store(2))))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"store [2] after 1"}},
			why:     map[string]float64{"salt": 1},
		},
		"another session ends a run, if it is emitted": {
			cfg:     pipeline.Config{EmitSessionIDs: true},
			calls:   []call{batch(withNote("a", store(1)), withNote("a", after(1, store(2))), withNote("b", after(2, store(3))))},
			flushed: [][]string{{`store [1 2] session "a"`}},
			left:    [][]string{{`store [3] after 2 session "b"`}},
			why:     map[string]float64{"note": 1},
		},
		"another reason ends a run, if it is emitted": {
			cfg:     pipeline.Config{EmitReasons: true},
			calls:   []call{batch(withNote("s", store(1, 2, 3))), batch(withNote("eviction", remove(1, 2)), withNote("demotion", remove(3)))},
			flushed: [][]string{{"store [1 2 3]", `remove [1 2] because of "eviction"`}},
			left:    [][]string{{`remove [3] because of "demotion"`}},
			why:     map[string]float64{"kind": 1, "note": 1},
		},
		"sessions and reasons that are not emitted make no difference": {
			calls:   []call{batch(withNote("a", store(1)), withNote("b", after(1, store(2)))), batch(withNote("eviction", remove(1)), remove(2))},
			flushed: [][]string{{"store [1 2]"}},
			left:    [][]string{{"remove [1 2]"}},
			why:     map[string]float64{"kind": 1},
		},
		"a session that is too long is not emitted": {
			cfg:   pipeline.Config{EmitSessionIDs: true, EmitReasons: true},
			calls: []call{batch(withNote(strings.Repeat("s", 257), store(1)), after(1, store(2)))},
			left:  [][]string{{"store [1 2]"}},
		},
		"another block size ends a run": {
			calls:   []call{batch(store(1), withBlockSize(32, after(1, store(2))))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"store [2] after 1 block size 32"}},
			why:     map[string]float64{"block_size": 1},
		},
		"a hash-only store ends a run of full ones": {
			calls:   []call{batch(store(1), hashOnly(after(1, store(2))))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"store [2] after 1 hash only"}},
			why:     map[string]float64{"hash_only": 1},
		},
		"a full store ends a run of hash-only ones": {
			calls:   []call{batch(hashOnly(store(1)), after(1, store(2)))},
			flushed: [][]string{{"store [1] hash only"}},
			left:    [][]string{{"store [2] after 1"}},
			why:     map[string]float64{"hash_only": 1},
		},
		"a store without tokens ends a run with tokens": {
			cfg:     pipeline.Config{EmitTokenIDs: true},
			calls:   []call{batch(withTokens(16, store(1)), after(1, store(2)))},
			flushed: [][]string{{"store [1] 16 tokens"}},
			left:    [][]string{{"store [2] after 1"}},
			why:     map[string]float64{"hash_only": 1},
		},
		"tokens that are not emitted make no difference": {
			calls: []call{batch(withTokens(16, store(1)), after(1, store(2)))},
			left:  [][]string{{"store [1 2]"}},
		},
		"a store without parent ends a run": {
			calls:   []call{batch(store(1), store(2))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"store [2]"}},
			why:     map[string]float64{"parent": 1},
		},
		"a store without parent does not continue block 0": {
			calls:   []call{batch(store(0), store(1))},
			flushed: [][]string{{"store [0]"}},
			left:    [][]string{{"store [1]"}},
			why:     map[string]float64{"parent": 1},
		},
		"a parent of 0 is none where block 0 is pending in another rank": {
			calls:   []call{batch(store(0)), rankBatch(1, after(0, store(1)))},
			flushed: [][]string{{"store [0]"}},
			left:    [][]string{{"rank 1 store [1]"}},
			why:     map[string]float64{"dp_rank": 1},
		},
		"a store with another parent ends a run": {
			calls:   []call{batch(store(1), after(7, store(2)))},
			flushed: [][]string{{"store [1]"}},
			left:    [][]string{{"store [2] after 7"}},
			why:     map[string]float64{"parent": 1},
		},
		"a store whose parent is not the last pending block ends a run": {
			calls:   []call{batch(store(1, 2), after(1, store(3)))},
			flushed: [][]string{{"store [1 2]"}},
			left:    [][]string{{"store [3] after 1"}},
			why:     map[string]float64{"parent": 1},
		},
		"a run one below the cap waits": {
			cfg:   pipeline.Config{MaxBlocks: 3},
			calls: []call{batch(store(1), after(1, store(2)))},
			left:  [][]string{{"store [1 2]"}},
		},
		"a run that reaches the cap goes out at once": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(store(1, 2)), batch(after(2, store(3)))},
			flushed: [][]string{{"store [1 2 3]"}},
			why:     map[string]float64{"max_blocks": 1},
		},
		"a run that passes the cap is split": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(store(1, 2)), batch(after(2, store(3, 4)))},
			flushed: [][]string{{"store [1 2 3]"}},
			left:    [][]string{{"store [4] after 3"}},
			why:     map[string]float64{"max_blocks": 1},
		},
		"an event above the cap is split, each part the parent of the next": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(after(9, store(1, 2, 3, 4, 5, 6, 7)))},
			flushed: [][]string{{"store [1 2 3] after 9", "store [4 5 6] after 3"}},
			left:    [][]string{{"store [7] after 6"}},
			why:     map[string]float64{"max_blocks": 2},
		},
		"an event of twice the cap leaves nothing": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(store(1, 2, 3, 4, 5, 6))},
			flushed: [][]string{{"store [1 2 3]", "store [4 5 6] after 3"}},
			why:     map[string]float64{"max_blocks": 2},
		},
		"what continues a run that went out at the cap starts a new one": {
			cfg:     pipeline.Config{MaxBlocks: 2},
			calls:   []call{batch(store(1, 2), after(2, store(3)))},
			flushed: [][]string{{"store [1 2]"}},
			left:    [][]string{{"store [3] after 2"}},
			why:     map[string]float64{"max_blocks": 1},
		},
		"a cap of one": {
			cfg:     pipeline.Config{MaxBlocks: 1},
			calls:   []call{batch(store(1, 2), remove(1, 2))},
			flushed: [][]string{{"store [1]", "store [2] after 1", "remove [1]", "remove [2]"}},
			why:     map[string]float64{"max_blocks": 4},
		},
		"removes reach the cap": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(remove(1, 2), remove(3))},
			flushed: [][]string{{"remove [1 2 3]"}},
			why:     map[string]float64{"max_blocks": 1},
		},
		"removes pass the cap": {
			cfg:     pipeline.Config{MaxBlocks: 3},
			calls:   []call{batch(remove(1, 2), remove(3, 4, 5, 6, 7))},
			flushed: [][]string{{"remove [1 2 3]", "remove [4 5 6]"}},
			left:    [][]string{{"remove [7]"}},
			why:     map[string]float64{"max_blocks": 2},
		},
		"a clear ends a run": {
			calls:   []call{batch(store(1), cleared())},
			flushed: [][]string{{"store [1]", textCleared}},
			why:     map[string]float64{"unmergeable": 1},
		},
		"a clear of another rank ends a run": {
			calls:   []call{batch(store(1)), rankBatch(1, cleared())},
			flushed: [][]string{{"store [1]", "rank 1 " + textCleared}},
			why:     map[string]float64{"unmergeable": 1},
		},
		"a clear with nothing pending flushes nothing": {
			calls:   []call{batch(cleared())},
			flushed: [][]string{{textCleared}},
		},
		"a gap ends a run, which is an entry of its own": {
			calls:   []call{batch(store(1)), gap(0)},
			flushed: [][]string{{"store [1]"}, {textGap}},
			why:     map[string]float64{"unmergeable": 1},
		},
		"a gap of another rank ends a run": {
			calls:   []call{batch(store(1)), gap(1)},
			flushed: [][]string{{"store [1]"}, {"rank 1 " + textGap}},
			why:     map[string]float64{"unmergeable": 1},
		},
		"a restart ends a run, which is an entry of its own": {
			calls:   []call{batch(store(1)), restarted(0)},
			flushed: [][]string{{"store [1]"}, {textRestarted}},
			why:     map[string]float64{"unmergeable": 1},
		},
		"an event without blocks ends nothing": {
			calls: []call{
				batch(store(1), remove(), withLoRA("a", store()), inTier(kvblock.TierDisk, remove())),
				rankBatch(1, store()), batch(after(1, store(2))),
			},
			left: [][]string{{"store [1 2]"}},
		},
		"an empty batch ends nothing": {
			calls: []call{batch(store(1)), rankBatch(1), batch(after(1, store(2)))},
			left:  [][]string{{"store [1 2]"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			test.cfg.Timeout = pipeline.MaxBatchTimeout
			withWorker(t, test.cfg, func(t *testing.T, s *subject) {
				if diff := cmp.Diff(test.flushed, describe(s.play(t, test.calls...)), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("flushed (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(test.why, s.metrics(t).By("kvcast_pipeline_flushes_total", "reason")); diff != "" {
					t.Errorf("reasons (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(test.left, describe(s.play(t, call{Close: true})), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("left (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestWithoutTimeoutEachBatchIsAnEntry(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		got := s.play(t,
			timedBatch(10, 0, store(1), after(1, store(2)), remove(8), remove(9)),
			timedBatch(20, 0, after(2, store(3))),
			timedBatch(30, 0),
			timedBatch(0, 0, remove(7), cleared(), store(1)),
		)
		want := [][]string{
			{"store [1 2]", "remove [8 9]"},
			{"store [3] after 2"},
			{"remove [7]", textCleared, "store [1]"},
		}
		if diff := cmp.Diff(want, describe(got)); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([][2]int64{{10, 11}, {20, 21}, {0, 1}}, times(got)); diff != "" {
			t.Errorf("times (-want +got):\n%s", diff)
		}
		why := map[string]float64{"kind": 1, "batch_end": 3, "unmergeable": 1}
		if diff := cmp.Diff(why, s.metrics(t).By("kvcast_pipeline_flushes_total", "reason")); diff != "" {
			t.Errorf("reasons (-want +got):\n%s", diff)
		}
	})
}

func TestParentZeroIsNoParentUnlessKnown(t *testing.T) {
	tests := map[string]struct {
		calls []call
		want  string // the last event
	}{
		"is no parent where no block 0 is known": {
			calls: []call{batch(after(0, store(1)))},
			want:  "store [1]",
		},
		"is a parent if the tier has block 0": {
			calls: []call{batch(store(0)), batch(after(0, store(1)))},
			want:  "store [1] after 0",
		},
		"is a parent if another tier has block 0": {
			calls: []call{batch(inTier(kvblock.TierExternal, store(0))), batch(after(0, store(1)))},
			want:  "store [1] after 0",
		},
		"is no parent if only another rank has block 0": {
			calls: []call{rankBatch(1, store(0)), batch(after(0, store(1)))},
			want:  "store [1]",
		},
		"is a parent where block 0 is pending": {
			calls: []call{batch(store(5, 0), after(0, store(1)))},
			want:  "store [5 0 1]",
		},
		"is a parent where block 0 is pending, but not last": {
			calls: []call{batch(store(0, 5), after(0, store(1)))},
			want:  "store [1] after 0",
		},
		"is no parent once block 0 is removed in the same batch": {
			calls: []call{batch(store(0)), batch(remove(0), after(0, store(1)))},
			want:  "store [1]",
		},
		"is no parent once block 0 is removed": {
			calls: []call{batch(store(0)), batch(remove(0)), batch(after(0, store(1)))},
			want:  "store [1]",
		},
		"is a parent while a copy of block 0 is left": {
			calls: []call{batch(store(0)), batch(store(0)), batch(remove(0)), batch(after(0, store(1)))},
			want:  "store [1] after 0",
		},
		"is no parent once the rank is cleared": {
			calls: []call{batch(store(0), cleared(), after(0, store(1)))},
			want:  "store [1]",
		},
		"is no parent once the engine restarted": {
			calls: []call{batch(store(0)), restarted(0), batch(after(0, store(1)))},
			want:  "store [1]",
		},
		"is no parent once the worker was away": {
			calls: []call{batch(store(0)), removed(), added(), batch(after(0, store(1)))},
			want:  "store [1]",
		},
		"does not make a store join a run that it does not continue": {
			calls: []call{batch(store(1), after(0, store(2)))},
			want:  "store [2]",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
				entries := describe(s.play(t, test.calls...))
				last := entries[len(entries)-1]
				if got := last[len(last)-1]; got != test.want {
					t.Errorf("last event: got %s, want %s", got, test.want)
				}
			})
		})
	}
}

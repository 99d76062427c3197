package pipeline_test

import (
	"fmt"
	"maps"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestGroupsOmittedIsEmittedOnce(t *testing.T) {
	reset := call{Worker: testWorker, Batch: &feed.Batch{Events: []wire.Event{cleared()}, GroupsOmitted: true}}
	tests := map[string]struct {
		cfg   pipeline.Config
		calls []call
		want  [][]string
	}{
		"not without omitted events": {
			calls: []call{batch(store(1)), batch()},
			want:  [][]string{{"store [1]"}},
		},
		"before the batch's other events": {
			calls: []call{groupsOmitted(0, store(1), remove(1))},
			want:  [][]string{{textGroupsOmitted, "store [1]", "remove [1]"}},
		},
		"of a batch without other events": {
			calls: []call{groupsOmitted(0), groupsOmitted(0)},
			want:  [][]string{{textGroupsOmitted}},
		},
		"once per rank": {
			calls: []call{groupsOmitted(0, store(1)), groupsOmitted(2), groupsOmitted(0, remove(1)), groupsOmitted(2, store(2))},
			want:  [][]string{{textGroupsOmitted, "store [1]"}, {"rank 2 " + textGroupsOmitted}, {"remove [1]"}, {"rank 2 store [2]"}},
		},
		"again after a restart of the rank": {
			calls: []call{groupsOmitted(0), groupsOmitted(1), restarted(0), groupsOmitted(1), batch(store(1)), groupsOmitted(0)},
			want: [][]string{
				{textGroupsOmitted}, {"rank 1 " + textGroupsOmitted}, {textRestarted}, {"store [1]"}, {textGroupsOmitted},
			},
		},
		"not again after the engine cleared its cache": {
			calls: []call{reset, groupsOmitted(0)},
			want:  [][]string{{textGroupsOmitted, textCleared}},
		},
		"not again after a gap": {
			calls: []call{groupsOmitted(0), gap(0), groupsOmitted(0)},
			want:  [][]string{{textGroupsOmitted}, {textGap}},
		},
		"not again after a gap that clears": {
			cfg:   pipeline.Config{OnGap: pipeline.OnGapClear},
			calls: []call{groupsOmitted(0), gap(0), groupsOmitted(0)},
			want:  [][]string{{textGroupsOmitted}, {"cleared [] UNREPAIRED_GAP"}},
		},
		"again of a worker that is added again": {
			calls: []call{groupsOmitted(0), removed(), added(), groupsOmitted(0)},
			want:  [][]string{{textGroupsOmitted}, {"removed DISCOVERY"}, {"added"}, {textGroupsOmitted}},
		},
		"after the pending run of earlier batches": {
			cfg:   pipeline.Config{Timeout: generatorTimeout},
			calls: []call{batch(store(1)), groupsOmitted(0, after(1, store(2))), groupsOmitted(0, after(2, store(3))), pass(generatorTimeout)},
			want:  [][]string{{"store [1]", textGroupsOmitted}, {"store [2 3] after 1"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, test.cfg, func(t *testing.T, s *subject) {
				got := s.play(t, test.calls...)
				if diff := cmp.Diff(test.want, describe(got)); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				for i, id := range eventIDs(got) {
					if want := uint64(i + 2); id != want { // after worker_added
						t.Errorf("event %d has id %d, want %d", i, id, want)
					}
				}
			})
		})
	}
}

// TestGroupsOmittedOfSeveralSources covers workers whose sources restart on their own.
func TestGroupsOmittedOfSeveralSources(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	tests := map[string]struct {
		mode  feed.Consolidate
		calls []call
		want  [][]string
	}{
		"dedup: a restart of a source does not end it": {
			mode:  feed.ConsolidateDedup,
			calls: []call{groupsOmitted(0, store(1)), restarted(0), groupsOmitted(0), by2(groupsOmitted(0)), by2(restarted(0))},
			want:  [][]string{{textGroupsOmitted, "store [1]"}, {textSourceCleared}, {textSourceCleared}},
		},
		"passthrough: a restart does not end it while another source has tiers": {
			mode: feed.ConsolidatePassthrough,
			calls: []call{
				groupsOmitted(0, store(1)), by2(batch(host(store(1)))), restarted(0), groupsOmitted(0),
				by2(restarted(0)), groupsOmitted(0),
			},
			want: [][]string{
				{textGroupsOmitted, "store [1]"}, {"HOST_PINNED store [1]"}, {"cleared [TIER_DEVICE] ENGINE_RESTARTED"},
				{textRestarted}, {textGroupsOmitted},
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withSharing(t, pipeline.Config{}, test.mode, func(t *testing.T, s *subject) {
				if diff := cmp.Diff(test.want, describe(s.play(t, test.calls...))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// workerRank identifies a dp rank.
type workerRank struct {
	worker string
	rank   uint32
}

// groupsRouter has the ranks with omitted groups, as a router derives them from entries.
type groupsRouter struct {
	omitted map[workerRank]bool
	blocks  *router
	applied map[string]int // entries, by worker
}

// apply applies new entries, and describes a violation of the contract: GroupsOmitted that is
// repeated, or that ends while the rank has blocks.
func (r *groupsRouter) apply(entries map[string][]*kvcastv1.Entry) (violation string) {
	for worker, all := range entries {
		for _, entry := range all[r.applied[worker]:] {
			for _, e := range entry.GetEvents() {
				at, c := workerRank{worker, e.GetDpRank()}, e.GetCleared()
				r.blocks.applyEvent(worker, e)
				switch {
				case e.GetGroupsOmitted() != nil && r.omitted[at]:
					return fmt.Sprintf("event %d repeats GroupsOmitted of %+v", e.GetEventId(), at)
				case e.GetGroupsOmitted() != nil:
					r.omitted[at] = true
				case c.GetReason() == kvcastv1.Cleared_REASON_ENGINE_RESTARTED && len(c.GetTiers()) == 0:
					delete(r.omitted, at)
					if n := r.blocks.blocks.rankBlocks(worker, at.rank); n > 0 {
						return fmt.Sprintf("GroupsOmitted of %+v ends with %d blocks", at, n)
					}
				case e.GetWorkerRemoved() != nil:
					maps.DeleteFunc(r.omitted, func(at workerRank, _ bool) bool { return at.worker == worker })
				}
			}
		}
		r.applied[worker] = len(all)
	}
	return ""
}

// checkGroups makes calls, and returns how the ranks with omitted groups of a router that applied
// all entries differ from those of the calls.
func checkGroups(cfg pipeline.Config, calls []call) string {
	s, err := newSubject(cfg)
	if err != nil {
		return err.Error()
	}
	r := &groupsRouter{omitted: make(map[workerRank]bool), blocks: newRouter(), applied: make(map[string]int)}
	want := make(map[workerRank]bool)
	modes := make(map[string]feed.Consolidate)
	for i, c := range calls {
		c.on(s)
		if violation := r.apply(s.journal.all()); violation != "" {
			return violation
		}
		switch {
		case c.Add != nil:
			modes[c.Worker] = modelMode(*c.Add)
		case c.Batch != nil && c.Batch.GroupsOmitted:
			want[workerRank{c.Worker, c.Batch.Rank}] = true
		case c.Restarted != nil && modes[c.Worker] == "":
			delete(want, workerRank{c.Worker, c.Restarted.Rank})
		case c.Restarted != nil && modes[c.Worker] == feed.ConsolidatePassthrough:
			// Whether it ends depends on the other sources.
			if at := (workerRank{c.Worker, c.Restarted.Rank}); !r.omitted[at] {
				delete(want, at)
			}
		case c.Remove != 0:
			maps.DeleteFunc(want, func(at workerRank, _ bool) bool { return at.worker == c.Worker })
		}
		if diff := cmp.Diff(want, r.omitted); diff != "" {
			return fmt.Sprintf("ranks after call %d (-want +got):\n%s", i, diff)
		}
	}
	return ""
}

// TestGroupsOmittedFollowsFromTheEntries compares, after each call, the ranks with omitted groups
// according to the calls with those of a router.
func TestGroupsOmittedFollowsFromTheEntries(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		passing := rapid.Bool().Draw(rt, "timeout")
		if passing {
			cfg.Timeout = generatorTimeout
		}
		calls := drawCalls(rt, passing, false)
		var violation string
		synctest.Test(t, func(*testing.T) { violation = checkGroups(cfg, calls) })
		if violation != "" {
			rt.Fatal(violation)
		}
	})
}

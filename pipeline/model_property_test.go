package pipeline_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/test/harness"
)

// drawConfig draws a config with small limits, so that runs end and ranks fill soon.
func drawConfig(t *rapid.T) pipeline.Config {
	return pipeline.Config{
		MaxBlocks:    rapid.SampledFrom([]int{0, 1, 2, 3, 4, 5}).Draw(t, "max blocks"),
		EmitTokenIDs: rapid.Bool().Draw(t, "emit token ids"),
		OnGap: rapid.SampledFrom([]pipeline.OnGap{
			"", pipeline.OnGapReport, pipeline.OnGapReport, pipeline.OnGapClear,
		}).Draw(t, "on gap"),
		MaxBlocksPerRank: rapid.SampledFrom([]int{0, 1, 2, 3, 4, 6, 9}).Draw(t, "max blocks per rank"),
	}
}

// compare makes the same calls on a pipeline and on the model, and returns the difference of
// their entries and metrics.
func compare(t harness.Fataler, cfg pipeline.Config, calls []call) string {
	s, err := newSubject(cfg)
	if err != nil {
		return err.Error()
	}
	m := newModel(cfg, s.journal.removedBy)
	for _, c := range calls {
		c.on(s)
		c.on(m)
	}
	if got, want := cfg.Blocks.Used(), int64(m.units()); cfg.Blocks != nil && got != want {
		return fmt.Sprintf("blocks that are accounted for: got %d, want %d", got, want)
	}
	counted := s.metrics(t)
	for metric, want := range map[string]map[string]float64{
		"raw_event_holes_total":      m.holes(),
		"stale_blocks_removed_total": m.count(func(w *modelWorker) int { return w.expired }),
		"blocks_evicted_total":       m.count(func(w *modelWorker) int { return w.evicted }),
		"blocks_refused_total":       m.count(func(w *modelWorker) int { return w.refused }),
		"consolidated_blocks":        m.tracked(false),
		"consolidated_names":         m.tracked(true),
	} {
		if diff := cmp.Diff(want, counted.By("kvcast_pipeline_"+metric, "worker")); diff != "" {
			return metric + " (-want +got):\n" + diff
		}
	}
	if diff := s.compareIndex(t); diff != "" {
		return "index: " + diff
	}
	for name, w := range m.workers {
		if diff := cmp.Diff(w.incompleteRanks(), s.incompleteRanks(name)); diff != "" {
			return "incomplete ranks of " + name + " (-want +got):\n" + diff
		}
		if got := s.blocks(name); got != uint64(len(w.blocks)) {
			return fmt.Sprintf("blocks of %s: got %d, want %d", name, got, len(w.blocks))
		}
	}
	if diff := cmp.Diff(m.ignoredRemoves(), counted.By("kvcast_pipeline_removes_ignored_total", "reason")); diff != "" {
		return "removes ignored (-want +got):\n" + diff
	}
	return s.journal.check(m.entries)
}

func TestEntriesEqualTheModels(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		cfg.Blocks = budget.New("blocks", rapid.SampledFrom([]int64{0, 0, 4, 9, 16, 30}).Draw(t, "blocks"))
		if diff := compare(t, cfg, drawCalls(t, false, true)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestEntriesEqualTheModelsWithTimeout(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		cfg.Timeout = generatorTimeout
		calls := drawCalls(rt, true, true)
		var diff string
		synctest.Test(t, func(t *testing.T) { diff = compare(t, cfg, calls) })
		if diff != "" {
			rt.Fatal(diff)
		}
	})
}

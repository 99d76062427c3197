package pipeline_test

import (
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/pipeline"
)

// drawConfig draws a config whose runs end soon.
func drawConfig(t *rapid.T) pipeline.BatchConfig {
	return pipeline.BatchConfig{
		MaxBlocks:    rapid.SampledFrom([]int{0, 1, 2, 3, 4, 5}).Draw(t, "max blocks"),
		EmitTokenIDs: rapid.Bool().Draw(t, "emit token ids"),
	}
}

// compare makes the same calls on a pipeline and on the model, and returns how
// their entries or their holes in raw event ids differ.
func compare(t interface{ Fatal(...any) }, cfg pipeline.BatchConfig, calls []call) string {
	s, err := newSubject(cfg)
	if err != nil {
		return err.Error()
	}
	m := newModel(cfg)
	for _, c := range calls {
		c.on(s)
		c.on(m)
	}
	if diff := cmp.Diff(m.holes(), s.metrics(t).by("kvcast_pipeline_raw_event_holes_total", "worker")); diff != "" {
		return "raw event holes (-want +got):\n" + diff
	}
	return s.journal.check(m.entries)
}

func TestEntriesAreTheModels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if diff := compare(t, drawConfig(t), drawCalls(t, false)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestEntriesAreTheModelsWithTimeout(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		cfg.Timeout = generatorTimeout
		calls := drawCalls(rt, true)
		var diff string
		synctest.Test(t, func(t *testing.T) { diff = compare(t, cfg, calls) })
		if diff != "" {
			rt.Fatal(diff)
		}
	})
}

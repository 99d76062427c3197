package cluster

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// TestRandomWorldsSettle takes random steps in larger worlds, with the default proportions of times, and checks the same
// as the exhaustive test.
func TestRandomWorldsSettle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := rapid.IntRange(1, 4).Draw(t, "nodes")
		names := make([]string, rapid.IntRange(1, 5).Draw(t, "workers"))
		for i := range names {
			names[i] = fmt.Sprintf("worker-%d", i)
		}
		cfg := Config{TTL: worldTTL, Grace: 5 * worldTTL, MaxHandOvers: 2, MaxActions: 3}
		left := limits{appends: 100, crashes: 2, starts: 2, drains: 1, suspicions: 4, timeouts: 4, failures: 4, wants: 4, connects: 8, cuts: 4}
		w := newWorld(cfg, nodes, left, names, rapid.Bool().Draw(t, "wanted"), rapid.Bool().Draw(t, "sends later"))
		w.checkAgain = true
		var steps []step
		for range rapid.IntRange(0, 150).Draw(t, "steps") {
			steps = w.steps(steps[:0])
			if len(steps) == 0 {
				break
			}
			s := rapid.SampledFrom(steps).Draw(t, "step")
			w.do(s)
			if w.wrong != "" {
				t.Fatal(w.wrong)
			}
		}
		if wrong := w.settle(nil); wrong != "" {
			t.Fatal(wrong)
		}
	})
}

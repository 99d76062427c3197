//go:build !race

package pipeline_test

import (
	"fmt"
	"testing"
)

// TestSteadyLaneAllocatesNothing does not run with the race detector, which
// allocates itself.
func TestSteadyLaneAllocatesNothing(t *testing.T) {
	for _, blocks := range []int{1, 16} {
		t.Run(fmt.Sprint("blocks=", blocks), func(t *testing.T) {
			l := newSteadyLane(t, blocks)
			if got := testing.AllocsPerRun(1000, l.step); got != 0 {
				t.Errorf("allocations per batch: got %v, want 0", got)
			}
		})
	}
}

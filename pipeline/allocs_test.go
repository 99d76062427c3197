//go:build !race

package pipeline_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/ingest"
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

// TestFullLaneAllocatesNothing has first all blocks of a batch left out, and then,
// after a gap, others make way for all of them.
func TestFullLaneAllocatesNothing(t *testing.T) {
	l := newBoundedLane(t, 16, poolBlocks)
	l.batch.Events = l.batch.Events[:1]
	for l.next < 2*poolBlocks {
		l.step()
	}
	if got := testing.AllocsPerRun(100, l.step); got != 0 {
		t.Errorf("allocations per batch left out: got %v, want 0", got)
	}
	l.lane.Gap(ingest.Gap{Reason: ingest.GapReplayForgotten})
	for range 100 { // makes room for an entry as large as these
		l.step()
	}
	if got := testing.AllocsPerRun(100, l.step); got != 0 {
		t.Errorf("allocations per batch that others make way for: got %v, want 0", got)
	}
}

//go:build !race

package pipeline_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/feed"
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
	l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
	for range 100 { // makes room for an entry as large as these
		l.step()
	}
	if got := testing.AllocsPerRun(100, l.step); got != 0 {
		t.Errorf("allocations per batch that others make way for: got %v, want 0", got)
	}
}

// TestSteadySharedLaneAllocatesNothing has two sources.
func TestSteadySharedLaneAllocatesNothing(t *testing.T) {
	for _, blocks := range []int{1, 16} {
		t.Run(fmt.Sprint("blocks=", blocks), func(t *testing.T) {
			l := newSteadySharedLane(t, blocks)
			if got := testing.AllocsPerRun(1000, func() { l.step(); l.second() }); got != 0 {
				t.Errorf("allocations per batch of each source: got %v, want 0", got)
			}
		})
	}
}

// TestMemoryOfAMillionBlocks is of the table alone, and of a worker two of whose
// sources hold each block by a name of its own.
func TestMemoryOfAMillionBlocks(t *testing.T) {
	const million = 1_000_000
	if got := bytesPerBlock(t, million); got > 64 {
		t.Errorf("bytes of a block: got %.1f, want at most 64", got)
	}
	if got := sharedBytesPerBlock(t, million); got > 180 {
		t.Errorf("bytes of a block of two sources: got %.1f, want at most 180", got)
	}
}

package pipeline_test

import (
	"fmt"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
)

// TestSteadyLaneAllocatesNothing does not run with the race detector, which
// allocates itself.
func TestSteadyLaneAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	for _, blocks := range []int{1, 16} {
		t.Run(fmt.Sprint("blocks=", blocks), func(t *testing.T) {
			l := newSteadyLane(t, blocks)
			if got := testing.AllocsPerRun(1000, l.step); got != 0 {
				t.Errorf("allocations per batch: got %v, want 0", got)
			}
		})
	}
}

// TestHybridLaneAllocatesNothing covers an engine whose every batch has omitted events.
func TestHybridLaneAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	l := newSteadyLane(t, 1)
	l.batch.GroupsOmitted = true
	l.step() // emits GroupsOmitted
	if got := testing.AllocsPerRun(1000, l.step); got != 0 {
		t.Errorf("allocations per batch: got %v, want 0", got)
	}
}

// TestFullLaneAllocatesNothing covers a batch whose blocks are all refused and, after a gap,
// a batch whose blocks all displace stale ones.
func TestFullLaneAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	l := newBoundedLane(t, 16, poolBlocks)
	l.batch.Events = l.batch.Events[:1]
	for l.next < 2*poolBlocks {
		l.step()
	}
	if got := testing.AllocsPerRun(100, l.step); got != 0 {
		t.Errorf("allocations per batch left out: got %v, want 0", got)
	}
	l.lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
	for range 100 { // grows the buffer to the size of these entries
		l.step()
	}
	if got := testing.AllocsPerRun(100, l.step); got != 0 {
		t.Errorf("allocations per batch that others make way for: got %v, want 0", got)
	}
}

// TestSteadySharedLaneAllocatesNothing covers a worker with two sources.
func TestSteadySharedLaneAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	for _, blocks := range []int{1, 16} {
		t.Run(fmt.Sprint("blocks=", blocks), func(t *testing.T) {
			l := newSteadySharedLane(t, blocks)
			if got := testing.AllocsPerRun(1000, func() { l.step(); l.second() }); got != 0 {
				t.Errorf("allocations per batch of each source: got %v, want 0", got)
			}
		})
	}
}

// TestMemoryOfAMillionBlocks measures the table alone, and a worker with two sources that
// each store every block under a different name.
func TestMemoryOfAMillionBlocks(t *testing.T) {
	testclass.WithoutRace(t)
	const million = 1_000_000
	if got := bytesPerBlock(t, million); got > 40 {
		t.Errorf("bytes of a block: got %.1f, want at most 40", got)
	}
	if got := sharedBytesPerBlock(t, million); got > 195 {
		t.Errorf("bytes of a block of two sources: got %.1f, want at most 195", got)
	}
}

// TestDurableLaneAllocatesNothing covers a lane with a durable journal.
func TestDurableLaneAllocatesNothing(t *testing.T) {
	testclass.WithoutRace(t)
	l := newLane(t, 16)
	l.durable(t, l.journal)
	l.fill()
	if got := testing.AllocsPerRun(1000, l.stepDurable); got != 0 {
		t.Errorf("allocations per batch: got %v, want 0", got)
	}
}

// TestCheckpointOfAMillionBlocksIsSmall measures the stored size of a block.
func TestCheckpointOfAMillionBlocksIsSmall(t *testing.T) {
	testclass.WithoutRace(t)
	const blocks = 1_000_000
	l := filledLane(t, blocks, &nowhere{})
	c, ok := l.pipeline.Checkpoint("vllm-0", nil)
	if got := float64(len(c.Data)) / blocks; !ok || got > 22 {
		t.Errorf("bytes of a block: got %.1f, want at most 22", got)
	}
}

package pipeline_test

import (
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
)

// TestCheckpointIsDueOfAWorkerThatNeedsOldEntries has a worker with a single entry, beside others of other pipelines.
func TestCheckpointIsDueOfAWorkerThatNeedsOldEntries(t *testing.T) {
	oldest := uint64(1)
	cfg := pipeline.Config{Durable: true, Shared: true, Oldest: func() uint64 { return oldest }}
	p, err := pipeline.New(cfg, journal.NewMemory(journal.Config{}))
	if err != nil {
		t.Fatal(err)
	}
	p.AddWorker(feed.Worker{Name: "w"})
	if due := p.CheckpointDue(); len(due) > 0 {
		t.Errorf("due while the journal has the entry: %q", due)
	}
	oldest = 2
	if due := p.CheckpointDue(); !slices.Equal(due, []string{"w"}) {
		t.Fatalf("due when the journal would remove the entry: got %q, want w", due)
	}
	c, _ := p.Checkpoint("w", nil)
	p.CheckpointStored(c)
	if due := p.CheckpointDue(); len(due) > 0 {
		t.Errorf("due after the checkpoint: %q", due)
	}
}

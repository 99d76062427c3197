package pipeline_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

func closePipeline(t *testing.T, p *pipeline.Pipeline) {
	t.Helper()
	if err := p.Close(context.Background()); err != nil {
		t.Errorf("close: %v", err)
	}
}

// delayedPipeline is a pipeline whose journal acknowledges on request. It starts with two
// acknowledged workers.
type delayedPipeline struct {
	*pipeline.Pipeline
	journal *journaltest.Delayed
	lanes   map[string]feed.Lane
	next    uint64
}

func newDelayedPipeline(t *testing.T, cfg pipeline.Config) *delayedPipeline {
	t.Helper()
	j := journaltest.NewDelayed(journal.Config{}, 4, 0)
	p, err := pipeline.New(cfg, j)
	if err != nil {
		t.Fatal(err)
	}
	d := &delayedPipeline{Pipeline: p, journal: j, lanes: make(map[string]feed.Lane)}
	for _, name := range []string{"a", "b"} {
		d.lanes[name] = p.AddWorker(feed.Worker{Name: name})
	}
	j.Acknowledge(2)
	return d
}

// store sends a batch that stores one block.
func (d *delayedPipeline) store(worker string) {
	d.next++
	d.lanes[worker].Batch(&feed.Batch{Events: []wire.Event{{
		Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{d.next}, BlockSize: 16,
	}}})
}

// wantFailed checks that the failure of worker a is reported, and that it appends nothing more.
func (d *delayedPipeline) wantFailed(t *testing.T, cause error) {
	t.Helper()
	if err := <-d.Failed(); !errors.Is(err, cause) {
		t.Errorf("reported: got %v, want %v", err, cause)
	}
	d.journal.Refuse(nil)
	inFlight := d.journal.InFlight()
	d.store("a")
	d.lanes["a"].Gap(feed.Gap{Reason: feed.GapReplayUnavailable})
	d.lanes["a"].Restarted(feed.Restart{})
	d.RemoveWorker("a", feed.RemovedDeregistered)
	if got := d.journal.InFlight(); got != inFlight {
		t.Errorf("a failed lane has appended %d entries", got-inFlight)
	}
}

func TestRefusedAppendFailsTheLane(t *testing.T) {
	for name, cause := range map[string]error{"another owner": journal.ErrFenced, "disk full": journal.ErrNoSpace} {
		t.Run(name, func(t *testing.T) {
			d := newDelayedPipeline(t, pipeline.Config{})
			d.journal.Refuse(cause)
			d.store("a")
			d.wantFailed(t, cause)
			d.store("b") // the other worker is unaffected
			if got := d.journal.InFlight(); got != 1 {
				t.Errorf("in flight: got %d entries of another worker, want 1", got)
			}
		})
	}
}

func TestAppendThatFailsLaterFailsTheLane(t *testing.T) {
	d := newDelayedPipeline(t, pipeline.Config{})
	d.store("a")
	d.store("b")
	d.store("a")
	d.journal.Fail("a", journal.ErrFenced)
	d.wantFailed(t, journal.ErrFenced)
	d.journal.Acknowledge(1)
	if got := d.journal.Bounds().Newest; got != 3 {
		t.Errorf("newest: got %d, want 3: both workers and the block of b", got)
	}
}

// TestFailedLaneDiscardsItsPendingRun fails the append while the batching timer runs.
func TestFailedLaneDiscardsItsPendingRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDelayedPipeline(t, pipeline.Config{Timeout: time.Second})
		d.store("a")
		d.journal.Fail("a", journal.ErrFenced)
		d.lanes["a"].Gap(feed.Gap{Reason: feed.GapReplayUnavailable})
		d.wantFailed(t, journal.ErrFenced)
		<-time.After(2 * time.Second)
		if got := d.journal.InFlight(); got != 0 {
			t.Errorf("a failed lane has appended %d entries", got)
		}
	})
}

func TestCloseWaitsForAcknowledgements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDelayedPipeline(t, pipeline.Config{Timeout: time.Second})
		d.store("a")
		done := make(chan error)
		go func() { done <- d.Close(t.Context()) }()
		synctest.Wait()
		if got := d.journal.InFlight(); got != 1 {
			t.Errorf("in flight: got %d, want the pending run", got)
		}
		select {
		case err := <-done:
			t.Fatalf("close returned %v before the acknowledgement", err)
		default:
		}
		d.journal.Acknowledge(1)
		if err := <-done; err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// TestCloseGivesUpABlockedAppend closes the pipeline while the journal blocks an append.
func TestCloseGivesUpABlockedAppend(t *testing.T) {
	d := newDelayedPipeline(t, pipeline.Config{})
	stopped := make(chan struct{})
	go func() {
		for range 5 {
			d.store("a")
		}
		close(stopped)
	}()
	for d.journal.InFlight() < 4 {
		runtime.Gosched()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := d.Close(ctx); err == nil {
		t.Error("close: got no error of the append that was given up")
	}
	<-stopped
	if err := <-d.Failed(); !errors.Is(err, context.Canceled) {
		t.Errorf("reported: got %v, want the append that was given up", err)
	}
}

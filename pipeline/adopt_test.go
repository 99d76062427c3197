package pipeline_test

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// wantNotFailed checks that the pipeline has not failed.
func wantNotFailed(t *testing.T, p *pipeline.Pipeline) {
	t.Helper()
	select {
	case err := <-p.Failed():
		t.Errorf("the pipeline has failed: %v", err)
	default:
	}
}

// fill appends until the journal blocks an append of a worker. The channel that it returns is closed when the append returns.
func (d *delayedPipeline) fill(worker string) <-chan struct{} {
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for range 5 {
			d.store(worker)
		}
	}()
	for d.journal.InFlight() < 4 {
		runtime.Gosched()
	}
	return stopped
}

func TestDropWhileAnAppendBlocks(t *testing.T) {
	blocks := budget.New("blocks", 100)
	d := newDelayedPipeline(t, pipeline.Config{Blocks: blocks})
	stopped := d.fill("a")
	d.Drop("a")
	<-stopped
	d.lanes["a"].Gap(feed.Gap{})
	if n := d.journal.InFlight(); n != 4 || blocks.Used() != 0 {
		t.Errorf("%d appends are in flight and %d blocks are reserved, want 4 and 0", n, blocks.Used())
	}
	d.journal.Acknowledge(4)
	d.store("b")
	d.journal.Acknowledge(1)
	wantNotFailed(t, d.Pipeline)
	closePipeline(t, d.Pipeline)
}

// TestDropWhileAWorkerIsAdded drops a worker while the append of its WorkerAdded blocks, and another at the same time.
func TestDropWhileAWorkerIsAdded(t *testing.T) {
	d := newDelayedPipeline(t, pipeline.Config{})
	for range 4 {
		d.store("a")
	}
	added := make(chan struct{})
	go func() {
		defer close(added)
		d.AddWorker(feed.Worker{Name: "c"})
	}()
	for d.Lanes()["c"] == nil {
		runtime.Gosched()
	}
	d.Drop("b")
	d.Drop("c")
	<-added
	wantNotFailed(t, d.Pipeline)
}

func TestFencedLaneDoesNotFailThePipeline(t *testing.T) {
	for name, fence := range map[string]func(*delayedPipeline){
		"at once": func(d *delayedPipeline) { d.journal.Refuse(journal.ErrFenced); d.store("a"); d.journal.Refuse(nil) },
		"later":   func(d *delayedPipeline) { d.store("a"); d.journal.Fail("a", journal.ErrFenced) },
	} {
		t.Run(name, func(t *testing.T) {
			fenced := make(chan string, 2)
			d := newDelayedPipeline(t, pipeline.Config{Fenced: func(worker string) { fenced <- worker }})
			fence(d)
			if got := <-fenced; got != "a" {
				t.Errorf("fenced: got %s, want a", got)
			}
			d.store("a")
			d.RemoveWorker("a", feed.RemovedDeregistered)
			if d.AddWorker(feed.Worker{Name: "a"}) != d.lanes["a"] {
				t.Error("the worker has another lane before Drop")
			}
			d.store("b")
			if n := d.journal.InFlight(); n != 1 {
				t.Errorf("in flight: got %d entries, want that of b", n)
			}
			d.journal.Acknowledge(1)
			if err := d.Flush(t.Context(), "a"); !errors.Is(err, journal.ErrFenced) {
				t.Errorf("flush: got %v, want ErrFenced", err)
			}
			closePipeline(t, d.Pipeline)
			wantNotFailed(t, d.Pipeline)
			if len(fenced) > 0 {
				t.Error("it was reported twice")
			}
		})
	}
}

func TestFlushReturnsWhenItsContextEnds(t *testing.T) {
	t.Run("before an acknowledgement", func(t *testing.T) {
		d := newDelayedPipeline(t, pipeline.Config{})
		d.store("a")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := d.Flush(ctx, "a"); !errors.Is(err, context.Canceled) {
			t.Errorf("flush: got %v, want the error of its context", err)
		}
		d.Drop("a")
		wantNotFailed(t, d.Pipeline)
	})
	t.Run("while an append blocks", func(t *testing.T) {
		d := newDelayedPipeline(t, pipeline.Config{Timeout: pipeline.MaxBatchTimeout})
		d.store("a")
		for range 4 {
			d.lanes["b"].Gap(feed.Gap{})
		}
		ctx, cancel := context.WithCancel(t.Context())
		flushed := make(chan error)
		go func() { flushed <- d.Flush(ctx, "a") }()
		cancel()
		if err := <-flushed; err == nil {
			t.Error("flush: got no error of the append that was given up")
		}
		d.Drop("a")
		wantNotFailed(t, d.Pipeline)
	})
}

// TestSharedPipelineReportsCheckpointsOfRemovedWorkers has no checkpoint RemovedWorkers.
func TestSharedPipelineReportsCheckpointsOfRemovedWorkers(t *testing.T) {
	d := newDelayedPipeline(t, pipeline.Config{Durable: true, Shared: true})
	for _, worker := range []string{"a", "b"} {
		c, ok := d.Checkpoint(worker, nil)
		if !ok {
			t.Fatalf("no checkpoint of %s", worker)
		}
		d.CheckpointStored(c)
	}
	want := func(when string, obsolete []string, retainAfter uint64) {
		t.Helper()
		if got := d.RetainAfter(d.journal.Bounds().Newest); got != retainAfter {
			t.Errorf("%s: the entries after %d are retained, want %d", when, got, retainAfter)
		}
		if diff := cmp.Diff(obsolete, d.ObsoleteCheckpoints()); diff != "" {
			t.Errorf("%s: obsolete (-want +got):\n%s", when, diff)
		}
		if due := d.CheckpointDue(); len(due) > 0 {
			t.Errorf("%s: %q are due", when, due)
		}
		if _, ok := d.Checkpoint(pipeline.RemovedWorkers, nil); ok {
			t.Errorf("%s: a checkpoint of removed workers", when)
		}
	}
	want("before", nil, 2)
	d.RemoveWorker("a", feed.RemovedDeregistered)
	want("in flight", nil, 2)
	d.journal.Acknowledge(1)
	want("removed", []string{"a"}, 2)
	want("deleted", nil, 3)
	d.RemoveWorker("b", feed.RemovedDeregistered)
	d.journal.Acknowledge(1)
	d.Drop("b")
	want("another pipeline has it", nil, 4)
}

func TestEventIDsFollowTheFloor(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{Shared: true})
	r.pipeline.SetEventIDFloor(testWorker, 41)
	r.pipeline.SetEventIDFloor(testWorker, 7)
	got := r.play(t, added(), removed(), added())
	r.pipeline.Drop(testWorker)
	got = append(got, r.play(t, added())...)
	if diff := cmp.Diff([]uint64{42, 43, 44, 1}, eventIDs(got)); diff != "" {
		t.Errorf("event ids (-want +got):\n%s", diff)
	}
}

// TestClaimChangesOnlyTheSeq reads a claim, an entry without events, of a worker in the stream and of another.
func TestClaimChangesOnlyTheSeq(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{Shared: true})
	r.play(t, added(), batch(store(1)))
	rec := r.read(t, 0)
	for i, worker := range []string{testWorker, "unknown"} {
		claim := protowire.AppendString(protowire.AppendTag(nil, kvcastv1.EntryWorkerField, protowire.BytesType), worker)
		if err := rec.Entry(uint64(10+i), worker, claim, nil); err != nil {
			t.Fatal(err)
		}
	}
	if lost := rec.Lost(); len(lost) > 0 {
		t.Errorf("lost: %v", lost)
	}
	before := len(r.storage.entries)
	p, err := rec.Pipeline(r.storage)
	r.start(t, p, err)
	c, ok := r.pipeline.Checkpoint(testWorker, nil)
	if !ok {
		t.Fatal("no checkpoint")
	}
	if seq, err := c.Appended.Wait(t.Context()); seq != 10 || err != nil || len(p.Lanes()) != 1 {
		t.Errorf("seq %d and error %v of the checkpoint of one of %d workers, want 10 of one", seq, err, len(p.Lanes()))
	}
	wantEntries(t, "entries", append(r.storage.decoded(t, before), r.play(t, added(), batch(store(2)))...), []string{"store [2]"})
}

func TestAdoptRefusesAWorkerThatHasALane(t *testing.T) {
	blocks := budget.New("blocks", 100)
	r := newRecoverable(t, pipeline.Config{Shared: true, Blocks: blocks})
	two := call{Worker: testWorker, Add: &feed.Worker{Name: testWorker, Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}}}
	r.play(t, two, batch(store(1)))
	checkpoint, used := r.checkpoint(t, testWorker), blocks.Used()
	if err := r.pipeline.Adopt(r.read(t, len(r.storage.entries), checkpoint)); err == nil {
		t.Error("a worker is adopted twice")
	}
	if blocks.Used() != used {
		t.Errorf("%d blocks are reserved, want %d", blocks.Used(), used)
	}
	r.pipeline.Drop(testWorker)
	if err := r.pipeline.Adopt(r.read(t, len(r.storage.entries), checkpoint)); err != nil {
		t.Error(err)
	}
	if blocks.Used() != used {
		t.Errorf("after Drop and Adopt %d blocks are reserved, want %d", blocks.Used(), used)
	}
	wantEntries(t, "entries", r.play(t, two, batch(remove(1))), []string{"remove [1]"})
}

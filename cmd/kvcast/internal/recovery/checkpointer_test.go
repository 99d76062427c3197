package recovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/test/harness"
)

// durableJournal is a journal in memory that keeps all entries with their states for Load.
type durableJournal struct {
	*journal.Memory
	store   *store
	entries []jetstream.Entry
}

func (j *durableJournal) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	j.entries = append(j.entries, jetstream.Entry{
		Seq: uint64(len(j.entries) + 1), Worker: r.Source.Worker, Body: slices.Clone(r.Body), State: slices.Clone(r.State),
	})
	return j.Memory.Append(ctx, r)
}

func (j *durableJournal) Load(_ context.Context, _ uint64, each func(jetstream.Entry) error) error {
	for _, e := range j.entries {
		if err := each(e); err != nil {
			return err
		}
	}
	return nil
}

func (j *durableJournal) Discard(context.Context) error { return errors.New("unexpected") }

// run is a run of pipeline and index, whose Checkpointer a test drives.
type run struct {
	Checkpointer
	journal  *durableJournal
	lanes    map[string]feed.Lane
	retained uint64
	written  int // checkpoints of workers
}

// start recovers what an earlier run has left.
func start(t *testing.T, j *durableJournal) *run {
	t.Helper()
	r := &run{journal: j, lanes: make(map[string]feed.Lane)}
	var recovered *pipeline.Recovery
	var lines harness.Log
	var progress Progress
	x := index.New()
	if _, err := Recover(t.Context(), j, j.store, Registrations{newStore()}, lines.Logger(), &progress, x, func() Pipeline {
		recovered = pipeline.Recover(pipeline.Config{Durable: true, CheckpointBytes: 1 << 20})
		return recovered
	}); err != nil {
		t.Fatal(err)
	}
	p, err := recovered.Pipeline(j)
	if err != nil {
		t.Fatal(err)
	}
	follower := follow.New(j, x, follow.Delays{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- follower.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	r.Checkpointer = Checkpointer{
		Store: j.store, Log: lines.Logger(), Pipeline: p, Follower: follower,
		State:   func(_ string, do func([]byte)) bool { do([]byte("state of ingest")); return true },
		Retain:  func(seq uint64) { r.retained = seq },
		Written: func(int, time.Duration) { r.written++ },
	}
	for _, w := range recovered.Workers() {
		r.lanes[w.Worker.Name] = p.AddWorker(w.Worker)
	}
	return r
}

func (r *run) add(name string) {
	r.lanes[name] = r.Pipeline.AddWorker(feed.Worker{Name: name, Model: "m"})
}

// store applies a batch that stores blocks without a parent, from a hash on.
func (r *run) store(worker string, first uint64, blocks int) {
	e := wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockSize: 16}
	for i := range uint64(blocks) {
		e.BlockHashes, e.TokensHashes = append(e.BlockHashes, first+i), append(e.TokensHashes, first+i)
	}
	r.lanes[worker].Batch(&feed.Batch{Events: []wire.Event{e}})
}

// turn makes a turn when the index has all entries.
func (r *run) turn(t *testing.T) {
	t.Helper()
	if err := r.Follower.Wait(t.Context(), r.journal.Bounds().Newest); err != nil {
		t.Fatal(err)
	}
	if err := r.Turn(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestRunContinuesFromCheckpoints stores so many blocks that checkpoints are due, ends without notice, and starts again.
func TestRunContinuesFromCheckpoints(t *testing.T) {
	t.Parallel()
	j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
	r := start(t, j)
	r.add("a")
	r.add("b")
	r.add("gone")
	r.store("b", 1, 10)
	for n := uint64(0); r.written == 0; n++ {
		r.store("a", 1, 16_000) // copies of the same blocks
		r.turn(t)
		if n > 1000 {
			t.Fatal("no checkpoint is due")
		}
	}
	if r.retained == 0 {
		t.Error("all entries are retained after the checkpoints")
	}
	r.Pipeline.RemoveWorker("gone", feed.RemovedDeregistered)
	r.turn(t)
	r.store("a", 1<<40, 5)
	r.store("b", 1<<40, 5)
	r.turn(t)
	want, _ := r.Follower.Index().Workers(nil)
	if got := slices.Sorted(maps.Keys(j.store.objects)); !slices.Equal(got, []string{removedName, "worker.a", "worker.b"}) {
		t.Errorf("stored: %v", got)
	}

	j.entries = j.entries[r.retained:] // the journal may have removed the others
	again := start(t, j)
	got, _ := again.Follower.Index().Workers(nil)
	if diff := cmp.Diff(want, got, cmp.Comparer(equalAdded)); diff != "" {
		t.Errorf("index (-want +got):\n%s", diff)
	}
	again.lanes["a"].Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{1 << 40}}}})
	again.turn(t)
	if w, _ := again.Follower.Index().Worker("a"); w.Ranks[0].Blocks[0].Blocks != want[0].Ranks[0].Blocks[0].Blocks-1 {
		t.Error("a removed block has not left the index")
	}
}

func TestFailedCheckpointIsTriedAgain(t *testing.T) {
	t.Parallel()
	j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
	r := start(t, j)
	r.add("a")
	for n := uint64(0); len(r.Pipeline.CheckpointDue()) == 0; n++ {
		r.store("a", 1, 16_000) // copies of the same blocks
		if err := r.Follower.Wait(t.Context(), j.Bounds().Newest); err != nil {
			t.Fatal(err)
		}
	}
	r.add("b") // has no checkpoint either
	if err := r.Follower.Wait(t.Context(), j.Bounds().Newest); err != nil {
		t.Fatal(err)
	}
	j.store.fail, j.store.failing = errors.New("disk full"), "worker.a"
	if err := r.Turn(t.Context()); !errors.Is(err, j.store.fail) {
		t.Errorf("got error %v", err)
	}
	if _, ok := j.store.objects["worker.b"]; !ok || r.retained != 0 || r.written != 1 {
		t.Errorf("entries after %d are retained, and %d checkpoints are written", r.retained, r.written)
	}
	j.store.fail = fmt.Errorf("%w: another instance has the worker", journal.ErrFenced)
	r.turn(t) // is no failure
	if r.retained != 0 || r.written != 1 {
		t.Errorf("entries after %d are retained, and %d checkpoints are written", r.retained, r.written)
	}
	j.store.fail = nil
	r.turn(t)
	if r.retained == 0 || r.written != 2 {
		t.Errorf("entries after %d are retained, and %d checkpoints are written", r.retained, r.written)
	}
}

package recovery

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// store is a Store in memory. damaged are names that cannot be read.
type store struct {
	objects  map[string][]byte
	damaged  map[string]bool
	fail     error // of Put, for names that begin with failing
	failing  string
	unlisted error // of All, for no name
}

func newStore() *store {
	return &store{objects: make(map[string][]byte), damaged: make(map[string]bool)}
}

func (s *store) Put(_ context.Context, name string, data []byte) error {
	if s.fail != nil && strings.HasPrefix(name, s.failing) {
		return s.fail
	}
	s.objects[name] = data
	return nil
}

func (s *store) Delete(_ context.Context, name string) error { delete(s.objects, name); return nil }

func (s *store) All(context.Context) iter.Seq2[jetstream.Object, error] {
	return func(yield func(jetstream.Object, error) bool) {
		if s.unlisted != nil && !yield(jetstream.Object{}, s.unlisted) {
			return
		}
		for _, name := range slices.Sorted(maps.Keys(s.objects)) {
			var err error
			if s.damaged[name] {
				err = errors.New("the checksum is wrong")
			}
			if !yield(jetstream.Object{Name: name, Data: s.objects[name]}, err) {
				return
			}
		}
	}
}

// log is a Journal in memory.
type log struct {
	store   *store
	epoch   string
	entries []jetstream.Entry
	newest  uint64        // seq; it stays when the entries are discarded
	err     error         // of Load
	pause   time.Duration // before each entry
}

func (l *log) Load(_ context.Context, needed uint64, each func(jetstream.Entry) error) error {
	if l.newest < needed {
		return fmt.Errorf("%w: a checkpoint has seen entry %d, and the newest is %d", jetstream.ErrUnreadable, needed, l.newest)
	}
	for _, e := range l.entries {
		if l.pause > 0 {
			<-time.After(l.pause)
		}
		if err := each(e); err != nil {
			return err
		}
	}
	return l.err
}

func (l *log) Discard(context.Context) error {
	l.epoch, l.entries, l.err = l.epoch+"'", nil, nil
	clear(l.store.objects)
	return nil
}

func (l *log) Bounds() journal.Bounds {
	return journal.Bounds{Epoch: l.epoch, Oldest: l.newest - uint64(len(l.entries)) + 1, Newest: l.newest}
}

// add appends an entry that adds a worker, or that stores a block if hash is not 0.
func (l *log) add(t *testing.T, worker string, hash uint64) {
	t.Helper()
	ev := &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}}}
	if hash != 0 {
		ev = &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{
			Stored: &kvcastv1.Stored{BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash + 1}},
		}}
	}
	for _, e := range l.entries {
		if e.Worker == worker {
			ev.EventId++
		}
	}
	ev.EventId++
	body, err := proto.Marshal(&kvcastv1.Entry{Worker: worker, Model: "m", Events: []*kvcastv1.RouterEvent{ev}})
	if err != nil {
		t.Fatal(err)
	}
	l.newest++
	l.entries = append(l.entries, jetstream.Entry{Seq: l.newest, Worker: worker, Body: body})
}

// recorder is a Pipeline that records its calls.
type recorder struct{ calls []string }

func (r *recorder) Checkpoint(data []byte) error {
	r.calls = append(r.calls, "checkpoint "+string(data))
	if string(data) == "bad" {
		return errors.New("a bad checkpoint")
	}
	return nil
}

func (r *recorder) Known(worker, model string, lastEventID uint64) {
	r.calls = append(r.calls, fmt.Sprintf("known %s %q %d", worker, model, lastEventID))
}

func (r *recorder) Entry(seq uint64, worker string, _, _ []byte) error {
	r.calls = append(r.calls, fmt.Sprint("entry ", seq, " ", worker))
	return nil
}

// world is what an earlier run has left, and what Recover makes of it.
type world struct {
	store    *store
	workers  *store // registered
	log      *log
	lines    harness.Log
	index    *index.Index
	pipeline *recorder
	progress Progress
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{store: newStore(), workers: newStore(), index: index.New()}
	w.log = &log{store: w.store, epoch: "e"}
	w.log.add(t, "a", 0)
	w.log.add(t, "b", 0)
	w.log.add(t, "a", 10)
	w.log.add(t, "b", 20)
	w.log.add(t, "a", 11)
	return w
}

// checkpoint stores a checkpoint of a worker after an entry.
func (w *world) checkpoint(t *testing.T, worker string, seq uint64, change func(*statev1.WorkerCheckpoint)) {
	t.Helper()
	x := index.New()
	for _, e := range w.log.entries[:seq] {
		if err := x.ApplyBody(e.Seq, e.Body); err != nil {
			t.Fatal(err)
		}
	}
	state, _, _ := x.Checkpoint(t.Context(), worker)
	c := &statev1.WorkerCheckpoint{
		Version: version, Worker: worker, Pipeline: []byte("of " + worker), PipelineSeq: seq,
		IndexSeq: seq, IndexUpTo: seq, Index: state,
	}
	if change != nil {
		change(c)
	}
	b, err := proto.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	w.store.objects[workerPrefix+worker] = b
}

func (w *world) recover(t *testing.T) []ingestconfig.Worker {
	t.Helper()
	s, err := Recover(t.Context(), w.log, w.store, Registrations{w.workers}, w.lines.Logger(), &w.progress, w.index, func() Pipeline {
		w.pipeline = &recorder{}
		return w.pipeline
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantState compares the index with one that has applied all entries.
func (w *world) wantState(t *testing.T) {
	t.Helper()
	want := index.New()
	for _, e := range w.log.entries {
		if err := want.ApplyBody(e.Seq, e.Body); err != nil {
			t.Fatal(err)
		}
	}
	want.Advance(w.log.newest)
	all, seq := want.Workers(nil)
	got, gotSeq := w.index.Workers(nil)
	if diff := cmp.Diff(all, got, cmp.Comparer(equalAdded)); diff != "" || gotSeq != seq {
		t.Errorf("index at entry %d, want %d (-want +got):\n%s", gotSeq, seq, diff)
	}
}

// wantLogged fails the test unless each text is in the log.
func (w *world) wantLogged(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(w.lines.String(), text) {
			t.Errorf("not logged: %s\nin:\n%s", text, w.lines.String())
		}
	}
}

func equalAdded(a, b *kvcastv1.WorkerAdded) bool { return proto.Equal(a, b) }

func (w *world) wantCalls(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, w.pipeline.calls); diff != "" {
		t.Errorf("calls of the pipeline (-want +got):\n%s", diff)
	}
}

func TestStateIsThatAfterTheNewestEntry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.checkpoint(t, "a", 3, nil)
	w.checkpoint(t, "b", 4, nil)
	w.store.objects[removedName] = []byte("c")
	w.recover(t)
	w.wantState(t)
	w.wantCalls(t, "checkpoint c", "checkpoint of a", "checkpoint of b", "entry 1 a", "entry 2 b", "entry 3 a", "entry 4 b", "entry 5 a",
		`known a "m" 3`, `known b "m" 2`)
	if w.progress.Workers.Load() != 2 || w.progress.Seq.Load() != 5 || w.progress.Until.Load() != 5 {
		t.Errorf("progress: %d workers, entry %d of %d", w.progress.Workers.Load(), w.progress.Seq.Load(), w.progress.Until.Load())
	}
}

// TestUnreadableCheckpointsFallBackToTheEntries damages the checkpoint of worker a.
func TestUnreadableCheckpointsFallBackToTheEntries(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(t *testing.T, w *world){
		"the checksum is wrong": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, nil)
			w.store.damaged[workerPrefix+"a"] = true
		},
		"proto": func(_ *testing.T, w *world) { w.store.objects[workerPrefix+"a"] = []byte("x") },
		"it has format version 2, and this kvcast reads version 1": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, func(c *statev1.WorkerCheckpoint) { c.Version = 2 })
		},
		"it is of worker": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, func(c *statev1.WorkerCheckpoint) { c.Worker = "b" })
		},
		"its seqs are not ascending": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, func(c *statev1.WorkerCheckpoint) { c.PipelineSeq = 4 })
		},
		"blocks 1 of 1": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, func(c *statev1.WorkerCheckpoint) { c.Index.Blocks[0] = []byte{0x12, 9} })
		},
		"a bad checkpoint": func(t *testing.T, w *world) {
			w.checkpoint(t, "a", 3, func(c *statev1.WorkerCheckpoint) { c.Pipeline = []byte("bad") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			damage(t, w)
			w.recover(t)
			w.wantState(t)
			if !slices.Contains(w.pipeline.calls, `known a "" 0`) {
				t.Errorf("the pipeline does not know that routers know worker a: %q", w.pipeline.calls)
			}
			w.wantLogged(t, "a checkpoint cannot be read: its worker is recovered from the journal's entries", "object=worker.a", name)
		})
	}
}

// TestRecoveryNeedsAListOfTheCheckpoints fails to list the stored objects, as when NATS servers do not answer.
func TestRecoveryNeedsAListOfTheCheckpoints(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.checkpoint(t, "a", 3, nil)
	w.store.unlisted = errors.New("no answer")
	_, err := Recover(t.Context(), w.log, w.store, Registrations{w.workers}, w.lines.Logger(), &w.progress, w.index, func() Pipeline { return &recorder{} })
	if !errors.Is(err, w.store.unlisted) || !strings.Contains(err.Error(), "read checkpoints") {
		t.Errorf("got error %v, want %v", err, w.store.unlisted)
	}
	if len(w.log.entries) == 0 {
		t.Error("the journal was discarded")
	}
}

func TestProgressIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.log.pause = 400 * time.Millisecond
		w.recover(t)
		w.lines.Want(t, "level=INFO msg=recovering checkpoints=0 seq=3 newest_seq=5")
		if n := strings.Count(w.lines.String(), "msg=recovering"); n != 1 {
			t.Errorf("logged %d times in 2 s, want once after 1.2 s", n)
		}
	})
}

func TestUnreadableRecordOfRemovedWorkersIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.store.objects[removedName] = []byte("bad")
	w.recover(t)
	w.wantState(t)
	if !slices.Contains(w.pipeline.calls, `known  "" 0`) {
		t.Errorf("the pipeline does not know that the record is lost: %q", w.pipeline.calls)
	}
	w.wantLogged(t, "the record of removed workers cannot be read", "object=removed")
}

// TestUnreadableJournalBeginsANewEpoch recovers a journal that has lost entries.
func TestUnreadableJournalBeginsANewEpoch(t *testing.T) {
	t.Parallel()
	registered := ingestconfig.Worker{Name: "r", Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: "tcp://127.0.0.1:1", DPSize: 1}}}
	for name, damage := range map[string]func(w *world){
		"journal is unreadable: entry 6":                     func(w *world) { w.log.err = fmt.Errorf("%w: entry 6", jetstream.ErrUnreadable) },
		"a checkpoint has seen entry 5, and the newest is 4": func(w *world) { w.log.entries, w.log.newest = w.log.entries[:4], 4 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.checkpoint(t, "a", 5, nil)
			if err := (Registrations{w.workers}).Add(t.Context(), registered); err != nil {
				t.Fatal(err)
			}
			damage(w)
			s := w.recover(t)
			w.wantState(t)
			w.wantCalls(t)
			if w.log.epoch != "e'" {
				t.Errorf("epoch: %s", w.log.epoch)
			}
			if diff := cmp.Diff([]ingestconfig.Worker{registered}, s); diff != "" {
				t.Errorf("registered workers (-want +got):\n%s", diff)
			}
			if _, ok := w.workers.objects["r"]; !ok || len(w.store.objects) != 0 {
				t.Errorf("stored: %v, want the registration alone", slices.Collect(maps.Keys(w.store.objects)))
			}
			w.wantLogged(t, "level=ERROR", "starting with an empty journal and a new epoch", name)
		})
	}
}

func TestRegistrationsSurvive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	want := ingestconfig.Worker{
		Name: "r", Model: "m", BlockSize: 16, Endpoint: "h:1", Labels: map[string]string{"k": "v"}, Consolidate: feed.ConsolidateDedup,
		Sources: []ingestconfig.Source{
			{Engine: feed.EngineVLLM, Connect: "tcp://127.0.0.1:1", Replay: "tcp://127.0.0.1:2", DPSize: 1, Copies: ingestconfig.CopiesCounted},
			{Engine: feed.EngineKVBM, Connect: "tcp://127.0.0.1:3", DPSize: 1, Topic: "t"},
		},
	}
	r := Registrations{w.workers}
	if err := errors.Join(r.Add(t.Context(), want), r.Add(t.Context(), ingestconfig.Worker{Name: "gone"}), r.Remove(t.Context(), "gone")); err != nil {
		t.Fatal(err)
	}
	w.workers.objects["bad"], w.workers.objects["damaged"], w.workers.damaged["damaged"] = []byte("x"), nil, true
	if diff := cmp.Diff([]ingestconfig.Worker{want}, w.recover(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	w.wantLogged(t, `msg="a registration cannot be read: register the worker again" worker=bad`, `worker=damaged error="the checksum is wrong"`)
	w.workers.fail = errors.New("disk full")
	if err := r.Add(t.Context(), want); err == nil || !strings.Contains(err.Error(), `registration of worker "r": disk full`) {
		t.Errorf("add to a full disk: %v", err)
	}
}

// TestRegistrationsAmongTheCheckpointsAreMoved reads what format 1 of the journal has.
func TestRegistrationsAmongTheCheckpointsAreMoved(t *testing.T) {
	t.Parallel()
	worker := func(name, endpoint string) (ingestconfig.Worker, []byte) {
		w := ingestconfig.Worker{Name: name, Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: endpoint, DPSize: 1}}}
		b, err := encodeRegistration(w)
		if err != nil {
			t.Fatal(err)
		}
		return w, b
	}
	w := newWorld(t)
	moved, movedData := worker("moved", "tcp://127.0.0.1:1")
	_, oldData := worker("newer", "tcp://127.0.0.1:1")
	newer, newerData := worker("newer", "tcp://127.0.0.1:2")
	w.store.objects["registered.moved"], w.store.objects["registered.newer"] = movedData, oldData
	w.store.objects["registered.bad"] = []byte("x")
	w.workers.objects["newer"] = newerData
	for range 2 {
		if diff := cmp.Diff([]ingestconfig.Worker{moved, newer}, w.recover(t), cmpopts.SortSlices(func(a, b ingestconfig.Worker) bool { return a.Name < b.Name })); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if got := slices.Sorted(maps.Keys(w.store.objects)); !slices.Equal(got, []string{"registered.bad"}) {
			t.Errorf("among the checkpoints are %v, want the one that cannot be read", got)
		}
		w.wantLogged(t, "a registration cannot be read: register the worker again", "worker=bad")
		w.index.Reset()
	}
	w.store.objects["registered.moved"] = movedData
	delete(w.workers.objects, "moved")
	w.workers.fail = errors.New("disk full")
	if _, err := Recover(t.Context(), w.log, w.store, Registrations{w.workers}, w.lines.Logger(), &w.progress, w.index,
		func() Pipeline { return &recorder{} }); !errors.Is(err, w.workers.fail) || w.store.objects["registered.moved"] == nil {
		t.Errorf("moved to a full disk: %v", err)
	}
}

package pipeline_test

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// storedEntry is an entry of a durable journal, whose seq is its index plus 1.
type storedEntry struct {
	worker      string
	body, state []byte
}

// storage is a durable journal that acknowledges at once.
type storage struct{ entries []storedEntry }

func (s *storage) Append(_ context.Context, r journal.Record) (journal.Pending, error) {
	s.entries = append(s.entries, storedEntry{r.Source.Worker, slices.Clone(r.Body), slices.Clone(r.State)})
	return journal.Acknowledged(uint64(len(s.entries))), nil
}

// decoded returns the entries from index i.
func (s *storage) decoded(t *testing.T, i int) (all []*kvcastv1.Entry) {
	t.Helper()
	for _, e := range s.entries[i:] {
		entry := new(kvcastv1.Entry)
		if err := proto.Unmarshal(e.body, entry); err != nil {
			t.Fatal(err)
		}
		all = append(all, entry)
	}
	return all
}

// recoverable is a pipeline on a storage.
type recoverable struct {
	*subject
	storage *storage
	cfg     pipeline.Config
}

func newRecoverable(t *testing.T, cfg pipeline.Config) *recoverable {
	t.Helper()
	cfg.Durable = true
	r := &recoverable{storage: &storage{}, cfg: cfg}
	p, err := pipeline.New(cfg, r.storage)
	r.start(t, p, err)
	return r
}

func (r *recoverable) start(t *testing.T, p *pipeline.Pipeline, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	r.subject = &subject{pipeline: p, lanes: make(map[string]feed.Lane)}
}

// play makes calls, and returns the entries that they append.
func (r *recoverable) play(t *testing.T, calls ...call) []*kvcastv1.Entry {
	t.Helper()
	before := len(r.storage.entries)
	for _, c := range calls {
		c.on(r.subject)
	}
	return r.storage.decoded(t, before)
}

// checkpoint returns the checkpoint of the worker, once it is stored.
func (r *recoverable) checkpoint(t *testing.T, worker string) []byte {
	t.Helper()
	c, ok := r.pipeline.Checkpoint(worker, []byte("ingest"))
	if !ok {
		t.Fatalf("no checkpoint of %q", worker)
	}
	r.pipeline.CheckpointStored(c)
	return c.Data
}

// read reads checkpoints and the entries after a seq.
func (r *recoverable) read(t *testing.T, after int, checkpoints ...[]byte) *pipeline.Recovery {
	t.Helper()
	rec := pipeline.Recover(r.cfg)
	for _, c := range checkpoints {
		if err := rec.Checkpoint(c); err != nil {
			t.Fatal(err)
		}
	}
	for i, e := range r.storage.entries[after:] {
		if err := rec.Entry(uint64(after+i+1), e.worker, e.body, e.state); err != nil {
			t.Fatal(err)
		}
	}
	return rec
}

// crash recovers from checkpoints and the entries after a seq. It returns the entries that this appends.
func (r *recoverable) crash(t *testing.T, after int, checkpoints ...[]byte) []*kvcastv1.Entry {
	t.Helper()
	rec := r.read(t, after, checkpoints...)
	before := len(r.storage.entries)
	p, err := rec.Pipeline(r.storage)
	r.start(t, p, err)
	return r.storage.decoded(t, before)
}

// withProgress sets the cursor of a batch.
func withProgress(cursor string, c call) call {
	c.Batch.Progress = feed.Progress{Publisher: feed.Publisher{Rank: c.Batch.Rank}, Cursor: []byte(cursor)}
	return c
}

func wantEntries(t *testing.T, what string, got []*kvcastv1.Entry, want ...[]string) {
	t.Helper()
	if diff := cmp.Diff(append([][]string{}, want...), describe(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// TestSuppressedRemoveIsRecovered stores a block twice, and removes it once before and once after a crash. The first remove
// emits nothing: it is logged with the next entry, or in a checkpoint, or ingest reads it again.
func TestSuppressedRemoveIsRecovered(t *testing.T) {
	tests := map[string]struct {
		before     []call
		checkpoint bool
		after      []call
	}{
		"from the next entry":                 {[]call{batch(remove(1)), batch(store(2))}, false, []call{batch(remove(1))}},
		"from a checkpoint":                   {[]call{batch(remove(1))}, true, []call{batch(remove(1))}},
		"from the engine":                     {[]call{batch(remove(1))}, false, []call{batch(remove(1)), batch(remove(1))}},
		"from an entry after the checkpoint":  {[]call{batch(store(3)), batch(remove(1)), batch(store(2))}, false, []call{batch(remove(1))}},
		"from the entry that has another run": {[]call{batch(remove(1), store(2))}, false, []call{batch(remove(1))}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRecoverable(t, pipeline.Config{})
			r.play(t, added(), batch(store(1)), batch(store(1)))
			r.play(t, test.before...)
			var checkpoints [][]byte
			if test.checkpoint {
				checkpoints = append(checkpoints, r.checkpoint(t, testWorker))
			}
			wantEntries(t, "recovery", r.crash(t, 0, checkpoints...))
			wantEntries(t, "after the crash", r.play(t, append([]call{added()}, test.after...)...), []string{"remove [1]"})
		})
	}
}

// TestChangesInACheckpointAreNotRepeated logs a change with an entry after the checkpoint that has it.
func TestChangesInACheckpointAreNotRepeated(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)), batch(store(1)), batch(store(1)), batch(remove(1)))
	c, ok := r.pipeline.Checkpoint(testWorker, nil)
	if !ok {
		t.Fatal("no checkpoint")
	}
	r.play(t, batch(store(2))) // before it is known that the checkpoint is stored
	r.crash(t, 0, c.Data)
	wantEntries(t, "two copies are left", r.play(t, added(), batch(remove(1)), batch(remove(1))), []string{"remove [1]"})
}

// TestStoredCheckpointDropsWaitingChanges logs no change that a stored checkpoint has.
func TestStoredCheckpointDropsWaitingChanges(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)), batch(store(1)), batch(store(1)), batch(remove(1)))
	checkpoint := r.checkpoint(t, testWorker)
	r.play(t, batch(remove(1)), batch(store(2)))
	var state statev1.EntryState
	if err := proto.Unmarshal(r.storage.entries[len(r.storage.entries)-1].state, &state); err != nil {
		t.Fatal(err)
	}
	if state.GetFirstChange() != 1 || len(state.GetChanges()) != 1 {
		t.Errorf("changes of the next entry: got %v, want only the second", &state)
	}
	r.crash(t, 0, checkpoint)
	wantEntries(t, "one copy is left", r.play(t, added(), batch(remove(1))), []string{"remove [1]"})
}

// TestStateOfRareEventsIsRecovered compares the lane before and after a crash. The last call of each case logs the state of those
// before.
func TestStateOfRareEventsIsRecovered(t *testing.T) {
	detected := func(events ...wire.Event) call {
		c := batch(events...)
		c.Batch.CopyRule = feed.CopyRuleDetected
		return c
	}
	pass := call{Worker: testWorker, Add: &feed.Worker{
		Name: testWorker, Sources: []feed.Engine{feed.EngineVLLM, feed.EngineKVBM}, Consolidate: feed.ConsolidatePassthrough,
	}}
	tests := map[string]struct {
		cfg   pipeline.Config
		calls []call
	}{
		"tiers that sources share become stale": {calls: []call{
			pass, batch(store(1)), by2(batch(store(1, 2), inTier(kvblock.TierDisk, store(3)))), batch(cleared()),
		}},
		"tiers that sources share are cleared": {cfg: pipeline.Config{OnGap: pipeline.OnGapClear}, calls: []call{
			pass, batch(store(1)), by2(batch(store(1, 2), inTier(kvblock.TierDisk, store(3)))), batch(cleared()),
		}},
		"removes of an engine that announces blocks are suppressed": {calls: []call{
			added(), detected(store(1, 2)), detected(store(1, 2), after(2, store(3))), detected(store(1, 2), after(2, store(4))),
			detected(store(1, 2), after(2, store(5))), detected(remove(1), store(9)),
		}},
		"blocks of another size are removed": {calls: []call{
			added(), batch(withBlockSize(3, store(1, 2))), batch(replacing(store(3))),
		}},
		"an engine says how many copies remain": {calls: []call{
			added(), batch(store(1)), gap(0), batch(remaining(3, 1)), batch(store(2)),
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRecoverable(t, test.cfg)
			if got := r.play(t, test.calls...); len(got) < 2 {
				t.Fatalf("entries: got %v", describe(got))
			}
			want := pipeline.StateOf(r.lanes[testWorker])
			r.crash(t, 0)
			if diff := cmp.Diff(want, pipeline.StateOf(r.pipeline.Lanes()[testWorker])); diff != "" {
				t.Errorf("lane (-want +got):\n%s", diff)
			}
		})
	}
}

// remaining returns a remove of a block that leaves n copies.
func remaining(n uint32, hash uint64) wire.Event {
	e := remove(hash)
	e.Rare = &wire.Rare{RemainingCopies: []uint32{n}}
	return e
}

// TestPartOfABatchIsNotRecovered crashes between the entries of a large batch. The engine's replay repeats the batch.
func TestPartOfABatchIsNotRecovered(t *testing.T) {
	testclass.WithoutRace(t)
	cfg := pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks}
	large := func() call { return withProgress("large", batch(append(largeStores(12), remove(1))...)) }
	r := newRecoverable(t, cfg)
	r.play(t, added(), withProgress("before", batch(store(1))), large())
	if n := len(r.storage.entries); n != 4 {
		t.Fatalf("%d entries, want 4", n)
	}
	r.storage.entries = r.storage.entries[:3]
	rec := r.read(t, 0)
	if got := string(rec.Workers()[0].Cursors[feed.Publisher{}]); got != "before" {
		t.Errorf("cursor: got %q, want before", got)
	}
	p, err := rec.Pipeline(r.storage)
	r.start(t, p, err)
	if got := len(p.Tables()[pipeline.Place{Worker: testWorker, Tier: kvcastv1.Tier_TIER_DEVICE}]); got != 1 {
		t.Errorf("blocks: got %d, want 1", got)
	}
	again := r.play(t, added(), large())
	if got, want := eventIDs(again)[0], eventIDs(r.storage.decoded(t, 0)[:3]); got != want[len(want)-1]+1 {
		t.Errorf("event id after the crash: got %d, want that after %d", got, want[len(want)-1])
	}
	if got := string(r.read(t, 0).Workers()[0].Cursors[feed.Publisher{}]); got != "large" {
		t.Errorf("cursor after the whole batch: got %q, want large", got)
	}
	want := pipeline.StateOf(r.lanes[testWorker])
	r.crash(t, 0)
	if got := pipeline.StateOf(r.pipeline.Lanes()[testWorker]); !reflect.DeepEqual(got, want) { // cmp.Diff is slow
		t.Error("the lane after a second crash differs")
	}
}

// TestPendingEventsAreRecovered crashes while events wait for the next batch.
func TestPendingEventsAreRecovered(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{Timeout: pipeline.MaxBatchTimeout})
	r.play(t, added(), withProgress("1", batch(store(1), remove(5), store(2))))
	r.play(t, withProgress("2", batch(after(2, store(3))))) // logs nothing
	rec := r.read(t, 0)
	if got := string(rec.Workers()[0].Cursors[feed.Publisher{}]); got != "1" {
		t.Errorf("cursor: got %q, want 1", got)
	}
	r.crash(t, 0)
	wantEntries(t, "after the crash", r.play(t, added(), withProgress("2", batch(after(2, store(3)))), removed()),
		[]string{"store [2 3]"}, []string{"removed DISCOVERY"})
}

func TestLostStateRemovesTheWorker(t *testing.T) {
	run := func(t *testing.T) (r *recoverable, checkpoint []byte) {
		t.Helper()
		r = newRecoverable(t, pipeline.Config{})
		r.play(t, added(), batch(store(1)))
		checkpoint = r.checkpoint(t, testWorker)
		r.play(t, batch(store(2)), batch(store(3)))
		return r, checkpoint
	}
	tests := map[string]struct {
		recovery func(*testing.T, *recoverable, []byte) *pipeline.Recovery
		cause    string
	}{
		"entries after the checkpoint are missing": {func(t *testing.T, r *recoverable, c []byte) *pipeline.Recovery {
			return r.read(t, 3, c)
		}, "event 4 follows event 2"},
		"the checkpoint is missing, and the journal does not reach back": {func(t *testing.T, r *recoverable, _ []byte) *pipeline.Recovery {
			return r.read(t, 1)
		}, "WorkerAdded is missing"},
		"routers have later events": {func(t *testing.T, r *recoverable, c []byte) *pipeline.Recovery {
			rec := r.read(t, 4, c)
			rec.Known(testWorker, "m", 4)
			return rec
		}, "routers have events up to 4"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r, checkpoint := run(t)
			rec := test.recovery(t, r, checkpoint)
			if got := fmt.Sprint(rec.Lost()[testWorker]); !strings.Contains(got, test.cause) {
				t.Errorf("cause: got %q, want %q", got, test.cause)
			}
			if got := rec.Workers(); len(got) != 0 {
				t.Errorf("recovered: got %v, want nothing", got)
			}
			p, err := rec.Pipeline(r.storage)
			r.start(t, p, err)
			got := append(r.storage.decoded(t, 4), r.play(t, added(), batch(store(1)))...)
			wantEntries(t, "entries", got, []string{"removed DISCONNECTED"}, []string{"added"}, []string{"store [1]"})
			if diff := cmp.Diff([]uint64{5, 6, 7}, eventIDs(got)); diff != "" {
				t.Errorf("event ids (-want +got):\n%s", diff)
			}
			r.crash(t, 0)
			if got := r.pipeline.Tables(); len(got) != 1 {
				t.Errorf("after another crash: got %v, want block 1", got)
			}
		})
	}
}

// TestWorkerWithoutCheckpointIsRemoved reports workers whose checkpoints cannot be read, and of which the journal has no entry.
func TestWorkerWithoutCheckpointIsRemoved(t *testing.T) {
	const unknown = 1 << 48
	tests := map[string]struct {
		known func(*pipeline.Recovery)
		want  [][]string
		ids   []uint64
	}{
		"its last event id is unknown": {func(r *pipeline.Recovery) {
			r.Known(testWorker, "", 0)
		}, [][]string{{"removed DISCONNECTED"}, {"added"}}, []uint64{unknown + 1, unknown + 2}},
		"its last event id is known from the index": {func(r *pipeline.Recovery) {
			r.Known(testWorker, "", 0)
			r.Known(testWorker, "m", 7)
		}, [][]string{{"removed DISCONNECTED"}, {"added"}}, []uint64{8, 9}},
		"it may be among the removed workers": {func(r *pipeline.Recovery) {
			r.Known(pipeline.RemovedWorkers, "", 0)
		}, [][]string{{"added"}}, []uint64{unknown + 1}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRecoverable(t, pipeline.Config{})
			rec := r.read(t, 0)
			test.known(rec)
			p, err := rec.Pipeline(r.storage)
			r.start(t, p, err)
			got := append(r.storage.decoded(t, 0), r.play(t, added())...)
			wantEntries(t, "entries", got, test.want...)
			if diff := cmp.Diff(test.ids, eventIDs(got)); diff != "" {
				t.Errorf("event ids (-want +got):\n%s", diff)
			}
		})
	}
}

// TestInvalidCheckpointsAreRefused checks that a checkpoint which cannot be read changes nothing, so that the worker is recovered
// from the journal if that reaches back.
func TestInvalidCheckpointsAreRefused(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)), batch(store(2)))
	data := r.checkpoint(t, testWorker)
	change := func(f func(*statev1.Checkpoint)) []byte {
		var c statev1.Checkpoint
		if err := proto.Unmarshal(data, &c); err != nil {
			t.Fatal(err)
		}
		f(&c)
		b, err := proto.Marshal(&c)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	tests := map[string]struct {
		data []byte
		want string
	}{
		"cut":                {data[:len(data)-1], "restore pipeline checkpoint"},
		"empty":              {nil, "no version"},
		"newer":              {change(func(c *statev1.Checkpoint) { c.Version = 2 }), "version 2, want at most 1: a later version of kvcast has stored it: use that version or a later one"},
		"nothing":            {change(func(c *statev1.Checkpoint) { c.Lane = nil }), "no state"},
		"nameless":           {change(func(c *statev1.Checkpoint) { c.Lane.Worker = nil }), "without a name"},
		"a parent is absent": {change(func(c *statev1.Checkpoint) { c.Tables[0].ParentHashes = nil }), "2 blocks with 0 parents"},
		"no attributes":      {change(func(c *statev1.Checkpoint) { c.Tables[0].Attributes = nil }), "are missing"},
		"a block twice":      {change(func(c *statev1.Checkpoint) { c.Tables[0].BlockHashes[0] = c.Tables[0].BlockHashes[1] }), "twice"},
		"unknown tier":       {change(func(c *statev1.Checkpoint) { c.Tables[0].Tier = kvblock.TierEnd }), "unknown"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			rec := pipeline.Recover(r.cfg)
			if err := rec.Checkpoint(test.data); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error: got %v, want %q", err, test.want)
			}
			for i, e := range r.storage.entries {
				if err := rec.Entry(uint64(i+1), e.worker, e.body, e.state); err != nil {
					t.Fatal(err)
				}
			}
			if got := rec.Workers(); len(got) != 1 || got[0].Checkpoint != nil {
				t.Errorf("recovered from entries: got %v, want the worker", got)
			}
		})
	}
}

func TestEntriesOfLaterVersionsAreRefused(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added())
	e := r.storage.entries[0]
	var state statev1.EntryState
	if err := proto.Unmarshal(e.state, &state); err != nil {
		t.Fatal(err)
	}
	state.Version = 2
	later, err := proto.Marshal(&state)
	if err != nil {
		t.Fatal(err)
	}
	const advice = "a later version of kvcast has stored it: use that version or a later one"
	for what, state := range map[string][]byte{"version 2, want at most 1: " + advice: later, "no version": nil} {
		if err := pipeline.Recover(r.cfg).Entry(1, e.worker, e.body, state); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("error: got %v, want %q", err, what)
		}
	}
	r.play(t, batch(store(1)))
	rec := pipeline.Recover(r.cfg)
	if err := rec.Entry(1, e.worker, e.body, e.state); err != nil {
		t.Fatal(err)
	}
	e = r.storage.entries[1]
	var body kvcastv1.Entry
	if err := proto.Unmarshal(e.body, &body); err != nil {
		t.Fatal(err)
	}
	unknown := protowire.AppendTag(nil, 100, protowire.BytesType) // where the event has its kind
	body.Events[0].Event = nil
	body.Events[0].ProtoReflect().SetUnknown(protowire.AppendBytes(unknown, nil))
	changed, err := proto.Marshal(&body)
	if err != nil {
		t.Fatal(err)
	}
	if err := rec.Entry(2, e.worker, changed, e.state); err == nil || !strings.Contains(err.Error(), "event of the unknown kind") || !strings.Contains(err.Error(), advice) {
		t.Errorf("an event of a later version: got %v, want %q", err, advice)
	}
}

func TestRecoveredWorkerThatDiffersIsAddedAnew(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)))
	r.crash(t, 0)
	moved := call{Worker: testWorker, Add: &feed.Worker{Name: testWorker, Model: "m", Endpoint: "10.0.0.6:8000"}}
	wantEntries(t, "entries", r.play(t, moved, batch(store(2))), []string{"removed DISCOVERY"}, []string{"added"}, []string{"store [2]"})
}

func TestRecoveredWorkerIsRemovedWithoutBeingAdded(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)))
	r.crash(t, 0)
	wantEntries(t, "entries", r.play(t, removed()), []string{"removed DISCOVERY"})
	r.crash(t, 0)
	got := r.play(t, added())
	if diff := cmp.Diff([]uint64{4}, eventIDs(got)); diff != "" {
		t.Errorf("event id of the worker that returns (-want +got):\n%s", diff)
	}
}

// TestEventIDsOfRemovedWorkersAreRecovered keeps no entry of the worker.
func TestEventIDsOfRemovedWorkersAreRecovered(t *testing.T) {
	r := newRecoverable(t, pipeline.Config{})
	r.play(t, added(), batch(store(1)))
	old := r.checkpoint(t, testWorker)
	r.play(t, removed())
	if diff := cmp.Diff([]string{pipeline.RemovedWorkers}, r.pipeline.CheckpointDue()); diff != "" {
		t.Errorf("due (-want +got):\n%s", diff)
	}
	if got := r.pipeline.RetainAfter(3); got != 2 {
		t.Errorf("needed: got entries after %d, want 2", got)
	}
	removedWorkers := r.checkpoint(t, pipeline.RemovedWorkers)
	if diff := cmp.Diff([]string{testWorker}, r.pipeline.ObsoleteCheckpoints()); diff != "" {
		t.Errorf("obsolete (-want +got):\n%s", diff)
	}
	if got, due := r.pipeline.RetainAfter(3), r.pipeline.CheckpointDue(); got != 3 || len(due) > 0 {
		t.Errorf("once it is stored: entries after %d are needed, and %q are due, want no more", got, due)
	}
	for name, checkpoints := range map[string][][]byte{
		"with the old checkpoint after it":  {removedWorkers, old},
		"with the old checkpoint before it": {old, removedWorkers},
		"alone":                             {removedWorkers},
	} {
		r.crash(t, len(r.storage.entries), checkpoints...)
		if got, want := r.pipeline.ObsoleteCheckpoints(), checkpoints; len(got) != len(want)-1 {
			t.Errorf("%s: obsolete: got %q", name, got)
		}
		if diff := cmp.Diff([]uint64{4}, eventIDs(r.play(t, added()))); diff != "" {
			t.Errorf("%s: event id of the worker that returns (-want +got):\n%s", name, diff)
		}
	}
}

// TestCheckpointIsDueAfterManyBytes appends entries of one worker, and a single one of another.
func TestCheckpointIsDueAfterManyBytes(t *testing.T) {
	testclass.WithoutRace(t)
	r := newRecoverable(t, pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks})
	r.play(t, added(), call{Worker: "idle", Add: &feed.Worker{Name: "idle"}}, call{Worker: "other", Add: &feed.Worker{Name: "other"}})
	r.checkpoint(t, "idle")
	large := batch(largeStores(11)...)
	for bytes := 0; ; {
		for _, e := range r.play(t, large) {
			bytes += size(e)
		}
		due := r.pipeline.CheckpointDue()
		if bytes < 31<<20 && len(due) > 0 {
			t.Fatalf("due after %d bytes: %q", bytes, due)
		}
		if bytes > 33<<20 {
			if diff := cmp.Diff([]string{"other", testWorker}, due); diff != "" {
				t.Errorf("due after %d bytes (-want +got):\n%s", bytes, diff)
			}
			break
		}
	}
	r.checkpoint(t, testWorker)
	r.checkpoint(t, "other")
	if due := r.pipeline.CheckpointDue(); len(due) > 0 {
		t.Errorf("due once they are stored: %q", due)
	}
}

// TestCheckpointIsDueAfterManyChanges suppresses removes, which emit nothing, until a checkpoint is due; later the changes are dropped.
func TestCheckpointIsDueAfterManyChanges(t *testing.T) {
	testclass.WithoutRace(t)
	r := newRecoverable(t, pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks})
	stores, remaining := largeStores(1)[0], wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice}
	remaining.BlockHashes = stores.BlockHashes
	remaining.Rare = &wire.Rare{RemainingCopies: slices.Repeat([]uint32{1}, len(stores.BlockHashes))}
	r.play(t, added(), batch(stores))
	for n := 0; len(r.pipeline.CheckpointDue()) == 0; n++ {
		if n == 3 {
			t.Fatalf("no checkpoint is due after %d removes", n*len(stores.BlockHashes))
		}
		r.play(t, batch(remaining))
	}
	checkpoint := r.checkpoint(t, testWorker)
	if due := r.pipeline.CheckpointDue(); len(due) > 0 {
		t.Errorf("due once it is stored: %q", due)
	}
	for range (16 << 20) / (8 * len(stores.BlockHashes)) {
		r.play(t, batch(remaining))
	}
	wantEntries(t, "entries", r.play(t, batch(store(1))), []string{"store [1]"})
	if n := len(r.storage.entries[2].state); n > 17<<20 {
		t.Errorf("state: got %d bytes, want at most 16 MiB", n)
	}
	if lost := r.read(t, 0, checkpoint).Lost(); !strings.Contains(fmt.Sprint(lost[testWorker]), "changes without events are missing") {
		t.Errorf("lost: got %v", lost)
	}
	if lost := r.read(t, 0, r.checkpoint(t, testWorker)).Lost(); len(lost) > 0 {
		t.Errorf("lost with a later checkpoint: %v", lost)
	}
}

// TestMemoryJournalGetsNoState checks that nothing is recorded without a durable journal.
func TestMemoryJournalGetsNoState(t *testing.T) {
	s := &storage{}
	p, err := pipeline.New(pipeline.Config{}, s)
	if err != nil {
		t.Fatal(err)
	}
	p.AddWorker(feed.Worker{Name: "w"}).Batch(&feed.Batch{Events: []wire.Event{store(1)}, Progress: feed.Progress{Cursor: []byte("c")}})
	for _, e := range s.entries {
		if e.state != nil {
			t.Errorf("state: got %d bytes, want none", len(e.state))
		}
	}
	if _, ok := p.Checkpoint("w", nil); ok || len(p.CheckpointDue()) > 0 {
		t.Error("got a checkpoint without a durable journal")
	}
}

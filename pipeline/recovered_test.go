package pipeline_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// durableLog is a durable journal. With each entry it keeps the state of the worker's lane, for comparison.
type durableLog struct {
	mu      sync.Mutex // guards the fields below
	entries []loggedEntry
	lanes   map[string]feed.Lane // of the running pipeline
	call    int                  // number of the call in progress
	lives   int                  // number of crashes
	closing bool                 // entries are acknowledged at once
}

type loggedEntry struct {
	seq         uint64
	worker      string
	body, state []byte
	decoded     *kvcastv1.Entry
	// lane is the state of the lane after the last of the batch's entries, and for an earlier one, the state before
	// it. It is nil after the worker was removed.
	lane *pipeline.LaneState
	call int
	ack  *journal.Ack // nil if the entry is acknowledged
}

func (e *loggedEntry) lastEventID() uint64 {
	return e.decoded.GetEvents()[len(e.decoded.GetEvents())-1].GetEventId()
}

// life is the journal of one life of the pipeline.
type life struct {
	*durableLog
	number int
}

func (d life) Append(_ context.Context, r journal.Record) (journal.Pending, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.number != d.lives {
		return journal.Pending{}, journal.ErrClosed // a timer of a pipeline that has crashed
	}
	return d.append(r)
}

// append appends an entry. The lock is held.
func (d *durableLog) append(r journal.Record) (journal.Pending, error) {
	e := loggedEntry{
		worker: r.Source.Worker, body: slices.Clone(r.Body), state: slices.Clone(r.State), decoded: new(kvcastv1.Entry), call: d.call, seq: 1,
	}
	if n := len(d.entries); n > 0 {
		e.seq = d.entries[n-1].seq + 1
	}
	var state statev1.EntryState
	if err := proto.Unmarshal(e.state, &state); err != nil {
		return journal.Pending{}, err
	}
	if err := isWhatMarshalGives(&state, e.state); err != nil {
		return journal.Pending{}, err
	}
	if err := proto.Unmarshal(e.body, e.decoded); err != nil {
		return journal.Pending{}, err
	}
	last := e.decoded.GetEvents()[len(e.decoded.GetEvents())-1]
	lane := d.lanes[e.worker]
	switch {
	case last.GetWorkerRemoved() != nil || last.GetWorkerAdded() != nil: // added sets the state
	case state.GetPartial():
		before := *d.last(e.worker).lane
		before.LastEventID = last.GetEventId()
		e.lane = &before
	default:
		s := pipeline.StateOfLocked(lane)
		e.lane = &s
	}
	if d.closing {
		d.entries = append(d.entries, e)
		return journal.Acknowledged(e.seq), nil
	}
	e.ack = new(journal.Ack)
	d.entries = append(d.entries, e)
	return e.ack.Pending(), nil
}

// isWhatMarshalGives returns an error unless the encoding of a message is that of generated code.
func isWhatMarshalGives(m proto.Message, encoded []byte) error {
	want, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err == nil && !bytes.Equal(want, encoded) {
		err = fmt.Errorf("%T is not what proto.Marshal gives (-want +got):\n%s", m, cmp.Diff(want, encoded))
	}
	return err
}

// acknowledge acknowledges the entries of a worker up to a seq.
func (d *durableLog) acknowledge(worker string, seq uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.entries {
		if e := &d.entries[i]; e.worker == worker && e.seq <= seq && e.ack != nil {
			e.ack.Resolve(e.seq, nil)
			e.ack = nil
		}
	}
}

// begin begins a call. If the call closes the pipeline, all entries are acknowledged.
func (d *durableLog) begin(call int, closing bool) {
	d.mu.Lock()
	d.call, d.closing = call, closing
	workers := make(map[string]bool)
	for _, e := range d.entries {
		workers[e.worker] = true
	}
	d.mu.Unlock()
	for worker := range workers {
		if closing {
			d.acknowledge(worker, math.MaxUint64)
		}
	}
}

// pick returns the seq of a random entry, its worker, and the seq of the newest entry; 0 if there is none.
func (d *durableLog) pick(random *rand.Rand) (worker string, seq, newest uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.entries) == 0 {
		return "", 0, 0
	}
	e := &d.entries[random.IntN(len(d.entries))]
	return e.worker, e.seq, d.entries[len(d.entries)-1].seq
}

// all returns the entries.
func (d *durableLog) all() []loggedEntry {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.entries)
}

// added sets the state of a worker that was added.
func (d *durableLog) added(worker string, lane feed.Lane) {
	s := pipeline.StateOf(lane)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lanes[worker] = lane
	if e := d.last(worker); e.lane == nil {
		e.lane = &s
	}
}

// last returns the last entry of a worker; nil if there is none.
func (d *durableLog) last(worker string) *loggedEntry {
	for i := range slices.Backward(d.entries) {
		if d.entries[i].worker == worker {
			return &d.entries[i]
		}
	}
	return nil
}

// storedCheckpoint is a checkpoint with the lane's state at that time.
type storedCheckpoint struct {
	pipeline.Checkpoint
	lane pipeline.LaneState
}

// durableWorld runs calls on pipelines that crash and recover.
type durableWorld struct {
	t           *rapid.T
	random      *rand.Rand // decides about crashes, since rapid cannot draw within a synctest bubble
	cfg         pipeline.Config
	log         *durableLog
	checkpoints map[string]storedCheckpoint
	retainAfter uint64

	pipeline *pipeline.Pipeline
	subject  *subject
}

// start begins a life of the pipeline.
func (w *durableWorld) start(p *pipeline.Pipeline, err error) {
	if err != nil {
		w.t.Fatal(err)
	}
	w.pipeline = p
	w.subject = &subject{pipeline: p, lanes: make(map[string]feed.Lane)}
	w.log.mu.Lock()
	defer w.log.mu.Unlock()
	w.log.lanes = p.Lanes()
}

// do makes a call with its number, which is the cursor of the publisher, and every third time what ingest has learned.
func (w *durableWorld) do(number int, c call) {
	w.log.begin(number, c.Close)
	switch {
	case c.Batch != nil:
		b := *c.Batch
		b.Progress = progress(number, b.Source, b.Rank)
		c.Batch = &b
	case c.Gap != nil:
		g := *c.Gap
		g.Progress = progress(number, g.Source, g.Rank)
		c.Gap = &g
	case c.Restarted != nil:
		r := *c.Restarted
		r.Progress = progress(number, r.Source, r.Rank)
		c.Restarted = &r
	}
	c.on(w.subject)
	if c.Add != nil {
		w.log.added(c.Worker, w.subject.lanes[c.Worker])
	}
}

func progress(number, source int, rank uint32) feed.Progress {
	p := feed.Progress{Publisher: feed.Publisher{Source: source, Rank: rank}, Cursor: binary.AppendUvarint(nil, uint64(number))}
	if number%3 == 0 {
		p.Learned = p.Cursor
	}
	return p
}

func numberOf(cursor []byte) int {
	n, _ := binary.Uvarint(cursor)
	return int(n)
}

// checkpoint makes the checkpoint of a worker after a call, and stores it unless the storage fails.
func (w *durableWorld) checkpoint(worker string, call int, fails bool) {
	c, ok := w.pipeline.Checkpoint(worker, binary.AppendUvarint(nil, uint64(call)))
	if !ok || fails {
		return
	}
	var state statev1.Checkpoint
	if err := proto.Unmarshal(c.Data, &state); err != nil {
		w.t.Fatal(err)
	}
	if err := isWhatMarshalGives(&state, c.Data); err != nil {
		w.t.Fatal(err)
	}
	stored := storedCheckpoint{Checkpoint: c}
	if worker != pipeline.RemovedWorkers {
		stored.lane = pipeline.StateOf(w.log.lanes[worker])
		w.log.acknowledge(worker, math.MaxUint64)
	}
	w.checkpoints[worker] = stored
	w.pipeline.CheckpointStored(c)
	for _, name := range w.pipeline.ObsoleteCheckpoints() {
		delete(w.checkpoints, name)
	}
}

// crash drops the entries that are not acknowledged.
func (w *durableWorld) crash() {
	w.log.mu.Lock()
	defer w.log.mu.Unlock()
	w.log.lives++
	w.log.entries = slices.DeleteFunc(w.log.entries, func(e loggedEntry) bool { return e.ack != nil })
}

// recover continues with what is stored. It returns the number of the last call of each worker that is recovered.
func (w *durableWorld) recover(made []call) map[string]int {
	if w.cfg.Blocks != nil { // the new process has budgets of its own
		w.cfg.Blocks = budget.New("blocks", w.cfg.Blocks.Limit())
		w.cfg.AttributeBytes = budget.New("attribute_bytes", w.cfg.AttributeBytes.Limit())
	}
	w.checkBudgets()
	r := w.read()
	recovered := r.Workers()
	before := len(w.log.all())
	w.start(r.Pipeline(life{w.log, w.log.lives}))
	if got := len(w.log.all()) - before; got != 0 {
		w.t.Fatalf("recovery has appended %d entries", got)
	}
	w.compareLanes()
	w.checkLearned(made, recovered)
	calls := make(map[string]int)
	for _, e := range w.log.all() {
		if e.lane == nil {
			calls[e.worker] = e.call // removed
		}
	}
	for _, rec := range recovered {
		calls[rec.Worker.Name], _ = w.lastCall(rec)
	}
	if len(recovered) != len(w.log.lanes) {
		w.t.Fatalf("%d workers are listed, want %d", len(recovered), len(w.log.lanes))
	}
	return calls
}

// read reads what is stored.
func (w *durableWorld) read() *pipeline.Recovery {
	r := pipeline.Recover(w.cfg)
	for name, c := range w.checkpoints {
		if err := r.Checkpoint(c.Data); err != nil {
			w.t.Fatalf("checkpoint %q: %v", name, err)
		}
	}
	for _, e := range w.log.all() {
		if e.seq <= w.retainAfter {
			continue
		}
		if err := r.Entry(e.seq, e.worker, e.body, e.state); err != nil {
			w.t.Fatal(err)
		}
	}
	if lost := r.Lost(); len(lost) > 0 {
		w.t.Fatalf("lost: %v", lost)
	}
	return r
}

// checkBudgets checks that removing all recovered workers releases all that recovery has reserved.
func (w *durableWorld) checkBudgets() {
	p, err := w.read().Pipeline(&nowhere{})
	if err != nil {
		w.t.Fatal(err)
	}
	for name := range p.Lanes() {
		p.RemoveWorker(name, feed.RemovedDiscovery)
	}
	if w.cfg.Blocks.Used() != 0 || w.cfg.AttributeBytes.Used() != 0 {
		w.t.Fatalf("reserved by removed workers: %d blocks, %d bytes of attributes", w.cfg.Blocks.Used(), w.cfg.AttributeBytes.Used())
	}
}

// compareLanes compares the recovered lanes with those of the earlier pipeline.
func (w *durableWorld) compareLanes() {
	want := make(map[string]pipeline.LaneState)
	for name, c := range w.checkpoints {
		if name != pipeline.RemovedWorkers {
			want[name] = c.lane
		}
	}
	units := int64(0)
	for _, e := range w.log.all() {
		switch {
		case want[e.worker].LastEventID >= e.lastEventID():
		case e.lane == nil:
			delete(want, e.worker)
		default:
			want[e.worker] = *e.lane
		}
	}
	got := make(map[string]pipeline.LaneState)
	for name, lane := range w.log.lanes {
		got[name] = pipeline.StateOf(lane)
		units += got[name].Units
	}
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Fatalf("recovered lanes (-want +got):\n%s", diff)
	}
	if w.cfg.Blocks != nil && w.cfg.Blocks.Used() != units {
		w.t.Fatalf("blocks that are accounted for: got %d, want %d", w.cfg.Blocks.Used(), units)
	}
}

// lastCall returns the number of the last call that a recovered worker includes, and of the last whose state is in its
// checkpoint, or that added it.
func (w *durableWorld) lastCall(rec feed.Recovered) (last, stored int) {
	for _, e := range w.log.all() {
		if e.worker == rec.Worker.Name && e.decoded.GetEvents()[0].GetWorkerAdded() != nil {
			stored = e.call
		}
	}
	stored = max(stored, numberOf(rec.Checkpoint))
	last = stored
	for _, cursor := range rec.Cursors {
		last = max(last, numberOf(cursor))
	}
	return last, stored
}

// checkLearned compares what ingest has learned since the checkpoint with the calls.
func (w *durableWorld) checkLearned(calls []call, rec []feed.Recovered) {
	for _, r := range rec {
		var want, got []int
		last, stored := w.lastCall(r)
		for n := stored + 1; n <= last; n++ {
			if c := calls[n-1]; c.Worker == r.Worker.Name && n%3 == 0 && (c.Batch != nil || c.Gap != nil || c.Restarted != nil) {
				want = append(want, n)
			}
		}
		for _, learned := range r.Learned {
			got = append(got, numberOf(learned))
		}
		if !slices.Equal(want, got) {
			w.t.Fatalf("learned by %s: got %v, want %v", r.Worker.Name, got, want)
		}
	}
}

// run makes the calls in several lives of the pipeline.
func (w *durableWorld) run(calls []call) {
	w.start(pipeline.New(w.cfg, life{w.log, 0}))
	done := make(map[string]int) // by worker, the number of the last call
	for lives := 1 + w.random.IntN(3); ; lives-- {
		end := len(calls)
		if lives > 0 {
			end = w.random.IntN(len(calls))
		}
		for i, c := range calls[:end] {
			if c.Worker != "" && i+1 <= done[c.Worker] {
				continue
			}
			w.do(i+1, c)
			if c.Worker == "" || lives == 0 {
				continue
			}
			if w.chance(6) {
				w.checkpoint(c.Worker, i+1, w.chance(2))
			}
			if w.chance(6) {
				w.checkpoint(pipeline.RemovedWorkers, 0, false)
			}
			if worker, seq, newest := w.log.pick(w.random); w.chance(2) {
				w.log.acknowledge(worker, seq)
				w.retainAfter = w.pipeline.RetainAfter(newest)
			}
		}
		if lives == 0 {
			return
		}
		w.crash()
		done = w.recover(calls)
		for name, lane := range w.log.lanes {
			w.claim(name, lane, calls[:done[name]])
		}
	}
}

// chance returns true in 1 of n cases.
func (w *durableWorld) chance(n int) bool { return w.random.IntN(n) == 0 }

// claim adds a recovered worker again.
func (w *durableWorld) claim(name string, lane feed.Lane, calls []call) {
	before := len(w.log.all())
	var worker *feed.Worker
	for _, c := range calls {
		if c.Worker == name && c.Add != nil {
			worker = c.Add
		}
	}
	w.subject.add(*worker)
	if w.subject.lanes[name] != lane || len(w.log.all()) != before {
		w.t.Fatalf("worker %s does not continue", name)
	}
}

// entriesByWorker returns the decoded entries.
func (d *durableLog) entriesByWorker() map[string][]*kvcastv1.Entry {
	all := make(map[string][]*kvcastv1.Entry)
	for _, e := range d.all() {
		all[e.worker] = append(all[e.worker], e.decoded)
	}
	return all
}

func newDurableWorld(t *rapid.T, cfg pipeline.Config) *durableWorld {
	cfg.Durable = true
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	return &durableWorld{t: t, random: random, cfg: cfg, log: &durableLog{}, checkpoints: make(map[string]storedCheckpoint)}
}

// compareWithModel compares the entries with those of the model after some calls.
func (d *durableLog) compareWithModel(t *rapid.T, cfg pipeline.Config, calls []call) {
	m := newModel(cfg, func(worker string, eventID uint64) []uint64 {
		for _, e := range d.entriesByWorker()[worker] {
			for _, ev := range e.GetEvents() {
				if ev.GetEventId() == eventID {
					return ev.GetRemoved().GetBlockHashes()
				}
			}
		}
		return nil
	})
	for _, c := range calls {
		c.on(m)
	}
	if diff := cmp.Diff(m.entries, d.entriesByWorker(), protocmp.Transform()); diff != "" {
		t.Fatalf("entries (-want +got):\n%s", diff)
	}
}

// compareTables compares the blocks in the tables with an index that has applied all entries.
func (w *durableWorld) compareTables() {
	x := index.New()
	for _, e := range w.log.all() {
		x.ApplyEntry(e.decoded)
	}
	s := &subject{pipeline: w.pipeline, lanes: w.pipeline.Lanes(), journal: &recorder{index: x}}
	if diff := s.compareIndex(w.t); diff != "" {
		w.t.Fatalf("index: %s", diff)
	}
}

// TestRecoveredPipelineEqualsOneThatNeverCrashed compares with the model, which does not crash.
func TestRecoveredPipelineEqualsOneThatNeverCrashed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newDurableWorld(t, drawConfig(t))
		calls := drawCalls(t, false, true)
		w.run(calls)
		w.log.compareWithModel(t, w.cfg, calls)
		w.compareTables()
	})
}

// TestRecoveredLanesEqualTheLost has bounds of the process and timeouts, with which a pipeline that crashes decides otherwise later.
func TestRecoveredLanesEqualTheLost(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		cfg.Timeout = generatorTimeout
		cfg.Blocks = budget.New("blocks", rapid.SampledFrom([]int64{0, 4, 9, 16, 30}).Draw(rt, "blocks"))
		cfg.AttributeBytes = budget.New("attribute_bytes", rapid.SampledFrom([]int64{0, 180, 400, 800}).Draw(rt, "attribute bytes"))
		calls := (&generator{t: rt, copies: true, groups: true}).calls(true)
		var failed any
		w := newDurableWorld(rt, cfg)
		synctest.Test(t, func(*testing.T) {
			defer func() { failed = recover() }()
			w.run(calls)
			w.compareTables()
		})
		if failed != nil {
			panic(failed)
		}
	})
}

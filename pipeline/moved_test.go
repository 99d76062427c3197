package pipeline_test

import (
	"context"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// ownedLog is a durable journal to which each worker's owner alone can append.
type ownedLog struct {
	*durableLog
	owners  map[string]int // guarded by the log's mutex
	refused int            // number of appends that were refused
}

// share is the journal of one of the pipelines.
type share struct {
	*ownedLog
	number int
}

func (s share) Append(_ context.Context, r journal.Record) (journal.Pending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners[r.Source.Worker] != s.number {
		s.refused++
		return journal.Pending{}, journal.ErrFenced
	}
	return s.append(r)
}

// claim makes a pipeline the owner of a worker. Of the entries in flight, the first are appended, and the others fail. It
// returns the number of lanes whose appends fail.
func (l *ownedLog) claim(random *rand.Rand, worker string, owner int) (failed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.owners[worker] = owner
	inFlight := 0
	for _, e := range l.entries {
		if e.worker == worker && e.ack != nil {
			inFlight++
		}
	}
	appended := random.IntN(inFlight + 1)
	l.entries = slices.DeleteFunc(l.entries, func(e loggedEntry) bool {
		if e.worker != worker || e.ack == nil {
			return false
		}
		if appended--; appended >= 0 {
			return false
		}
		if failed == 0 || e.decoded.GetEvents()[0].GetWorkerAdded() != nil {
			failed++
		}
		e.ack.Resolve(0, journal.ErrFenced)
		return true
	})
	for i := range l.entries {
		if e := &l.entries[i]; e.worker == worker && e.ack != nil {
			e.ack.Resolve(e.seq, nil)
			e.ack = nil
		}
	}
	return failed
}

// movedWorld runs calls on two pipelines, between which workers move.
type movedWorld struct {
	*rapid.T
	random *rand.Rand
	log    *ownedLog
	worlds [2]*durableWorld
	fenced [2]chan string
	calls  []call
	done   int // number of calls made
}

func newMovedWorld(t *rapid.T, cfg pipeline.Config, calls []call) *movedWorld {
	log := &ownedLog{durableLog: &durableLog{lanes: make(map[string]feed.Lane)}, owners: make(map[string]int)}
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	w := &movedWorld{T: t, random: random, log: log, calls: calls}
	checkpoints := make(map[string]storedCheckpoint)
	for i := range w.worlds {
		cfg := cfg
		cfg.Durable, cfg.Shared = true, true
		if cfg.Blocks != nil {
			cfg.Blocks = budget.New("blocks", cfg.Blocks.Limit())
			cfg.AttributeBytes = budget.New("attribute_bytes", cfg.AttributeBytes.Limit())
		}
		w.worlds[i] = &durableWorld{t: t, random: random, cfg: cfg, log: log.durableLog, checkpoints: checkpoints}
	}
	return w
}

// start makes the pipelines.
func (w *movedWorld) start() {
	for i, d := range w.worlds {
		fenced := make(chan string, 100)
		w.fenced[i] = fenced
		d.cfg.Fenced = func(worker string) { fenced <- worker }
		p, err := pipeline.New(d.cfg, share{w.log, i})
		if err != nil {
			w.Fatal(err)
		}
		d.pipeline, d.subject = p, &subject{pipeline: p, lanes: make(map[string]feed.Lane)}
	}
}

// of returns the pipeline that has a worker.
func (w *movedWorld) of(worker string) *durableWorld { return w.worlds[w.log.owners[worker]] }

func (w *movedWorld) chance(n int) bool { return w.random.IntN(n) == 0 }

func (w *movedWorld) run() {
	w.start()
	for i, c := range w.calls {
		w.done = i + 1
		if c.Close {
			for _, d := range w.worlds {
				d.do(w.done, c)
			}
			continue
		}
		w.of(c.Worker).do(w.done, c)
		if c.Worker == "" {
			continue
		}
		if w.chance(6) {
			w.of(c.Worker).checkpoint(c.Worker, w.done, w.chance(2))
		}
		if worker, seq, _ := w.log.pick(w.random); w.chance(2) {
			w.log.acknowledge(worker, seq)
			w.retain()
		}
		if w.chance(6) {
			w.move(c.Worker)
		}
	}
	for i, d := range w.worlds {
		select {
		case err := <-d.pipeline.Failed():
			w.Fatalf("pipeline %d has failed: %v", i, err)
		case worker := <-w.fenced[i]:
			w.Fatalf("pipeline %d reports %s again", i, worker)
		default:
		}
	}
}

// retain deletes obsolete checkpoints, and lets the journal drop what neither pipeline needs.
func (w *movedWorld) retain() {
	newest := uint64(0) // that both pipelines see
	for _, e := range w.log.all() {
		if e.ack != nil {
			break
		}
		newest = e.seq
	}
	for _, d := range w.worlds {
		for _, name := range d.pipeline.ObsoleteCheckpoints() {
			if w.log.last(name).decoded.GetEvents()[0].GetWorkerRemoved() == nil {
				w.Fatalf("the checkpoint of %s is obsolete", name)
			}
			delete(d.checkpoints, name)
		}
		newest = min(newest, d.pipeline.RetainAfter(newest))
		if due := d.pipeline.CheckpointDue(); slices.Contains(due, pipeline.RemovedWorkers) {
			w.Fatal("a checkpoint of removed workers is due")
		}
	}
	for _, d := range w.worlds {
		d.retainAfter = max(d.retainAfter, newest)
	}
}

// move hands a worker over to the other pipeline, or lets that take it over.
func (w *movedWorld) move(worker string) {
	owner := w.log.owners[worker]
	from, to := w.worlds[owner], w.worlds[1-owner]
	if w.chance(2) {
		w.log.acknowledge(worker, math.MaxUint64)
		w.log.begin(w.done, true) // Flush waits for the acknowledgement
		if err := from.pipeline.Flush(context.Background(), worker); err != nil {
			w.Fatal(err)
		}
		w.log.begin(w.done, false)
		from.pipeline.Drop(worker)
		w.log.claim(w.random, worker, 1-owner)
		w.adopt(to, worker)
	} else {
		failed := w.log.claim(w.random, worker, 1-owner)
		var zombie feed.Lane
		if w.chance(2) {
			zombie = from.subject.lanes[worker]
			w.adopt(to, worker)
		}
		refused := w.log.refused
		if zombie != nil {
			zombie.Gap(feed.Gap{Reason: feed.GapReplayUnavailable})
		}
		if zombie != nil && failed == 0 && w.log.refused != refused+1 {
			w.Fatal("a pipeline appends for the worker of another")
		}
		if failed == 0 {
			failed = w.log.refused - refused
		}
		for range failed { // also the lane of a worker that was removed
			if got := <-w.fenced[owner]; got != worker {
				w.Fatalf("fenced: got %s, want %s", got, worker)
			}
		}
		if failed > 0 {
			w.wantNoEffect(from, worker)
		}
		from.pipeline.Drop(worker)
		if zombie == nil {
			w.adopt(to, worker)
		}
	}
	delete(from.subject.lanes, worker)
	if from.pipeline.Lanes()[worker] != nil {
		w.Fatalf("%s has a lane after Drop", worker)
	}
	for _, d := range w.worlds {
		w.checkBudget(d)
		if total, sum := d.pipeline.CheckpointBytes(); total != sum {
			w.Fatalf("bytes of checkpoints: got %d, want %d", total, sum)
		}
	}
}

// wantNoEffect checks that calls for a fenced worker have no effect.
func (w *movedWorld) wantNoEffect(d *durableWorld, worker string) {
	lane := d.subject.lanes[worker]
	if lane == nil {
		return
	}
	before := w.log.refused
	d.pipeline.RemoveWorker(worker, feed.RemovedDisconnected)
	if d.pipeline.AddWorker(feed.Worker{Name: worker}) != lane {
		w.Fatal("a fenced worker has another lane")
	}
	lane.Restarted(feed.Restart{})
	if _, ok := d.pipeline.Checkpoint(worker, nil); ok || w.log.refused != before {
		w.Fatal("a call of a fenced lane has an effect")
	}
}

// adopt continues with a worker that was claimed, and repeats the calls that are not in the journal.
func (w *movedWorld) adopt(to *durableWorld, worker string) {
	r := pipeline.Recover(to.cfg)
	if c, ok := to.checkpoints[worker]; ok {
		if err := r.Checkpoint(c.Data); err != nil {
			w.Fatal(err)
		}
	}
	var last *loggedEntry
	claim := protowire.AppendString(protowire.AppendTag(nil, kvcastv1.EntryWorkerField, protowire.BytesType), worker)
	removedIsRead := false
	for _, e := range w.log.all() {
		if e.worker != worker {
			continue
		}
		last = &e
		if e.seq <= to.retainAfter {
			continue
		}
		removedIsRead = e.lane == nil
		if err := r.Entry(e.seq, e.worker, e.body, e.state); err != nil {
			w.Fatal(err)
		}
	}
	if err := r.Entry(math.MaxUint32, worker, claim, nil); err != nil {
		w.Fatal(err)
	}
	if lost := r.Lost(); len(lost) > 0 {
		w.Fatalf("lost: %v", lost)
	}
	recovered, before := r.Workers(), len(w.log.all())
	if err := to.pipeline.Adopt(r); err != nil {
		w.Fatal(err)
	}
	done := 0
	switch {
	case len(recovered) == 1:
		w.compareLane(to, worker)
		lane := to.pipeline.Lanes()[worker]
		w.log.mu.Lock()
		w.log.lanes[worker] = lane
		w.log.mu.Unlock()
		done, _ = to.lastCall(recovered[0])
		to.claim(worker, lane, w.calls[:done])
	case last != nil && last.lane == nil:
		done = last.call
		if !removedIsRead {
			to.pipeline.SetEventIDFloor(worker, last.lastEventID())
		}
	case last != nil:
		w.Fatalf("%s is not recovered", worker)
	}
	if got := len(w.log.all()) - before; got != 0 && to.cfg.Timeout == 0 {
		w.Fatalf("a move has appended %d entries", got)
	}
	to.checkLearned(w.calls, recovered)
	for n := done + 1; n <= w.done; n++ {
		if c := w.calls[n-1]; c.Worker == worker {
			to.do(n, c)
		}
	}
}

// compareLane compares an adopted lane with that of its former owner after the last entry.
func (w *movedWorld) compareLane(to *durableWorld, worker string) {
	want := to.checkpoints[worker].lane
	for _, e := range w.log.all() {
		if e.worker == worker && e.lane != nil && e.lastEventID() > want.LastEventID {
			want = *e.lane
		}
	}
	if diff := cmp.Diff(want, pipeline.StateOf(to.pipeline.Lanes()[worker])); diff != "" {
		w.Fatalf("adopted lane (-want +got):\n%s", diff)
	}
}

// checkBudget compares the blocks that a pipeline has reserved with those of its lanes.
func (w *movedWorld) checkBudget(d *durableWorld) {
	units := int64(0)
	for _, lane := range d.pipeline.Lanes() {
		units += pipeline.StateOf(lane).Units
	}
	if d.cfg.Blocks != nil && d.cfg.Blocks.Used() != units {
		w.Fatalf("blocks that are accounted for: got %d, want %d", d.cfg.Blocks.Used(), units)
	}
}

// compareTables compares the blocks in the tables of both pipelines with an index that has applied all entries.
func (w *movedWorld) compareTables() {
	x, lanes := index.New(), make(map[string]feed.Lane)
	for _, e := range w.log.all() {
		x.ApplyEntry(e.decoded)
	}
	tables := make(blockSets)
	for _, d := range w.worlds {
		maps.Copy(lanes, d.pipeline.Lanes())
		maps.Copy(tables, d.subject.tables())
	}
	s := &subject{lanes: lanes, journal: &recorder{index: x}}
	if diff := s.compareTables(w, tables); diff != "" {
		w.Fatalf("index: %s", diff)
	}
}

// TestMovedPipelineEqualsOneThatNeverMoved compares with the model, whose workers do not move.
func TestMovedPipelineEqualsOneThatNeverMoved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newMovedWorld(t, drawConfig(t), drawCalls(t, false, true))
		w.run()
		w.log.compareWithModel(t, w.worlds[0].cfg, w.calls)
		w.compareTables()
	})
}

// TestMovedLanesEqualTheFormer has bounds of the process and timeouts, with which a lane that moves decides otherwise later.
func TestMovedLanesEqualTheFormer(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		cfg := drawConfig(rt)
		cfg.Timeout = generatorTimeout
		cfg.Blocks = budget.New("blocks", rapid.SampledFrom([]int64{0, 4, 9, 16, 30}).Draw(rt, "blocks"))
		cfg.AttributeBytes = budget.New("attribute_bytes", rapid.SampledFrom([]int64{0, 180, 400, 800}).Draw(rt, "attribute bytes"))
		w := newMovedWorld(rt, cfg, drawCalls(rt, true, true))
		var failed any
		synctest.Test(t, func(*testing.T) {
			defer func() { failed = recover() }()
			w.run()
			w.compareTables()
		})
		if failed != nil {
			panic(failed)
		}
	})
}

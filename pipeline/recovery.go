package pipeline

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Recovery rebuilds the state of a pipeline whose process has ended. Checkpoints flow in, and then all retained entries
// of a durable journal, in order. A pipeline that continues flows out. Its state equals that of the earlier pipeline
// when that had appended the last entry. What changed afterwards, ingest repeats from the cursors in Workers.
//
// A worker's state is lost if its checkpoint is missing or invalid and the journal does not reach back to the worker's
// WorkerAdded, or if entries after the checkpoint are missing. Pipeline removes such a worker, so that routers do not
// keep its blocks. It can be added again. A Recovery is not safe for concurrent use.
type Recovery struct {
	cfg      Config
	workers  map[string]*recoveredWorker
	removed  eventIDs
	obsolete []string // see Pipeline.ObsoleteCheckpoints
	appended int64    // bytes of the entries that were applied
	hashes   []uint64 // reused
}

// recoveredWorker is a worker in the stream.
type recoveredWorker struct {
	name, model string
	lastEventID uint64
	// lane is nil if the state is lost, and cause is why.
	lane  *Lane
	cause error

	seq        uint64 // of the last entry
	changes    uint64 // number of changes that are applied
	checkpoint int64  // size of the checkpoint; 0 if there is none
	needed     appendedEntry
	ingest     []byte
	cursors    map[feed.Publisher][]byte
	learned    [][]byte
	// partial are the entries of a batch whose last entry has not come.
	partial []recoveredEntry
}

// recoveredEntry is an entry that is not applied yet.
type recoveredEntry struct {
	body  []byte
	state *statev1.EntryState
}

// errLater is an error of what this version does not know.
var errLater = errors.New("a later version of kvcast has stored it: use that version or a later one, or begin with an empty journal, " +
	"in another directory or stream")

// Recover starts a recovery. The pipeline will have the config, which may differ from the earlier pipeline's.
func Recover(cfg Config) *Recovery {
	return &Recovery{cfg: cfg.withDefaults(), workers: make(map[string]*recoveredWorker), removed: newEventIDs()}
}

// checkVersion returns an error unless this version reads messages of a version.
func checkVersion(version uint32) error {
	switch {
	case version == 0:
		return errors.New("it has no version")
	case version > stateVersion:
		return fmt.Errorf("version %d, want at most %d: %w", version, stateVersion, errLater)
	}
	return nil
}

// Checkpoint restores a checkpoint: Checkpoint.Data. All checkpoints must be restored before the first entry. If it
// returns an error, it has restored nothing.
func (r *Recovery) Checkpoint(data []byte) error {
	if err := r.restore(data); err != nil {
		return fmt.Errorf("restore pipeline checkpoint: %w", err)
	}
	return nil
}

func (r *Recovery) restore(data []byte) error {
	state := new(statev1.Checkpoint)
	if err := proto.Unmarshal(data, state); err != nil {
		return err
	}
	if err := checkVersion(state.GetVersion()); err != nil {
		return err
	}
	if state.Lane == nil && state.RemovedWorkers == nil {
		return errors.New("it has no state")
	}
	if state.RemovedWorkers != nil {
		r.removed.restore(state.RemovedWorkers)
		for name := range r.removed.byName {
			r.dropOlder(name)
		}
	}
	if state.Lane != nil {
		w, err := restoreLane(&r.cfg, state)
		if err != nil {
			return err
		}
		w.checkpoint = int64(len(data))
		r.workers[w.name] = w
		r.dropOlder(w.name)
	}
	return nil
}

// dropOlder drops a worker that was removed later, or the record that it was removed earlier.
func (r *Recovery) dropOlder(name string) {
	w, e := r.workers[name], r.removed.byName[name]
	switch {
	case w == nil || e == nil:
	case e.lastID >= w.lastEventID:
		delete(r.workers, name)
		w.discard()
		r.obsolete = append(r.obsolete, name)
	default:
		r.removed.drop(e)
	}
}

// Entry applies an entry of the journal: body and state are journal.Record.Body and State. It ignores entries that the
// worker's checkpoint includes. An entry without events changes no state. The memory may be reused afterwards. After an
// error, the Recovery must not be used any more: what a later version has stored, or an invalid entry.
func (r *Recovery) Entry(seq uint64, worker string, body, state []byte) error {
	if err := r.entry(seq, worker, body, state); err != nil {
		return fmt.Errorf("recover worker %q from entry %d: %w", worker, seq, err)
	}
	return nil
}

func (r *Recovery) entry(seq uint64, name string, body, encodedState []byte) error {
	first, err := firstEvent(body)
	if err != nil {
		return err
	}
	w := r.workers[name]
	switch e := r.removed.byName[name]; {
	case first.id == 0: // a claim
		if w != nil {
			w.seq = seq
		}
		return nil
	case w != nil && first.id <= w.lastEventID || e != nil && first.id <= e.lastID:
		return nil
	case w == nil:
		w = &recoveredWorker{name: name, model: first.model, cause: errors.New("its WorkerAdded is missing")}
		r.workers[name] = w
		if e != nil {
			w.lastEventID = e.lastID
			r.removed.drop(e)
		}
	}
	state := new(statev1.EntryState)
	if err := proto.Unmarshal(encodedState, state); err != nil {
		return fmt.Errorf("decode state: %w", err)
	}
	if err := checkVersion(state.GetVersion()); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if first.kind == kvcastv1.RouterEventWorkerAddedField {
		if state.Worker == nil {
			return errors.New("state without the worker that is added")
		}
		w.discard()
		*w = recoveredWorker{name: name, lane: newLane(&r.cfg, restoreWorker(state.Worker))}
		w.model = w.lane.desc.Model
	} else if w.lane != nil && first.id != w.lastEventID+1 {
		w.lose(fmt.Errorf("event %d follows event %d: the entries between are missing", first.id, w.lastEventID))
	}
	w.seq = seq
	if !w.needed.exists {
		w.needed = appendedEntry{journal.Acknowledged(seq), true}
	}
	r.appended += int64(len(body) + len(encodedState))
	if !state.GetContinues() {
		w.partial = nil
	}
	if state.GetPartial() {
		w.partial = append(w.partial, recoveredEntry{slices.Clone(body), state})
		return r.scan(w, body, nil)
	}
	for _, e := range w.partial {
		if err := r.apply(w, e); err != nil {
			return err
		}
	}
	w.partial = nil
	return r.apply(w, recoveredEntry{body, state})
}

// lose drops the state of a worker.
func (w *recoveredWorker) lose(cause error) {
	w.discard()
	w.cause = cause
	w.partial, w.ingest, w.cursors, w.learned = nil, nil, nil, nil
}

// discard drops the lane of a worker, if it has one.
func (w *recoveredWorker) discard() {
	if w.lane != nil {
		w.lane.discard()
		w.lane = nil
	}
}

// apply applies an entry to its worker.
func (r *Recovery) apply(w *recoveredWorker, e recoveredEntry) error {
	s := e.state
	if w.lane != nil && s.GetFirstChange() > w.changes {
		w.lose(fmt.Errorf("change %d follows change %d: changes without events are missing", s.GetFirstChange(), w.changes))
	}
	if w.lane == nil {
		return r.scan(w, e.body, nil)
	}
	changes := s.GetChanges()
	if known := w.changes - s.GetFirstChange(); known < uint64(len(changes)) {
		changes = changes[known:]
		w.changes += uint64(len(changes))
	} else {
		changes = nil
	}
	a := &application{Recovery: r, worker: w, changes: changes}
	if err := r.scan(w, e.body, a); err != nil {
		return err
	}
	if w.lane == nil { // removed
		return nil
	}
	if err := a.applyChanges(len(e.body)); err != nil {
		return err
	}
	return w.applyState(s)
}

// scan counts the events of an entry, and applies them unless a is nil.
func (r *Recovery) scan(w *recoveredWorker, body []byte, a *application) error {
	events := 0
	var f encode.Field
	for len(body) > 0 {
		rest, err := f.Next(body)
		if err != nil {
			return fmt.Errorf("decode entry: %w", err)
		}
		body = rest
		if f.Number != kvcastv1.EntryEventsField {
			continue
		}
		e, err := decodeEvent(f.Bytes)
		if err != nil {
			return err
		}
		w.lastEventID = e.id
		if e.kind == kvcastv1.RouterEventWorkerRemovedField {
			delete(r.workers, w.name)
			w.discard()
			r.removed.remember(removedWorker{name: w.name, lastID: e.id, appended: journal.Acknowledged(w.seq)})
			return nil
		}
		if a != nil {
			if err := a.applyChanges(events); err != nil {
				return err
			}
			if err := a.apply(&e); err != nil {
				return fmt.Errorf("event %d: %w", e.id, err)
			}
		}
		events++
	}
	return nil
}

// unknownEventID is the last event id of workers whose id is lost. No worker emits so many events.
const unknownEventID = 1 << 48

// Known reports a worker that routers know, and its last event id, from another source than the journal's entries. If
// the recovered state is older or missing, it is lost. The id 0 means that it is not known. The name RemovedWorkers
// reports that the checkpoint of that name is lost. Known must be called after the last entry.
func (r *Recovery) Known(name, model string, lastEventID uint64) {
	if name == RemovedWorkers {
		r.removed.floor = max(r.removed.floor, unknownEventID)
		return
	}
	w := r.workers[name]
	switch e := r.removed.byName[name]; {
	case w != nil && w.lastEventID == unknownEventID && lastEventID > 0: // it was reported without its id
		w.lastEventID, w.model = lastEventID, model
		return
	case w != nil && w.lastEventID >= lastEventID || e != nil && e.lastID >= lastEventID:
		return
	case w == nil:
		w = &recoveredWorker{name: name, model: model}
		r.workers[name] = w
		if e != nil {
			r.removed.drop(e)
		}
	}
	if lastEventID == 0 {
		w.lastEventID = max(w.lastEventID, unknownEventID)
		w.lose(errors.New("its checkpoint is lost, and the journal has no entry of it"))
		return
	}
	w.lastEventID = lastEventID
	w.lose(fmt.Errorf("routers have events up to %d, and neither checkpoint nor journal has them", lastEventID))
}

// Lost returns the workers whose state is lost, and why.
func (r *Recovery) Lost() map[string]error {
	lost := make(map[string]error)
	for name, w := range r.workers {
		if w.lane == nil {
			lost[name] = w.cause
		}
	}
	return lost
}

// Workers returns the recovered workers, by name, without those whose state is lost.
func (r *Recovery) Workers() (all []feed.Recovered) {
	for _, name := range slices.Sorted(maps.Keys(r.workers)) {
		if w := r.workers[name]; w.lane != nil {
			all = append(all, feed.Recovered{Worker: w.lane.desc, Checkpoint: w.ingest, Cursors: w.cursors, Learned: w.learned})
		}
	}
	return all
}

// Pipeline returns a new pipeline that appends to a journal and has adopted the Recovery. The errors are those of Config.Validate.
func (r *Recovery) Pipeline(j Journal) (*Pipeline, error) {
	p, err := New(r.cfg, j)
	if err != nil {
		return nil, err
	}
	return p, p.Adopt(r)
}

// Discard releases what a Recovery that is not used has reserved in the budgets of its Config.
func (r *Recovery) Discard() {
	for _, w := range r.workers {
		w.discard()
	}
	clear(r.workers)
}

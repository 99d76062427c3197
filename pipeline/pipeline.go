// Package pipeline turns engines' batches into the events that routers apply.
//
// Each worker's decoded batches flow in, in order. The worker's RouterEvents flow out to the
// journal, one entry a batch. The pipeline consolidates the events of a worker's sources, merges
// adjacent events, and suppresses removes of blocks of which the engine has another copy.
// Guarantees: the order of a worker's events is kept, its event ids are contiguous, and its tables
// equal the state of a router that has applied all entries so far. If an append fails, the
// worker's lane discards its state and reports the failure; see Pipeline.Failed.
package pipeline

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal is the part of journal.Journal that the pipeline uses.
type Journal interface {
	Append(context.Context, journal.Record) (journal.Pending, error)
}

// Pipeline is the ingest.Sink that turns batches into entries of a journal.
type Pipeline struct {
	cfg     Config
	journal Journal
	failed  chan error
	// appends is the context of all appends, since the methods of feed.Lane have none.
	appends       context.Context
	cancelAppends context.CancelFunc

	mu      sync.Mutex // guards the fields below; locked before any lane's
	lanes   map[string]*Lane
	closed  bool // Close was called: no events are emitted
	removed eventIDs
}

var _ feed.Sink = (*Pipeline)(nil)

// New makes a pipeline that appends to a journal. Its errors are those of Config.Validate.
func New(cfg Config, j Journal) (*Pipeline, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := &Pipeline{
		cfg:     cfg.withDefaults(),
		journal: j,
		failed:  make(chan error, 1),
		lanes:   make(map[string]*Lane),
		removed: newEventIDs(),
	}
	p.appends, p.cancelAppends = context.WithCancel(context.Background())
	return p, nil
}

// Failed returns a channel that receives the error of the first append that fails. The worker's
// lane has then discarded its state, which has changes that no router will see. It emits no
// further events. The pipeline's owner must end the process or make a new
// pipeline, so that the engines' caches are read again.
func (p *Pipeline) Failed() <-chan error { return p.failed }

// AddWorker emits WorkerAdded and returns the Lane for the worker's batches.
func (p *Pipeline) AddWorker(w feed.Worker) feed.Lane {
	// A protobuf string must be UTF-8.
	valid := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	name, model := valid(w.Name), valid(w.Model)
	p.mu.Lock()
	defer p.mu.Unlock()
	labels := make(map[string]string, len(w.Labels))
	for k, v := range w.Labels {
		labels[valid(k)] = valid(v)
	}
	added := &kvcastv1.WorkerAdded{
		Model:     model,
		BlockSize: w.BlockSize,
		Endpoint:  valid(w.Endpoint),
		Labels:    labels,
		Ranks:     w.Ranks,
	}
	l := &Lane{
		added:    added,
		worker:   name,
		cfg:      p.cfg,
		ranks:    make(map[uint32]*rankState),
		entry:    newEntry(p.appends, p.journal, name, model),
		failures: p.failed,

		consolidation: consolidationOf(w),
		sourceNames:   sourceNames(w),
	}
	l.entry.onFailure = func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fail(err)
	}
	if l.consolidation != dedup {
		l.tableBlocks = p.cfg.Blocks
	}
	if p.closed {
		l.closed = true
		return l
	}
	l.lastEventID = p.removed.resume(w.Name)
	p.lanes[w.Name] = l
	l.emitEntry(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: l.added}})
	return l
}

// RemoveWorker emits WorkerRemoved and drops the worker's state.
func (p *Pipeline) RemoveWorker(name string, reason feed.RemoveReason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lanes[name]
	if l == nil || p.closed {
		return
	}
	_ = l.close() // Failed has the error
	l.emitRemovedWorker(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
		Reason: kvcastv1.WorkerRemoved_Reason(reason),
	}}})
	p.removed.remember(name, l.lastEventID)
	delete(p.lanes, name)
}

// Close emits pending events and waits until all entries are acknowledged. Later calls of lanes
// have no effect. When ctx is done, appends in progress are canceled, and fail. The error joins the
// errors of all lanes.
func (p *Pipeline) Close(ctx context.Context) error {
	defer context.AfterFunc(ctx, p.cancelAppends)()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	var errs []error
	lanes := slices.Sorted(maps.Keys(p.lanes))
	for _, name := range lanes {
		errs = append(errs, p.lanes[name].close())
	}
	for i, name := range lanes {
		if err := p.lanes[name].awaitAcknowledged(ctx); errs[i] == nil {
			errs[i] = err
		}
	}
	return errors.Join(errs...)
}

// emitEntry emits an event as an entry of its own.
func (l *Lane) emitEntry(e *kvcastv1.RouterEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entry.begin(0, 0)
	l.emit(e)
	l.commit()
}

// emitRemovedWorker drops the lane's blocks and emits the event.
func (l *Lane) emitRemovedWorker(e *kvcastv1.RouterEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.ranks {
		l.drop(r)
	}
	if l.failed == nil {
		l.entry.begin(0, 0)
		l.emit(e)
		l.commit()
	}
}

// close emits the pending run and closes the lane. It returns the error of a failed append.
func (l *Lane) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushAlone(flushShutdown)
	l.closed = true
	return l.failed
}

// commit appends the current entry. The lane fails if the append does.
func (l *Lane) commit() {
	if err := l.entry.commit(); err != nil {
		l.fail(err)
	}
}

// fail closes the lane after a failed append, and discards its state: the tables have changes that
// no router will see. It reports the failure to Pipeline.Failed.
func (l *Lane) fail(err error) {
	if l.failed != nil {
		return
	}
	l.failed = fmt.Errorf("append an entry of worker %q: %w", l.worker, err)
	l.closed = true
	l.pending.reset()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	for _, r := range l.ranks {
		l.drop(r)
	}
	clear(l.ranks)
	select {
	case l.failures <- l.failed:
	default: // Failed reports the first failure only
	}
}

// awaitAcknowledged waits until all entries so far are acknowledged.
func (l *Lane) awaitAcknowledged(ctx context.Context) error {
	l.mu.Lock()
	pending, err := l.entry.appended, l.failed
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if _, err := pending.Wait(ctx); err != nil {
		return fmt.Errorf("wait for the entries of worker %q: %w", l.worker, err)
	}
	return nil
}

// maxRemovedNames bounds the removed workers whose last event id is kept. Publishers choose the
// names, of up to 2 KiB each.
const maxRemovedNames = 16_384

// eventIDs keeps the last event ids of removed workers, so that a worker that returns under its name
// continues from there. Beyond maxRemovedNames it evicts the worker that was removed first. A new
// name then continues from the largest evicted id, since the name may have been evicted.
type eventIDs struct {
	byName  map[string]*list.Element
	removed *list.List // of removedWorker, the first removed in front
	floor   uint64     // the largest evicted id
}

type removedWorker struct {
	name   string
	lastID uint64
}

func newEventIDs() eventIDs {
	return eventIDs{byName: make(map[string]*list.Element), removed: list.New()}
}

// resume returns the id after which a worker of that name continues, and deletes the name.
func (ids *eventIDs) resume(name string) uint64 {
	e := ids.byName[name]
	if e == nil {
		return ids.floor
	}
	delete(ids.byName, name)
	return ids.removed.Remove(e).(removedWorker).lastID
}

// remember keeps the last id of a removed worker. The caller must have called resume for the name
// when the worker was added.
func (ids *eventIDs) remember(name string, lastID uint64) {
	ids.byName[name] = ids.removed.PushBack(removedWorker{name, lastID})
	if ids.removed.Len() > maxRemovedNames {
		oldest := ids.removed.Remove(ids.removed.Front()).(removedWorker)
		delete(ids.byName, oldest.name)
		ids.floor = max(ids.floor, oldest.lastID)
	}
}

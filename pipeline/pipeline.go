// Package pipeline turns engines' batches into the events that routers apply.
//
// Each worker's decoded batches flow in, in order. The worker's RouterEvents flow out to the journal, one entry a batch. The pipeline
// consolidates the events of a worker's sources, merges adjacent events, and suppresses removes of blocks of which the engine has another
// copy. Guarantees: the order of a worker's events is kept, its event ids are contiguous, and its tables equal the state of a router that
// has applied all entries so far. If an append fails, the worker's lane discards its state and reports the failure; see Pipeline.Failed.
//
// With a durable journal, each entry has state beside its events, and the pipeline makes checkpoints.
// From both, Recovery makes a pipeline that continues after a crash.
//
// It has more than 15 files: all are about the state of a Lane, which one lock guards, and how the journal records and restores it. What
// decides without that state is in packages of internal: consolidate, copies and groups.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
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

	totals  checkpointTotals
	holders *holders
	// blocks and attributes are the parts of Config.Blocks and Config.AttributeBytes of the addresses that name workers.
	blocks, attributes *budget.Parts

	mu      sync.Mutex // guards the fields below; locked after a lane's turn and before its mu
	lanes   map[string]*Lane
	closed  bool // Close was called: no events are emitted
	removed eventIDs
	// obsolete are the names for ObsoleteCheckpoints; retainAfter is the last result of RetainAfter.
	obsolete    []string
	retainAfter uint64
	adopted     int // calls of Adopt
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
		holders: new(holders),
		blocks:  budget.NewParts(cfg.Blocks), attributes: budget.NewParts(cfg.AttributeBytes),
	}
	p.appends, p.cancelAppends = context.WithCancel(context.Background())
	return p, nil
}

// Failed returns a channel that receives the error of the first append that fails. The worker's lane has then discarded its state, which
// has changes that no router will see. It emits no further events. The pipeline's owner must end the process or make a new pipeline, so
// that the engines' caches are read again.
func (p *Pipeline) Failed() <-chan error { return p.failed }

// AddWorker emits WorkerAdded and returns the Lane for the worker's batches. A recovered worker continues without an
// event if feed.Worker.Continues allows it; otherwise it is removed first.
func (p *Pipeline) AddWorker(w feed.Worker) feed.Lane {
	w = validWorker(w)
	if l := p.rejoin(w); l != nil {
		return l
	}
	p.mu.Lock()
	l := newLane(&p.cfg, w)
	p.attach(l)
	if p.closed {
		l.end.closed = true
		p.mu.Unlock()
		return l
	}
	l.lastEventID, l.earlier = p.removed.resume(w.Name)
	p.lanes[w.Name] = l
	if l.log != nil {
		l.log.worker = true
	}
	l.lock() // nobody else has it yet
	defer l.unlock()
	p.mu.Unlock()
	l.emitEntry(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{
		Model: w.Model, BlockSize: w.BlockSize, Endpoint: w.Endpoint, Labels: w.Labels, Ranks: w.Ranks,
		Pool: w.Pool, Pools: w.Pools,
	}}})
	return l
}

// rejoin returns the lane of a recovered worker that continues, or the lane of a worker that was fenced; nil if there is
// none. It removes a recovered worker that does not continue.
func (p *Pipeline) rejoin(w feed.Worker) *Lane {
	l := p.lane(w.Name)
	if l == nil {
		return nil
	}
	l.turn.Lock()
	p.mu.Lock()
	if p.closed || p.lanes[w.Name] != l { // it was dropped meanwhile
		p.mu.Unlock()
		l.turn.Unlock()
		return nil
	}
	unclaimed, continues := l.unclaimed, w.Continues(&l.desc)
	l.mu.Lock()
	fenced := l.end.fenced
	resumes := unclaimed && continues && !fenced
	if resumes {
		l.desc, l.unclaimed = w, false
		l.closeBudgets()
		p.openBudgets(l)
	}
	p.mu.Unlock()
	if resumes {
		l.continuePending()
	}
	l.unlock()
	switch {
	case resumes, fenced:
		return l
	case unclaimed:
		p.RemoveWorker(w.Name, feed.RemovedDiscovery)
	}
	return nil
}

// validWorker returns a copy of a worker with strings of UTF-8, which a protobuf string must be.
func validWorker(w feed.Worker) feed.Worker {
	valid := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	labels := make(map[string]string, len(w.Labels))
	for k, v := range w.Labels {
		labels[valid(k)] = valid(v)
	}
	w.Name, w.Model, w.Endpoint, w.Labels = valid(w.Name), valid(w.Model), valid(w.Endpoint), labels
	w.Ranks, w.Sources, w.Pools = slices.Clone(w.Ranks), slices.Clone(w.Sources), slices.Clone(w.Pools)
	for i := range w.Pools {
		w.Pools[i] = valid(w.Pools[i])
	}
	return w
}

// newLane returns an empty lane, whose tables reserve in no budget yet, and count among no other lanes' blocks.
func newLane(cfg *Config, w feed.Worker) *Lane {
	l := &Lane{
		worker: w.Name, membership: membership{desc: w}, cfg: *cfg, limits: cfg.limits(),
		consolidation: consolidationOf(w),
		sourceNames:   sourceNames(w),
		ranks:         make(map[uint32]*rankState),
		holders:       new(holders),
	}
	if l.cfg.Logger != nil {
		l.cfg.Logger = w.Logger(l.cfg.Logger)
	}
	return l
}

// attach connects a lane to the pipeline's journal and budgets.
func (p *Pipeline) attach(l *Lane) {
	l.failures, l.holders, l.isHolder = p.failed, p.holders, false
	l.lower.Store(0) // resume counts the blocks of a recovered lane
	var appends context.Context
	appends, l.cancelAppends = context.WithCancelCause(p.appends)
	l.entry = newEntry(appends, &l.mu, p.journal, l.worker, l.desc.Model, l.limits.entryBytes)
	l.entry.onFailure = func(err error) {
		l.lock()
		defer l.unlock()
		l.fail(err)
	}
	p.openBudgets(l)
	l.attributes = l.cfg.AttributeBytes
	if p.cfg.Durable {
		l.log = newStateLog(&p.totals, l.limits.waitingBytes)
		l.entry.log = l.log
		l.announcements.RecordChanges()
	}
}

// openBudgets makes a lane use the budgets of its worker's peer. The attributes of a recovered lane stay in the whole budget.
func (p *Pipeline) openBudgets(l *Lane) {
	before := l.cfg.Blocks
	l.peer = l.desc.Peer
	l.cfg.Blocks, l.cfg.AttributeBytes = p.blocks.Open(l.peer), p.attributes.Open(l.peer)
	l.closeBudgets = func() {
		p.blocks.Close(l.peer)
		p.attributes.Close(l.peer)
	}
	if l.consolidation == dedup {
		return
	}
	if l.tableBlocks != nil {
		for _, r := range l.ranks {
			before.MoveTo(l.cfg.Blocks, int64(r.blocks()))
		}
	}
	l.tableBlocks = l.cfg.Blocks
}

// RemoveWorker emits WorkerRemoved and drops the worker's state.
func (p *Pipeline) RemoveWorker(name string, reason feed.RemoveReason) {
	l := p.lane(name)
	if l == nil {
		return
	}
	removed, ok := l.leaveStream(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
		Reason: kvcastv1.WorkerRemoved_Reason(reason),
	}}})
	p.mu.Lock()
	defer p.mu.Unlock()
	if ok && p.lanes[l.worker] == l { // else Drop was called
		p.removed.remember(removed)
		delete(p.lanes, l.worker)
	}
}

// lane returns the lane of a worker; nil if there is none.
func (p *Pipeline) lane(name string) *Lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lanes[strings.ToValidUTF8(name, "\uFFFD")]
}

// Close emits pending events and waits until all entries are acknowledged. Later calls of lanes have no effect. When ctx is done, appends
// in progress are canceled, and fail. The error joins the errors of all lanes.
func (p *Pipeline) Close(ctx context.Context) error {
	defer context.AfterFunc(ctx, p.cancelAppends)()
	p.mu.Lock()
	p.closed = true
	all := maps.Clone(p.lanes)
	p.mu.Unlock()
	var errs []error
	lanes := slices.Sorted(maps.Keys(all))
	for _, name := range lanes {
		errs = append(errs, all[name].close())
	}
	for i, name := range lanes {
		if err := all[name].awaitAcknowledged(ctx); errs[i] == nil {
			errs[i] = err
		}
		if p.cfg.Fenced != nil && errors.Is(errs[i], journal.ErrFenced) || errors.Is(errs[i], errDropped) {
			errs[i] = nil // the worker is another pipeline's
		}
	}
	return errors.Join(errs...)
}

// emitEntry emits an event as an entry of its own.
func (l *Lane) emitEntry(e *kvcastv1.RouterEvent) {
	l.entry.begin(0, 0)
	l.emit(e)
	l.commit()
}

// leaveStream drops the lane's blocks and emits the event. ok is false if the lane remains: the pipeline is closed, or the
// worker was fenced.
func (l *Lane) leaveStream(e *kvcastv1.RouterEvent) (removed removedWorker, ok bool) {
	l.lock()
	defer l.unlock()
	if l.end.closed && l.end.failed == nil {
		return removedWorker{}, false
	}
	l.flushAlone(flushShutdown)
	if l.end.fenced {
		return removedWorker{}, false
	}
	l.end.closed = true
	for _, r := range l.ranks {
		l.drop(r)
	}
	if l.end.failed == nil {
		l.emitEntry(e)
	}
	l.leave()
	return removedWorker{name: l.worker, lastID: l.lastEventID, appended: l.entry.appended}, true
}

// leave makes the lane not count any more, since the pipeline has the worker no longer.
func (l *Lane) leave() {
	if !l.end.left {
		l.closeBudgets()
	}
	l.end.left = true
	l.holders.lanes.Delete(l)
	l.cancelAppends(nil)
	if l.log != nil {
		at := &l.log.position
		at.totals.stored.Add(-at.size)
		at.size = 0
	}
}

// close emits the pending run and closes the lane. It returns the error of a failed append.
func (l *Lane) close() error {
	l.lock()
	defer l.unlock()
	l.flushAlone(flushShutdown)
	l.end.closed = true
	return l.end.failed
}

// commit appends the current entry. The lane fails if the append does.
func (l *Lane) commit() {
	l.log.addTrackerCalls()
	var state []byte
	if !l.entry.empty() {
		state = l.state()
	}
	if err := l.entry.commit(state); err != nil {
		l.fail(err)
	}
}

// fail closes the lane after a failed append, and discards its state: the tables have changes that
// no router will see. It reports the failure to Config.Fenced or Pipeline.Failed, unless the worker was dropped.
func (l *Lane) fail(err error) {
	if l.end.failed != nil {
		return
	}
	l.end.failed = fmt.Errorf("append an entry of worker %q: %w", l.worker, err)
	l.end.closed = true
	l.pending.reset()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	for _, r := range l.ranks {
		l.drop(r)
	}
	clear(l.ranks)
	l.recent = nil
	switch {
	case errors.Is(context.Cause(l.entry.ctx), errDropped):
	case l.cfg.Fenced != nil && errors.Is(err, journal.ErrFenced):
		l.end.fenced = true
		go l.cfg.Fenced(l.worker)
	default:
		select {
		case l.failures <- l.end.failed:
		default: // Failed reports the first failure only
		}
	}
}

// awaitAcknowledged waits until all entries so far are acknowledged.
func (l *Lane) awaitAcknowledged(ctx context.Context) error {
	l.mu.Lock()
	pending, err := l.entry.appended, l.end.failed
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if _, err := pending.Wait(ctx); err != nil {
		return fmt.Errorf("wait for the entries of worker %q: %w", l.worker, err)
	}
	return nil
}

package pipeline

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal takes the entries.
type Journal interface {
	// Append gives the record the next place in the stream, which the receipt
	// tells. It keeps nothing of the record's body.
	Append(journal.Record) journal.Receipt
}

// Pipeline is the ingest.Sink that turns batches into entries of a journal.
type Pipeline struct {
	cfg     Config
	journal Journal
	copies  limiter // for tables that are being read

	mu    sync.Mutex // guards all below; taken before any lane's
	lanes map[string]*Lane
	// closed tells that nothing is emitted any more.
	closed bool
	// removed are the workers that are gone: an event id never comes twice, even
	// when a worker comes back.
	removed eventIDs
}

var _ feed.Sink = (*Pipeline)(nil)

// New makes a pipeline that appends to a journal. The error is that of
// Config.Validate.
func New(cfg Config, j Journal) (*Pipeline, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Pipeline{
		cfg:     cfg.withDefaults(),
		journal: j,
		copies:  limiter{limit: maxCopies},
		lanes:   make(map[string]*Lane),
		removed: newEventIDs(),
	}, nil
}

// AddWorker tells routers of a worker, and returns the Lane for its batches.
func (p *Pipeline) AddWorker(w feed.Worker) feed.Lane {
	// A protobuf string must be UTF-8; names that come over the wire were checked.
	name, model := strings.ToValidUTF8(w.Name, "\uFFFD"), strings.ToValidUTF8(w.Model, "\uFFFD")
	p.mu.Lock()
	defer p.mu.Unlock()
	labels := make(map[string]string, len(w.Labels))
	for k, v := range w.Labels {
		labels[strings.ToValidUTF8(k, "\uFFFD")] = strings.ToValidUTF8(v, "\uFFFD")
	}
	added := &kvcastv1.WorkerAdded{
		Model:     model,
		BlockSize: w.BlockSize,
		Endpoint:  strings.ToValidUTF8(w.Endpoint, "\uFFFD"),
		Labels:    labels,
		Ranks:     w.Ranks,
	}
	l := &Lane{
		added:     added,
		blockSize: w.BlockSize,
		worker:    name,
		cfg:       p.cfg,
		ranks:     make(map[uint32]*rankState),
		entry:     newEntry(p.journal, name, model),

		consolidation: consolidationOf(w),
		sourceNames:   sourceNames(w),
	}
	if l.consolidation != dedup {
		l.tableBlocks = p.cfg.Blocks
	}
	if p.closed {
		l.closed = true
		return l
	}
	l.lastEventID = p.removed.take(w.Name)
	p.lanes[w.Name] = l
	l.aboutWorker(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: l.added}})
	return l
}

// RemoveWorker tells routers that a worker is gone, and forgets what it held.
func (p *Pipeline) RemoveWorker(name string, reason feed.RemoveReason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lanes[name]
	if l == nil || p.closed {
		return
	}
	l.close()
	l.leave(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
		Reason: kvcastv1.WorkerRemoved_Reason(reason),
	}}})
	p.removed.keep(name, l.lastEventID)
	delete(p.lanes, name)
}

// Close emits what is waiting. Nothing that comes later is taken.
func (p *Pipeline) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, name := range slices.Sorted(maps.Keys(p.lanes)) {
		p.lanes[name].close()
	}
}

// aboutWorker emits an event about the worker as a whole, an entry of its own.
func (l *Lane) aboutWorker(e *kvcastv1.RouterEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entry.begin(0, 0)
	l.emit(e)
	l.entry.commit()
}

// leave lets nobody read what the worker held, and emits the event that tells so:
// whoever finds the worker gone finds its entry as well.
func (l *Lane) leave(e *kvcastv1.RouterEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = true
	for _, r := range l.ranks {
		l.drop(r)
	}
	l.entry.begin(0, 0)
	l.emit(e)
	l.entry.commit()
}

// close emits what is waiting, and lets the lane take no more.
func (l *Lane) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushAlone(flushShutdown)
	l.closed = true
}

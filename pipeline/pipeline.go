package pipeline

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Journal takes the entries.
type Journal interface {
	// Append gives the record the next place in the stream, which the receipt
	// tells. It keeps nothing of the record's body.
	Append(journal.Record) journal.Receipt
}

// BatchConfig says how events are merged. The zero value means the defaults.
type BatchConfig struct {
	// Timeout is how long a run of events may wait for a further batch that
	// continues it: 0, the default, to 15 s. With 0 each engine batch is an entry
	// of its own; otherwise the end of one may go out with the next.
	Timeout time.Duration
	// MaxBlocks is the most blocks in an event: 1 to 16,384, default 128. A
	// larger event of an engine is split.
	MaxBlocks int
	// EmitTokenIDs adds the tokens to stored events. These are users' prompts.
	EmitTokenIDs bool
}

// Bounds of BatchConfig.
const (
	MaxBatchTimeout  = 15 * time.Second
	DefaultMaxBlocks = 128
	MaxMaxBlocks     = 16_384
)

// Validate tells what is wrong with a config, by the names it has in the
// configuration.
func (c BatchConfig) Validate() error {
	if c.Timeout < 0 || c.Timeout > MaxBatchTimeout {
		return fmt.Errorf("batch.timeout: %v is not allowed: want 0s to %v", c.Timeout, MaxBatchTimeout)
	}
	if c.MaxBlocks < 0 || c.MaxBlocks > MaxMaxBlocks {
		return fmt.Errorf("batch.max_blocks: %d is not allowed: want 1 to %d", c.MaxBlocks, MaxMaxBlocks)
	}
	return nil
}

// Pipeline is the ingest.Sink that turns batches into entries of a journal.
type Pipeline struct {
	batch   BatchConfig
	journal Journal

	mu    sync.Mutex // guards all below; taken before any lane's
	lanes map[string]*Lane
	// closed tells that nothing is emitted any more.
	closed bool
	// lastEventIDs are those of the workers that are gone: an event id never
	// comes twice, even when a worker comes back. This grows with the number of
	// different names.
	lastEventIDs map[string]uint64
}

var _ ingest.Sink = (*Pipeline)(nil)

// New makes a pipeline that appends to a journal. The error is that of
// BatchConfig.Validate.
func New(cfg BatchConfig, j Journal) (*Pipeline, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.MaxBlocks == 0 {
		cfg.MaxBlocks = DefaultMaxBlocks
	}
	return &Pipeline{
		batch:        cfg,
		journal:      j,
		lanes:        make(map[string]*Lane),
		lastEventIDs: make(map[string]uint64),
	}, nil
}

// AddWorker tells routers of a worker, and returns the Lane for its batches.
func (p *Pipeline) AddWorker(w ingest.Worker) ingest.Lane {
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
		added:       added,
		blockSize:   w.BlockSize,
		worker:      name,
		batch:       p.batch,
		lastEventID: p.lastEventIDs[w.Name],
		ranks:       make(map[uint32]*rankState),
		entry:       newEntry(p.journal, name, model),
	}
	if p.closed {
		l.closed = true
		return l
	}
	delete(p.lastEventIDs, w.Name)
	p.lanes[w.Name] = l
	l.aboutWorker(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: l.added}})
	return l
}

// RemoveWorker tells routers that a worker is gone, and forgets what it held.
func (p *Pipeline) RemoveWorker(name string, reason ingest.RemoveReason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lanes[name]
	if l == nil || p.closed {
		return
	}
	l.close()
	l.leave()
	l.aboutWorker(&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{
		Reason: kvcastv1.WorkerRemoved_Reason(reason),
	}}})
	p.lastEventIDs[name] = l.lastEventID
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

// leave lets nobody read what the worker held.
func (l *Lane) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = true
}

// close emits what is waiting, and lets the lane take no more.
func (l *Lane) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flushAlone(flushShutdown)
	l.closed = true
}

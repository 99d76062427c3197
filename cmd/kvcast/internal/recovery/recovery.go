// Package recovery continues where an earlier run of kvcast with the same durable journal ended, and writes the checkpoints
// from which a later run continues.
//
// Recover: the newest checkpoint of each worker, and the journal's entries after it, flow in; the state of pipeline and
// index flows out. It is the only way to start with a durable journal, whatever ended the earlier run. What entries do not
// say, because it was not stored when kvcast ended, the engines' replays bring again.
//
// Checkpointer: each worker's state flows into the journal's store, often enough that the journal need not retain entries
// for longer than routers may resume from.
package recovery

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
)

// Journal is what is recovered.
type Journal interface {
	// Load calls a function for each retained entry, in order. It fails with a jetstream.ErrUnreadable before the first one
	// if the newest is older than the entry needed.
	Load(ctx context.Context, needed uint64, each func(jetstream.Entry) error) error
	// Discard deletes all entries and checkpoints, and begins a new epoch.
	Discard(ctx context.Context) error
	Bounds() journal.Bounds
}

// Store keeps objects by name.
type Store interface {
	Put(ctx context.Context, name string, data []byte) error
	All(ctx context.Context) iter.Seq2[jetstream.Object, error]
	Delete(ctx context.Context, name string) error
}

// Pipeline is the state of the pipeline that is recovered.
type Pipeline interface {
	Checkpoint(data []byte) error
	Entry(seq uint64, worker string, body, state []byte) error
	Known(worker, model string, lastEventID uint64)
}

// Progress is how far a recovery is. Its fields may be read at any time.
type Progress struct {
	// Workers is the number of workers whose checkpoints are restored.
	Workers atomic.Int64
	// Seq is the last entry applied. Until is the newest entry of the journal.
	Seq, Until atomic.Uint64
}

// Recover brings the pipeline state that begin returns, and an empty index, to the state after the journal's newest entry. If the journal
// cannot be read, Recover discards its entries, and begins anew with an empty journal. It returns the workers to register again.
func Recover(
	ctx context.Context, j Journal, s Store, registrations Registrations, log *slog.Logger, p *Progress, x *index.Index, begin func() Pipeline,
) ([]ingestconfig.Worker, error) {
	began := time.Now()
	all, err := registrations.read(ctx, log)
	if err != nil {
		return nil, fmt.Errorf("recover: %w", err)
	}
	r := &reader{
		journal: j, store: s, registered: all, log: log, progress: p, pipeline: begin(), index: x,
		indexed: make(map[string]uint64), logged: began,
	}
	err = r.read(ctx)
	if errors.Is(err, jetstream.ErrUnreadable) {
		log.Error(unreadable, "error", err)
		return all.workers, r.discard(ctx, begin)
	}
	if err != nil {
		return nil, fmt.Errorf("recover: %w", err)
	}
	r.logRecovered(began)
	return all.workers, nil
}

const unreadable = "the journal cannot be read: starting with an empty journal and a new epoch; routers take a snapshot, and the " +
	"engines' caches are read again"

func (r *reader) logRecovered(began time.Time) {
	workers, blocks := r.index.Len()
	r.log.Info("recovered", "workers", workers, "blocks", blocks, "checkpoints", r.progress.Workers.Load(),
		"newest_seq", r.journal.Bounds().Newest, "epoch", r.journal.Bounds().Epoch, "took", time.Since(began).Round(time.Millisecond))
}

// progressInterval is the least time between two log lines about the progress of a recovery.
const progressInterval = time.Second

// reader reads what an earlier run has stored.
type reader struct {
	journal    Journal
	store      Store
	registered *registered
	log        *slog.Logger
	progress   *Progress
	pipeline   Pipeline
	index      *index.Index
	// indexed has the seq up to which the index has each worker's entries.
	indexed map[string]uint64
	// needed is the largest seq that a checkpoint has seen.
	needed    uint64
	logged    time.Time // when the progress was logged
	isReplica bool      // see Replicate
	// unreadable are the workers whose checkpoints cannot be read.
	unreadable []string
}

func (r *reader) read(ctx context.Context) error {
	for object, err := range r.store.All(ctx) {
		if r.isReplica && object.Name != "" && !strings.HasPrefix(object.Name, workerPrefix) {
			continue // not for the index
		}
		if name, ok := strings.CutPrefix(object.Name, registrationPrefix); ok {
			if err := r.registered.move(ctx, r.store, name, object.Data, err); err != nil {
				return err
			}
			continue
		}
		if err == nil {
			err = r.object(object)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && object.Name == "" { // it is not known which objects there are
			return fmt.Errorf("read checkpoints: %w", err)
		}
		if err != nil {
			message := "a checkpoint cannot be read: its worker is recovered from the journal's entries, or read again from its engine"
			if worker, ok := strings.CutPrefix(object.Name, workerPrefix); ok {
				r.unreadable = append(r.unreadable, worker)
			} else if object.Name == removedName {
				message = "the record of removed workers cannot be read: workers that come back begin with larger event ids"
				r.unreadable = append(r.unreadable, pipeline.RemovedWorkers)
			}
			if r.isReplica {
				return fmt.Errorf("%w: %s: %w", errChanged, object.Name, err)
			}
			r.log.Warn(message, "object", object.Name, "error", err)
		}
	}
	r.progress.Until.Store(r.journal.Bounds().Newest)
	last := uint64(0)
	err := r.journal.Load(ctx, r.needed, func(e jetstream.Entry) error {
		r.progress.Seq.Store(e.Seq)
		r.logProgress()
		last = e.Seq
		if err := r.pipeline.Entry(e.Seq, e.Worker, e.Body, e.State); err != nil {
			return fmt.Errorf("entry %d of worker %q: %w", e.Seq, e.Worker, err)
		}
		if e.Seq > r.indexed[e.Worker] {
			return r.index.ApplyBody(e.Seq, e.Body)
		}
		return nil
	})
	if err != nil {
		return err
	}
	last = max(last, r.journal.Bounds().Oldest-1)
	r.index.Advance(last)
	// Routers know these workers. The pipeline removes those whose state is lost.
	for _, worker := range r.unreadable {
		r.pipeline.Known(worker, "", 0)
	}
	workers, _ := r.index.Workers(nil)
	for i := range workers {
		r.pipeline.Known(workers[i].Name, workers[i].Model, workers[i].LastEventID)
	}
	return nil
}

// object restores a stored object.
func (r *reader) object(o jetstream.Object) error {
	if o.Name == removedName {
		return r.pipeline.Checkpoint(o.Data)
	}
	c, err := decodeCheckpoint(o.Name, o.Data)
	if err != nil {
		return err
	}
	r.needed = max(r.needed, c.GetIndexUpTo())
	if err := r.index.Restore(c.GetIndex()); err != nil {
		r.index.Forget(c.GetWorker())
		return err
	}
	r.indexed[c.GetWorker()] = c.GetIndexSeq()
	if err := r.pipeline.Checkpoint(c.GetPipeline()); err != nil {
		return err
	}
	r.progress.Workers.Add(1)
	r.logProgress()
	return nil
}

// logProgress logs the progress, at most once every progressInterval.
func (r *reader) logProgress() {
	now := time.Now()
	if now.Sub(r.logged) < progressInterval {
		return
	}
	r.logged = now
	r.log.Info("recovering", "checkpoints", r.progress.Workers.Load(), "seq", r.progress.Seq.Load(), "newest_seq", r.progress.Until.Load())
}

// discard begins with an empty journal.
func (r *reader) discard(ctx context.Context, begin func() Pipeline) error {
	if err := r.journal.Discard(ctx); err != nil {
		return fmt.Errorf("discard the journal: %w", err)
	}
	begin()
	r.index.Reset()
	r.index.Advance(r.journal.Bounds().Newest) // seqs continue
	return nil
}

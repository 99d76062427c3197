// Package apply keeps the blocks of workers at a target, of all but pools, or of a pool and those that load from it, or of the pools of a model: those that an index has at the start, and then the changes of the
// entries that it applies.
//
// In: an index, and its journal. Out: calls of a Target. Guarantee: a target that has applied all calls has the blocks of the
// index at some position, and follows it; if entries are compacted before they are read, it gets all blocks anew.
package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Target gets the blocks of workers.
type Target interface {
	// Begin adds a worker with its dp ranks, or changes it. Its ranks have no blocks then.
	Begin(worker string, added *kvcastv1.WorkerAdded)
	// Apply applies an event of a dp rank to a worker that has begun. The target may keep the event.
	Apply(worker string, event *kvcastv1.RouterEvent)
	// Flush ends what belongs together: an entry, or a part of the blocks that the index has. at is in seconds since the Unix
	// epoch.
	Flush(worker string, at float64)
	// End removes a worker that has begun.
	End(worker string)
}

// Source is where the blocks of a target come from.
type Source struct {
	Journal journal.Reader // an *follow.Follower
	// Index is the index that has applied the entries of the journal.
	Index *index.Index
	// Lock is held from the first call for an entry, or for a part of the index's blocks, until after Flush or End.
	Lock   sync.Locker
	Logger *slog.Logger
	// Pool, if not empty, selects a pool and the workers of its model that load from it, or, if PoolsOf is not empty, the other pools of that model.
	Pool, PoolsOf string
	// Restarted is called before the target gets all blocks anew; nil: nothing is.
	Restarted func()
}

// readBytes bounds the entries that are read at once, except for a single larger one.
const readBytes = 256 << 10

// run is a Source while it runs.
type run struct {
	*Source
	target Target
	after  map[string]uint64 // by worker that has begun, the last entry that the target has of it
	others map[string]bool   // the workers that are not applied
	// model is that of Pool, if hasModel is set: without it, it is not known which workers load from the pool.
	model    string
	hasModel bool
}

// isOther reports whether a worker is not applied, and keeps that.
func (r *run) isOther(name string, added *kvcastv1.WorkerAdded) bool {
	other := added.GetPool()
	switch {
	case name == r.Pool:
		other = false
	case r.PoolsOf != "":
		other = !added.GetPool() || added.GetModel() != r.PoolsOf
	case r.Pool != "":
		other = !slices.Contains(added.GetPools(), r.Pool) || !r.hasModel || added.GetModel() != r.model
	}
	r.others[name] = other
	return other
}

// Run applies blocks to the target until ctx ends, and calls begun when it has applied those that the index has. It returns an
// error if the journal cannot be read.
func (s *Source) Run(ctx context.Context, t Target, begun func()) error {
	r := run{Source: s, target: t, after: make(map[string]uint64), others: make(map[string]bool)}
	after := r.begin(ctx)
	begun()
	for ctx.Err() == nil {
		changed := s.Journal.Changed()
		model, hasModel := r.model, r.hasModel
		next, err := r.read(ctx, after)
		switch {
		case ctx.Err() != nil, errors.Is(err, journal.ErrClosed):
			return nil //nolint:nilerr // a shutdown, which may close the journal first
		case errors.Is(err, journal.ErrCompacted):
			s.Logger.Warn("blocks are read anew from the index: the journal no longer has the entries that follow", "position", after)
			if s.Restarted != nil {
				s.Restarted()
			}
			next = r.begin(ctx)
		case err != nil:
			return fmt.Errorf("follow the journal: %w", err)
		case r.model != model || r.hasModel != hasModel:
			next = r.begin(ctx)
		case next == after:
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
		after = next
	}
	return nil
}

// begin applies the blocks of all workers that the index has, and returns the position after which entries follow.
func (r *run) begin(ctx context.Context) (after uint64) {
	after = r.Journal.Bounds().Newest
	workers, _ := r.Index.Workers(nil)
	clear(r.others)
	for i := range workers {
		if w := &workers[i]; w.Name == r.Pool {
			r.model, r.hasModel = w.Model, true
		}
	}
	workers = slices.DeleteFunc(workers, func(w index.Worker) bool { return r.isOther(w.Name, w.Added) })
	present := make(map[string]bool, len(workers))
	for i := range workers {
		present[workers[i].Name] = true
	}
	r.Lock.Lock()
	for name := range r.after {
		if !present[name] {
			r.end(name)
		}
	}
	r.Lock.Unlock()
	for i := range workers {
		if err := r.beginWorker(ctx, workers[i].Name); err != nil && ctx.Err() == nil {
			r.Logger.Error("blocks of the index cannot be decoded", "worker", workers[i].Name, "error", err)
		}
	}
	return after
}

func (r *run) beginWorker(ctx context.Context, name string) error {
	snapshot, ok := r.Index.Snapshot(name)
	if !ok {
		return nil
	}
	snapshot.TokenIDs = r.Pool == ""
	added := snapshot.Worker.GetAdded()
	if r.isOther(name, added) { // since it has changed meanwhile, of which an entry follows
		return nil
	}
	r.Lock.Lock()
	r.target.Begin(name, added)
	r.target.Flush(name, Now())
	r.after[name] = snapshot.Seq
	r.Lock.Unlock()
	for _, rank := range added.GetRanks() {
		err := EachBlocks(ctx, &snapshot, rank, func(events []*kvcastv1.RouterEvent, _ int) error {
			r.Lock.Lock()
			defer r.Lock.Unlock()
			for _, event := range events {
				r.target.Apply(name, event)
			}
			r.target.Flush(name, Now())
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// EachBlocks calls do with the blocks of a dp rank in a snapshot, part by part, and the size of each part in bytes. Events may
// be kept. It returns the error of ctx, or of do, if there is one.
func EachBlocks(ctx context.Context, s *index.Snapshot, rank uint32, do func(events []*kvcastv1.RouterEvent, size int) error) error {
	for part := range s.RankBlocks(ctx, rank, kvblock.AllEvents) {
		blocks := new(kvcastv1.SnapshotBlocks)
		if err := proto.Unmarshal(part, blocks); err != nil {
			return err
		}
		size := len(part)
		s.Reuse(part)
		if err := do(blocks.GetEvents(), size); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Now returns the time for Target.Flush.
func Now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }

// read applies the next entries, and returns the position after them.
func (r *run) read(ctx context.Context, after uint64) (uint64, error) {
	chunk, err := r.Journal.Read(ctx, journal.Query{After: after, MaxBytes: readBytes})
	if err != nil || chunk.Last == after {
		return after, err
	}
	entries := new(kvcastv1.SubscribeResponse)
	if err := proto.Unmarshal(bytes.Join(chunk.Slices, nil), entries); err != nil {
		return after, err
	}
	for _, entry := range entries.GetEntries() {
		r.apply(entry)
	}
	return chunk.Last, nil
}

// apply applies an entry.
func (r *run) apply(entry *kvcastv1.Entry) {
	r.Lock.Lock()
	defer r.Lock.Unlock()
	name := entry.GetWorker()
	has, known := r.after[name]
	if known && entry.GetSeq() <= has {
		return
	}
	for _, event := range entry.GetEvents() {
		switch kind := event.GetEvent().(type) {
		case *kvcastv1.RouterEvent_WorkerAdded:
			if name == r.Pool && r.Pool != "" {
				r.model, r.hasModel = kind.WorkerAdded.GetModel(), true
			}
			if !r.isOther(name, kind.WorkerAdded) {
				r.target.Begin(name, kind.WorkerAdded)
				known = true
				continue
			}
			if known {
				r.end(name)
			}
			known = false
		case *kvcastv1.RouterEvent_WorkerRemoved:
			delete(r.others, name)
			if known {
				r.end(name)
			}
			known = false
		default:
			if r.others[name] || r.Pool != "" && !known {
				continue
			}
			if !known {
				r.target.Begin(name, &kvcastv1.WorkerAdded{Model: entry.GetModel()})
				known = true
			}
			r.target.Apply(name, event)
		}
	}
	if !known {
		return
	}
	r.after[name] = entry.GetSeq()
	at := float64(entry.GetEngineTimeUnixNano()) / 1e9
	if at <= 0 { // the engine has reported none
		at = Now()
	}
	r.target.Flush(name, at)
}

func (r *run) end(name string) {
	r.target.End(name)
	delete(r.after, name)
}

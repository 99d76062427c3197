package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// interval is how often a Checkpointer looks for checkpoints that are due.
const interval = time.Second

// Checkpointer writes checkpoints of the workers, and lets the journal remove the entries that no recovery needs.
type Checkpointer struct {
	Store    Store
	Log      *slog.Logger
	Pipeline *pipeline.Pipeline
	// State calls do with ingest's state of a worker, while the worker's lane cannot be called. It returns false if the worker does not exist.
	State func(worker string, do func(state []byte)) bool
	// Follower has applied the journal's entries to its index.
	Follower *follow.Follower
	// Retain makes the journal keep the entries after a seq.
	Retain func(seq uint64)
	// Written, if not nil, is called after each checkpoint of a worker, with its size and the time that it took.
	Written func(bytes int, took time.Duration)
	// Failed, if not nil, is called after each turn of Run in which a checkpoint was not written.
	Failed func()
}

// Run writes checkpoints until ctx ends. A checkpoint that fails is tried again; meanwhile the journal retains more
// entries, up to its limit.
func (c *Checkpointer) Run(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := c.Turn(ctx); err != nil && ctx.Err() == nil {
			c.Log.Warn("a checkpoint is not written: it is tried again", "error", err)
			if c.Failed != nil {
				c.Failed()
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// Turn writes the checkpoints that are due. One that fails does not prevent the others. That of a worker which another
// instance has claimed is left to that one.
func (c *Checkpointer) Turn(ctx context.Context) error {
	var errs []error
	for _, name := range c.Pipeline.CheckpointDue() {
		var err error
		if name == pipeline.RemovedWorkers {
			err = c.writeRemoved(ctx)
		} else {
			err = c.write(ctx, name)
		}
		if err != nil && !errors.Is(err, journal.ErrFenced) {
			errs = append(errs, fmt.Errorf("worker %q: %w", name, err))
		}
	}
	for _, worker := range c.Pipeline.ObsoleteCheckpoints() {
		if err := c.Store.Delete(ctx, workerPrefix+worker); err != nil {
			errs = append(errs, fmt.Errorf("delete the checkpoint of worker %q: %w", worker, err))
		}
	}
	c.Retain(c.Pipeline.RetainAfter(c.Follower.Bounds().Newest))
	return errors.Join(errs...)
}

// writeRemoved writes what the pipeline keeps of removed workers.
func (c *Checkpointer) writeRemoved(ctx context.Context) error {
	p, ok := c.Pipeline.Checkpoint(pipeline.RemovedWorkers, nil)
	if !ok {
		return nil
	}
	if _, err := p.Appended.Wait(ctx); err != nil {
		return err
	}
	if err := c.Store.Put(ctx, removedName, p.Data); err != nil {
		return err
	}
	c.Pipeline.CheckpointStored(p)
	return nil
}

// write writes a checkpoint of a worker.
func (c *Checkpointer) write(ctx context.Context, worker string) error {
	began := time.Now()
	var p pipeline.Checkpoint
	var ok bool
	c.State(worker, func(state []byte) { p, ok = c.Pipeline.Checkpoint(worker, state) })
	if !ok {
		return nil // it was removed
	}
	seq, err := p.Appended.Wait(ctx)
	if err != nil {
		return err
	}
	if err := c.Follower.Wait(ctx, seq); err != nil {
		return err
	}
	x := c.Follower.Index()
	state, indexSeq, ok := x.Checkpoint(ctx, worker)
	if !ok {
		return ctx.Err()
	}
	data, err := proto.Marshal(&statev1.WorkerCheckpoint{
		Version: version, Worker: worker, PipelineSeq: seq, Pipeline: p.Data,
		IndexSeq: indexSeq, IndexUpTo: x.Seq(), Index: state,
	})
	if err != nil {
		return err
	}
	if err := c.Store.Put(ctx, workerPrefix+worker, data); err != nil {
		return err
	}
	c.Pipeline.CheckpointStored(p)
	if c.Written != nil {
		c.Written(len(data), time.Since(began))
	}
	return nil
}

package recovery

import (
	"context"
	"errors"
	"log/slog"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
)

// SharedJournal is a journal to which several instances append.
type SharedJournal interface {
	// LoadWorker calls a function for each retained entry of a worker after a seq and up to another one, in order.
	LoadWorker(ctx context.Context, worker string, after, until uint64, each func(jetstream.Entry) error) error
	// First returns the seq of the oldest retained entry.
	First(ctx context.Context) (uint64, error)
}

// Getter reads an object; nil if there is none.
type Getter interface {
	Get(ctx context.Context, name string) ([]byte, error)
}

// WorkerState is the state of one worker at a claim.
type WorkerState struct {
	// Recovery has the worker, unless routers do not know it.
	Recovery *pipeline.Recovery
	// EventIDFloor is an id that is larger than that of any event of the worker, if Recovery does not know it; 0 if there was no event.
	EventIDFloor uint64
}

// eventIDsPerSeq is more than the events of an entry, which has at most 8 MiB.
const eventIDsPerSeq = 1 << 22

// Worker returns the state of a worker after the entry with a seq, its claim, up to which the index has all entries. If its checkpoint or
// entries cannot be read, the state is lost, which Recovery knows. An error means that reading may succeed later.
func Worker(ctx context.Context, j SharedJournal, s Getter, log *slog.Logger, x *index.Index, name string, claim uint64, cfg pipeline.Config) (WorkerState, error) {
	known, exists := x.Worker(name)
	r := pipeline.Recover(cfg)
	after := uint64(0)
	if exists {
		var err error
		if after, err = restoreWorker(ctx, s, r, name); err != nil {
			if ctx.Err() != nil || errors.Is(err, jetstream.ErrUnanswered) {
				r.Discard()
				return WorkerState{}, err
			}
			log.Warn("a checkpoint cannot be read: its worker is recovered from the journal's entries, or read again from its engine",
				"worker", name, "error", err)
		}
	}
	entries := 0
	err := j.LoadWorker(ctx, name, after, claim, func(e jetstream.Entry) error {
		if e.Owner == nil {
			entries++
		}
		if err := r.Entry(e.Seq, e.Worker, e.Body, e.State); err != nil {
			return unusable{err}
		}
		return nil
	})
	if errors.As(err, new(unusable)) {
		log.Error("an entry cannot be applied: its worker is read again from its engine", "worker", name, "error", err)
		r.Discard()
		r, err = pipeline.Recover(cfg), nil
	}
	if err != nil {
		r.Discard()
		return WorkerState{}, err
	}
	if exists {
		r.Known(name, known.Model, known.LastEventID)
		return WorkerState{Recovery: r}, nil
	}
	state := WorkerState{Recovery: r}
	if entries == 0 {
		first, err := j.First(ctx)
		if err != nil {
			r.Discard()
			return WorkerState{}, err
		}
		if first > 1 { // the worker may have been removed before
			state.EventIDFloor = claim * eventIDsPerSeq
		}
	}
	return state, nil
}

// unusable is an error of an entry that no later attempt can apply.
type unusable struct{ error }

// restoreWorker restores the pipeline's part of a worker's checkpoint, if there is one, and returns its seq.
func restoreWorker(ctx context.Context, s Getter, r *pipeline.Recovery, worker string) (uint64, error) {
	name := workerPrefix + worker
	data, err := s.Get(ctx, name)
	if data == nil || err != nil {
		return 0, err
	}
	c, err := decodeCheckpoint(name, data)
	if err != nil {
		return 0, err
	}
	return c.GetPipelineSeq(), r.Checkpoint(c.GetPipeline())
}

package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// Followed is a journal to which another process appends, and this one does not.
type Followed interface {
	Journal
	// Mark is called before the checkpoints are read, and then Load, which fails if they do not fit its entries.
	Mark(ctx context.Context) error
}

// errChanged means that a checkpoint could not be read. Another process may have replaced it meanwhile.
var errChanged = errors.New("a checkpoint cannot be read")

const (
	// replicaAttempts is how often a journal is read that changes meanwhile, and replicaWait the time between two attempts.
	replicaAttempts = 20
	replicaWait     = 250 * time.Millisecond
	// joinAttempts and joinWait are how often, and how far apart, a journal that is unreadable is read before Join discards it.
	joinAttempts = 4
	joinWait     = 2 * time.Second
)

// Replicate brings an empty index to the state after a journal that another process writes. It changes nothing in the
// journal or the store. While that process replaces checkpoints or removes entries, it begins anew, at most 20 times; while the
// journal's servers do not answer, until ctx ends.
func Replicate(ctx context.Context, j Followed, s Store, log *slog.Logger, p *Progress, x *index.Index) error {
	x.DoubtUnadded() // without a checkpoint, the entries that are retained may begin in the middle
	isUnanswered := false
	for attempt := 1; ; {
		began := time.Now()
		r := &reader{
			journal: j, store: s, log: log, progress: p, pipeline: noPipeline{}, index: x,
			indexed: make(map[string]uint64), logged: began, isReplica: true,
		}
		err := j.Mark(ctx)
		if err == nil {
			err = r.read(ctx)
		}
		switch {
		case err == nil:
			r.logRecovered(began)
			return nil
		case ctx.Err() == nil && jetstream.IsUnanswered(err):
			if !isUnanswered {
				log.Warn("the journal's servers do not answer: it is read again until they do", "error", err)
			}
			isUnanswered = true
		case attempt == replicaAttempts, !errors.Is(err, jetstream.ErrPurged) && !errors.Is(err, errChanged):
			return fmt.Errorf("recover: %w", err)
		default:
			log.Info("recovering anew, because the journal has changed", "cause", err)
			attempt++
		}
		x.Reset()
		p.Workers.Store(0)
		select {
		case <-time.After(replicaWait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Instances are the processes that append to a journal.
type Instances interface {
	// Revisions returns a number for each that has written a heartbeat lately, which grows with each heartbeat.
	Revisions(ctx context.Context) (map[string]uint64, error)
}

// Join is Replicate for a process that appends, too. If the journal cannot be read, also not at further attempts, and no other process that
// reads it writes heartbeats meanwhile, Join begins anew with an empty journal and a new epoch. beat is the time between two heartbeats.
func Join(
	ctx context.Context, j Followed, s Store, instances Instances, beat time.Duration, log *slog.Logger, p *Progress, x *index.Index,
) error {
	err := Replicate(ctx, j, s, log, p, x)
	var before map[string]uint64
	for attempt := 1; errors.Is(err, jetstream.ErrUnreadable); attempt++ {
		now, failed := instances.Revisions(ctx)
		if failed != nil {
			return fmt.Errorf("%w; find out whether another instance reads the journal: %w", err, failed)
		}
		if attempt == 1 {
			before = now
		}
		if attempt == joinAttempts {
			for id, revision := range now {
				if revision > before[id] {
					return fmt.Errorf("%w; it is not discarded, since the server %s uses it: stop all servers to begin anew", err, id)
				}
			}
			return beginAnew(ctx, j, log, x, err)
		}
		log.Warn("the journal cannot be read: it is tried again, since a server may have answered that is behind", "error", err)
		select {
		case <-time.After(max(joinWait, beat)):
		case <-ctx.Done():
			return ctx.Err()
		}
		x.Reset()
		p.Workers.Store(0)
		err = Replicate(ctx, j, s, log, p, x)
	}
	return err
}

// beginAnew discards a journal that cannot be read.
func beginAnew(ctx context.Context, j Followed, log *slog.Logger, x *index.Index, err error) error {
	log.Error(unreadable, "error", err)
	r := &reader{journal: j, index: x}
	if err := r.discard(ctx, func() Pipeline { return noPipeline{} }); err != nil {
		return err
	}
	if err := j.Mark(ctx); err != nil {
		return err
	}
	return j.Load(ctx, 0, func(e jetstream.Entry) error { return x.ApplyBody(e.Seq, e.Body) })
}

// noPipeline is the pipeline of a process that reads no engines.
type noPipeline struct{}

func (noPipeline) Checkpoint([]byte) error                    { return nil }
func (noPipeline) Entry(uint64, string, []byte, []byte) error { return nil }
func (noPipeline) Known(string, string, uint64)               {}

package serve

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/registration"
)

// discover runs the watches until ctx is done. It closes discovered when each watch has polled successfully at least once.
func discover(ctx context.Context, watches []discovery.Watch, workers discovery.Workers, discovered chan<- struct{}) error {
	var running sync.WaitGroup
	var missing atomic.Int64
	succeed := func() {
		if missing.Add(-1) == 0 {
			close(discovered)
		}
	}
	missing.Add(int64(len(watches)) + 1)
	errs := make([]error, len(watches))
	for i, w := range watches {
		succeeded := sync.OnceFunc(succeed)
		w.Polled = func(err error) {
			if err == nil {
				succeeded()
			}
		}
		running.Go(func() { errs[i] = w.Run(ctx, workers) })
	}
	succeed()
	running.Wait()
	return errors.Join(errs...)
}

// sourceStatus returns the sources of the workers that this server reads.
func (s *Service) sourceStatus() map[string][]*kvcastv1.SourceStatus {
	if !s.isAssembled() {
		return nil
	}
	return exportSources(s.ingest.Sources())
}

// exportSources returns sources by worker, as the gRPC contract describes them: one for each dp rank.
func exportSources(sources []ingest.SourceStatus) map[string][]*kvcastv1.SourceStatus {
	all := make(map[string][]*kvcastv1.SourceStatus)
	for i := range sources {
		src := &sources[i]
		down := time.Duration(0)
		if !src.DownSince.IsZero() {
			down = max(time.Since(src.DownSince), 1) // 0 means that there is a connection
		}
		for _, rank := range src.Ranks() {
			status := &kvcastv1.SourceStatus{
				Engine:         string(src.Engine),
				Endpoint:       src.Endpoint,
				ReplayEndpoint: src.Replay,
				ReplayState:    kvcastv1.ReplayState(src.ReplayState), // the same numbers
				DpRank:         rank,
				State:          kvcastv1.SourceState(src.State),
				Started:        src.Started,
				LastSeq:        src.LastSeq,
				DownNano:       uint64(down),
				Restarts:       src.Restarts,
				Repairs:        src.Repairs,
			}
			if src.HasEngineDelay {
				status.EngineDelayNano = proto.Int64(int64(src.EngineDelay))
			}
			all[src.Worker] = append(all[src.Worker], status)
		}
	}
	return all
}

// workerStates returns the states of the workers that have these sources.
func workerStates(sources []ingest.SourceStatus) map[string]kvcastv1.WorkerState {
	all := make(map[string]kvcastv1.WorkerState)
	for name, exported := range exportSources(sources) {
		all[name] = server.WorkerState(exported)
	}
	return all
}

// knowledge returns until when the index is known to have what the engines have cached.
func (s *Service) knowledge() server.Knowledge {
	var behind []server.RankSince
	now := time.Now()
	if s.isAssembled() {
		for _, src := range s.ingest.Sources() {
			if src.BehindSince.IsZero() {
				continue
			}
			for _, rank := range src.Ranks() {
				behind = append(behind, server.RankSince{Worker: src.Worker, Rank: rank, For: max(now.Sub(src.BehindSince), 1)})
			}
		}
	}
	return s.mode.knowledge(behind, now)
}

// workers gives the server access to ingest, which is created after the server. Its methods return when the index has
// applied the change, so that a client finds it in every later answer.
type workers struct{ *Service }

// AddWorker implements registration.Workers. With a durable journal, the worker is also stored.
func (w workers) AddWorker(ctx context.Context, worker ingestconfig.Worker) error {
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	if err := w.ingest.AddWorker(ctx, worker); err != nil {
		return err
	}
	if err := w.mode.registrations().Add(ctx, worker); err != nil {
		failed := notStored(err)
		if errors.Is(err, jetstream.ErrChanged) { // another server has it
			failed = ingestconfig.ErrWorkerExists
		}
		beyond := context.WithoutCancel(ctx) // so that a client that tries again is not refused
		return errors.Join(failed, w.ingest.RemoveWorker(beyond, worker.Name, feed.RemovedDeregistered))
	}
	return w.follower.Wait(ctx, w.mode.Bounds().Newest)
}

func (w workers) RemoveWorker(ctx context.Context, name string, why feed.RemoveReason) error {
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	// First, so that the worker does not come back if the server ends now.
	if err := w.mode.registrations().Remove(ctx, name); err != nil {
		return notStored(err)
	}
	if err := w.ingest.RemoveWorker(ctx, name, why); err != nil {
		return err
	}
	return w.follower.Wait(ctx, w.mode.Bounds().Newest)
}

// awaitRegistered waits until the state is recovered and the workers of an earlier run are registered again, so that a
// change is not undone by that. It returns an error if the server reads no engines.
func (s *Service) awaitRegistered(ctx context.Context) error {
	if !s.cfg.Cluster.Ingest {
		return registration.ErrNotIngesting
	}
	select {
	case <-s.registered:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func notStored(err error) error { return fmt.Errorf("%w: %w", registration.ErrNotStored, err) }

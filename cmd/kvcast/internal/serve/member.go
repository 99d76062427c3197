package serve

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/member"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

const (
	// handOverTimeout bounds the hand-over of all workers at a shutdown.
	handOverTimeout = 3 * time.Second
	// changeTimeout is how long a registration waits until an instance has added or removed the worker.
	changeTimeout = 10 * time.Second
)

// newMember returns what makes this process one of the instances that share a stream.
func newMember(c *config.Config, log *slog.Logger, registry *prometheus.Registry) *member.Member {
	host := c.ClusterName
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			host = "unknown"
		}
	}
	return member.New(member.Config{
		ID: rand.Text(), TTL: c.ClusterTTL, Grace: max(c.Ingest.Grace, 0), Log: log,
		About:   member.About{Host: host, PID: os.Getpid(), Version: cli.Version(), Started: time.Now().UTC(), Ingest: c.IngestsEngines},
		Metrics: registry, Incidents: c.Server.Incidents,
	})
}

// join reads what the instances have appended so far, and creates what reads engines.
func (s *Service) join(ctx context.Context) error {
	d := s.durable
	instances, err := d.Instances(ctx)
	if err != nil {
		return err
	}
	if err := recovery.Join(ctx, d, d.Checkpoints(), member.Heartbeats{KV: instances}, s.cfg.ClusterTTL/3, s.log, &d.progress, s.follower.Index()); err != nil {
		return err
	}
	d.Pin(s.follower.Index().Seq())
	s.cfg.Pipeline.Durable, s.cfg.Pipeline.Shared, s.cfg.Pipeline.Fenced = true, true, d.member.Fenced
	s.cfg.Pipeline.Oldest = func() uint64 { return d.Bounds().Oldest }
	p, err := pipeline.New(s.cfg.Pipeline, d)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	for _, w := range s.cfg.Ingest.Workers {
		if err := d.member.AddWorker(ctx, w); err != nil {
			return err
		}
	}
	s.cfg.Ingest.Workers, s.cfg.Ingest.Durable, s.cfg.Ingest.Claim = nil, true, d.member.Claim
	s.cfg.Ingest.PeerTTL = s.cfg.ClusterTTL // so that they go to another server
	if err := s.assemble(p); err != nil {
		return err
	}
	d.member.Attach(member.Parts{
		Journal: d.Journal, Follower: s.follower, Ingest: s.ingest, Pipeline: p, PipelineConfig: s.cfg.Pipeline,
		States: workerStates, Overpredicted: s.server.Overpredicted, Address: s.Addr(),
	})
	close(s.registered)
	d.recovering.Store(false)
	return nil
}

// runMember takes part in the cluster, until ctx ends or the journal fails, and then hands over the workers.
func (d *durable) runMember(ctx context.Context, s *Service) error {
	checkpointer := recovery.Checkpointer{
		Store: claimedStore{d.Checkpoints(), d.member}, Log: s.log, Pipeline: s.pipeline, State: s.ingest.Checkpoint, Follower: s.follower,
		Retain: d.member.Retain, Written: d.checkpointWritten, Failed: d.checkpointFailures.Inc,
	}
	beyond := context.WithoutCancel(ctx)
	working, stop := context.WithCancel(ctx)
	handOver, stopHandOver := context.WithCancel(beyond)
	defer stopHandOver()
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { checkpointer.Run(working) })
	failed := make(chan error, 1)
	group.Go(func() { failed <- d.member.Run(working, handOver) })
	watched := background(func() error { return d.watch(working, s) })
	var err error
	select {
	case err = <-failed:
		stop()
		err = errors.Join(err, <-watched)
	case err = <-watched:
		stop()
	}
	if err != nil {
		stopHandOver()
	}
	time.AfterFunc(handOverTimeout, stopHandOver)
	return err
}

// claimedStore stores checkpoints of the workers that this instance has claimed.
type claimedStore struct {
	checkpoints
	member *member.Member
}

type checkpoints interface {
	recovery.Store
	PutClaimed(ctx context.Context, name string, data []byte, claim uint64) error
}

// Put implements recovery.Store.
func (c claimedStore) Put(ctx context.Context, name string, data []byte) error {
	worker, _ := recovery.WorkerOf(name)
	claim := c.member.Claimed(worker)
	if claim == 0 {
		return journal.ErrFenced
	}
	return c.PutClaimed(ctx, name, data, claim)
}

// Delete implements recovery.Store. It leaves checkpoints of other instances to them.
func (c claimedStore) Delete(ctx context.Context, name string) error {
	if worker, _ := recovery.WorkerOf(name); c.member.Claimed(worker) == 0 {
		return nil
	}
	return c.checkpoints.Delete(ctx, name)
}

// sharedWorkers registers workers for all instances. Its methods return when the index has applied the change, or after
// changeTimeout.
type sharedWorkers struct{ *Service }

// AddWorker implements server.Workers.
func (w sharedWorkers) AddWorker(ctx context.Context, worker ingestconfig.Worker) error {
	if err := (&ingestconfig.Config{Workers: []ingestconfig.Worker{worker}}).Validate(); err != nil {
		return err
	}
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	if _, wanted := w.durable.member.IsWanted(worker.Name); wanted {
		return ingestconfig.ErrWorkerExists
	}
	if err := w.durable.member.CheckSockets(worker); err != nil {
		return err
	}
	switch err := w.durable.registrations().Add(ctx, worker); {
	case errors.Is(err, jetstream.ErrChanged): // another instance has registered it meanwhile
		return ingestconfig.ErrWorkerExists
	case err != nil:
		return notStored(err)
	}
	return w.await(ctx, worker.Name, true)
}

// RemoveWorker implements server.Workers.
func (w sharedWorkers) RemoveWorker(ctx context.Context, name string, _ feed.RemoveReason) error {
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	if registered, _ := w.durable.member.IsWanted(name); !registered {
		return ingestconfig.ErrNoWorker
	}
	if err := w.durable.registrations().Remove(ctx, name); err != nil {
		return notStored(err)
	}
	return w.await(ctx, name, false)
}

// await waits until the index has a worker, or does not have it.
func (w sharedWorkers) await(ctx context.Context, name string, there bool) error {
	timeout := time.NewTimer(changeTimeout)
	defer timeout.Stop()
	for {
		changed := w.follower.Changed()
		if _, ok := w.follower.Index().Worker(name); ok == there {
			return nil
		}
		select {
		case <-changed:
		case <-timeout.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

var _ server.Workers = sharedWorkers{}

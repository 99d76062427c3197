package serve

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/member"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/registration"
)

const (
	// handOverTimeout bounds the hand-over of all workers at a shutdown.
	handOverTimeout = 3 * time.Second
	// changeTimeout is how long a registration waits until an instance has added or removed the worker.
	changeTimeout = 10 * time.Second
)

// clustered is a journal in NATS servers, and what makes this server one of the instances that use it.
type clustered struct {
	*durable
	member *member.Member
}

// openClustered opens the journal in NATS servers, with the settings of its mode.
func openClustered(ctx context.Context, s *Service, cfg jetstream.Config) (clustered, error) {
	j, m := &s.cfg.Journal, s.newMember()
	cfg.Servers, cfg.Instance, cfg.Owned = j.Servers(), m.ID(), m.Owned
	cfg.Credentials, cfg.TLSCA, cfg.TLSCert, cfg.TLSKey = j.Credentials, j.CA, j.Cert, j.Key
	d, err := openDurable(ctx, s, cfg, m.IsolatedSince)
	if err != nil {
		return clustered{}, err
	}
	s.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_journal_connected",
			Help: "1 while there is a connection to one of the NATS servers, and 0 otherwise."},
			func() float64 {
				if connected, _ := d.Connection(); connected {
					return 1
				}
				return 0
			}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvcast_journal_reconnects_total",
			Help: "Connections to NATS servers that were established again after one was lost."},
			func() float64 { _, reconnects := d.Connection(); return float64(reconnects) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvcast_journal_foreign_messages_total",
			Help: "Messages of the stream that are no entries of kvcast."},
			func() float64 { return float64(d.Foreign()) }))
	return clustered{d, m}, nil
}

// newMember returns what makes this process one of the instances that share a stream.
func (s *Service) newMember() *member.Member {
	c := s.cfg
	host := c.Cluster.Name
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			host = "unknown"
		}
	}
	return member.New(member.Config{
		ID: rand.Text(), TTL: c.Cluster.TTL, Grace: max(c.Ingest.Grace, 0), Log: s.log,
		About:   member.About{Host: host, PID: os.Getpid(), Version: cli.Version(), Started: time.Now().UTC(), Ingest: c.Cluster.Ingest},
		Metrics: s.registry, Incidents: c.Server.Incidents,
	})
}

func (c clustered) configure(to *server.Config) {
	to.Workers = registration.New(sharedWorkers{c.s, c}, c.s.cfg.RegisterHosts)
	to.Cluster, to.Recovery, to.Newest = c.member, c.status, c.Newest
}

func (c clustered) discoverer() discovery.Workers { return c.member }

func (c clustered) settle(ctx context.Context, atMost time.Duration) error {
	wait := time.NewTimer(atMost)
	defer wait.Stop()
	select {
	case <-c.member.Settled():
	case <-wait.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

func (c clustered) knowledge(behind []server.RankSince, _ time.Time) server.Knowledge {
	k := c.member.Knowledge()
	k.Behind = append(k.Behind, behind...)
	return k
}

// lookAtStream sets the time after which others may have entries that the server lacks. It returns when it had all of them.
func (c clustered) lookAtStream() (confirmed time.Time) {
	confirmed = c.member.StreamConfirmed()
	c.s.server.SetOutdatedAfter(confirmed.Add(c.s.cfg.Cluster.TTL))
	return confirmed
}

// shared is the mode of a server that reads engines and shares them with others.
type shared struct{ clustered }

func openShared(ctx context.Context, s *Service) (mode, error) {
	c, err := openClustered(ctx, s, jetstream.Config{Replicas: s.cfg.Journal.Replicas})
	return shared{c}, err
}

// recover reads what the instances have appended so far, and creates what reads engines.
func (c shared) recover(ctx context.Context) ([]ingestconfig.Worker, error) {
	s := c.s
	instances, err := c.Instances(ctx)
	if err != nil {
		return nil, err
	}
	if err := recovery.Join(ctx, c, c.Checkpoints(), member.Heartbeats{KV: instances}, s.cfg.Cluster.TTL/3, s.log, &c.progress, s.follower.Index()); err != nil {
		return nil, err
	}
	c.Pin(s.follower.Index().Seq())
	s.cfg.Pipeline.Durable, s.cfg.Pipeline.Shared, s.cfg.Pipeline.Fenced = true, true, c.member.Fenced
	s.cfg.Pipeline.Oldest = func() uint64 { return c.Bounds().Oldest }
	p, err := pipeline.New(s.cfg.Pipeline, c)
	if err != nil {
		return nil, cli.UsageError{Err: err}
	}
	for _, w := range s.cfg.Ingest.Workers {
		if err := c.member.AddWorker(ctx, w); err != nil {
			return nil, err
		}
	}
	s.cfg.Ingest.Workers, s.cfg.Ingest.Durable, s.cfg.Ingest.Claim = nil, true, c.member.Claim
	s.cfg.Ingest.PeerTTL = s.cfg.Cluster.TTL // so that they go to another server
	if err := s.assemble(p); err != nil {
		return nil, err
	}
	c.member.Attach(member.Parts{
		Journal: c.Journal, Follower: s.follower, Ingest: s.ingest, Pipeline: p, PipelineConfig: s.cfg.Pipeline,
		States: workerStates, Overpredicted: s.server.Overpredicted, Address: s.Addr(),
	})
	close(s.registered)
	c.recovering.Store(false)
	return nil, nil
}

// beside takes part in the cluster, and then hands over the workers.
func (c shared) beside(ctx context.Context, _ []ingestconfig.Worker, _ <-chan struct{}) error {
	checkpointer := c.checkpointer(claimedStore{c.Checkpoints(), c.member}, c.member.Retain)
	beyond := context.WithoutCancel(ctx)
	working, stop := context.WithCancel(ctx)
	handOver, stopHandOver := context.WithCancel(beyond)
	defer stopHandOver()
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { checkpointer.Run(working) })
	failed := make(chan error, 1)
	group.Go(func() { failed <- c.member.Run(working, handOver) })
	engines := listening{listeners: c.s.ingest, log: c.s.log}
	watched := background(func() error {
		return c.watch(working, func(now time.Time) {
			confirmed := c.lookAtStream()
			engines.look(isUnanswered(now, confirmed, c.isolatedSince(), c.s.cfg.Cluster.TTL), c.member.OthersIngest())
		})
	})
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

// sharedWorkers registers workers for all instances. Its methods return when the index has applied the change, or after changeTimeout.
type sharedWorkers struct {
	*Service
	cluster clustered
}

func (w sharedWorkers) AddWorker(ctx context.Context, worker ingestconfig.Worker) error {
	if err := (&ingestconfig.Config{Workers: []ingestconfig.Worker{worker}}).Validate(); err != nil {
		return err
	}
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	if _, wanted := w.cluster.member.IsWanted(worker.Name); wanted {
		return ingestconfig.ErrWorkerExists
	}
	if err := w.cluster.member.CheckSockets(worker); err != nil {
		return err
	}
	switch err := w.cluster.registrations().Add(ctx, worker); {
	case errors.Is(err, jetstream.ErrChanged): // another instance has registered it meanwhile
		return ingestconfig.ErrWorkerExists
	case err != nil:
		return notStored(err)
	}
	return w.await(ctx, worker.Name, true)
}

func (w sharedWorkers) RemoveWorker(ctx context.Context, name string, _ feed.RemoveReason) error {
	if err := w.awaitRegistered(ctx); err != nil {
		return err
	}
	if registered, _ := w.cluster.member.IsWanted(name); !registered {
		return ingestconfig.ErrNoWorker
	}
	if err := w.cluster.registrations().Remove(ctx, name); err != nil {
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

var _ registration.Workers = sharedWorkers{}

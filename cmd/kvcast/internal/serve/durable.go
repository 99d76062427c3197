package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/member"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// openTimeout bounds the start of an embedded nats-server, and the first connection to others.
	openTimeout = time.Minute
	// openLogInterval is the time between two log lines while the journal is opened. An embedded nats-server reads all of its
	// files, and cannot be interrupted.
	openLogInterval = 5 * time.Second
	// stallPoll is how often it is checked whether the journal acknowledges appends, and stallTime is how long it may
	// acknowledge none before the server is not ready.
	stallPoll = 500 * time.Millisecond
	stallTime = 2 * time.Second
)

// durable is a durable journal, and what is stored beside it.
type durable struct {
	*jetstream.Journal
	member     *member.Member // nil unless other instances may use the journal too
	log        *slog.Logger
	progress   recovery.Progress
	recovering atomic.Bool

	checkpointTime     prometheus.Histogram
	checkpointBytes    prometheus.Counter
	checkpointFailures prometheus.Counter
}

func openDurable(ctx context.Context, c *config.Config, log *slog.Logger, registry *prometheus.Registry) (*durable, error) {
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	j := &c.Journal
	cfg := jetstream.Config{
		Dir: j.Dir(), Servers: j.Servers(), Stream: j.Stream, Retention: j.Retention,
		Credentials: j.Credentials, TLSCA: j.CA, TLSCert: j.Cert, TLSKey: j.Key, Log: log,
	}
	if cfg.Dir != "" {
		cfg.SyncInterval, cfg.SyncAlways = j.Sync, j.Sync == 0
	} else if cfg.Follow = !c.IngestsEngines; !cfg.Follow {
		cfg.Replicas = j.Replicas
	}
	var m *member.Member
	if len(cfg.Servers) > 0 {
		m = newMember(c, log, registry)
		cfg.Instance, cfg.Owned = m.ID(), m.Owned
	}
	stop := logOpening(log, j.Store)
	entries, err := jetstream.Open(opening, cfg)
	stop()
	if err != nil {
		return nil, fmt.Errorf("open the journal in %s: %w; %s", j.Store, err, journalAdvice(err))
	}
	c.Pipeline.MaxRecordBytes = entries.MaxRecordBytes()
	d := &durable{
		Journal: entries, member: m, log: log,
		checkpointTime: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvcast_checkpoint_seconds", Help: "Time to write a checkpoint of a worker.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 2, 14),
		}),
		checkpointBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvcast_checkpoint_bytes_total", Help: "Bytes of the checkpoints written.",
		}),
		checkpointFailures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvcast_checkpoint_failures_total", Help: "Times that checkpoints that were due could not be written.",
		}),
	}
	d.recovering.Store(true)
	registry.MustRegister(d.checkpointTime, d.checkpointBytes, d.checkpointFailures,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_recovery_entries_left",
			Help: "Entries of the journal that a recovery has not applied yet; 0 after the recovery."},
			func() float64 {
				if !d.recovering.Load() {
					return 0
				}
				return float64(d.progress.Until.Load() - min(d.progress.Until.Load(), d.progress.Seq.Load()))
			}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_journal_stalled",
			Help: "1 while the journal acknowledges no appends, and 0 otherwise."},
			func() float64 {
				if d.isStalled(time.Now()) {
					return 1
				}
				return 0
			}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_journal_appends_in_flight",
			Help: "Appends that the journal has not acknowledged yet. At 512, ingest waits."},
			func() float64 { return float64(d.InFlight()) }))
	if len(cfg.Servers) > 0 {
		registry.MustRegister(
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
				func() float64 { _, reconnects := d.Connection(); return float64(reconnects) }))
	}
	return d, nil
}

// logOpening logs how long the journal takes to open, every openLogInterval, until stop is called.
func logOpening(log *slog.Logger, store string) (stop func()) {
	began, ticker, stopped := time.Now(), time.NewTicker(openLogInterval), make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case now := <-ticker.C:
				log.Warn("opening the journal takes long: its files are checked, or its servers do not answer",
					"journal", store, "for", now.Sub(began).Round(time.Second))
			case <-stopped:
				return
			}
		}
	})
	return func() {
		ticker.Stop()
		close(stopped)
		group.Wait()
	}
}

// status returns the progress of the recovery; nil if none is in progress.
func (d *durable) status() *kvcastv1.Recovery {
	if d == nil || !d.recovering.Load() {
		return nil
	}
	return &kvcastv1.Recovery{
		Workers: uint64(d.progress.Workers.Load()), AppliedSeq: d.progress.Seq.Load(), NewestSeq: d.progress.Until.Load(),
	}
}

func (d *durable) registrations() recovery.Registrations {
	return recovery.Registrations{Store: d.Registrations()}
}

func (d *durable) isStalled(now time.Time) bool {
	for _, since := range []time.Time{d.Stalled(), d.isolatedSince()} {
		if !since.IsZero() && now.Sub(since) > stallTime {
			return true
		}
	}
	return false
}

// isolatedSince returns since when the servers have accepted no heartbeats. An instance that owns no workers has no appends that
// would show it.
func (d *durable) isolatedSince() time.Time {
	if d.member == nil {
		return time.Time{}
	}
	return d.member.IsolatedSince()
}

// recover recovers the state from a durable journal, and creates what reads the engines. It returns the
// workers to register again.
func (s *Service) recover(ctx context.Context) ([]ingestconfig.Worker, error) {
	d := s.durable
	switch {
	case d == nil:
		return nil, nil
	case !s.cfg.IngestsEngines:
		if err := recovery.Replicate(ctx, d, d.Checkpoints(), s.log, &d.progress, s.follower.Index()); err != nil {
			return nil, err
		}
		d.Pin(s.follower.Index().Seq())
		d.member.Attach(member.Parts{Journal: d.Journal, Follower: s.follower, Overpredicted: s.server.Overpredicted, Address: s.Addr()})
		d.recovering.Store(false)
		return nil, nil
	case d.member != nil:
		return nil, s.join(ctx)
	}
	var recovered *pipeline.Recovery
	s.cfg.Pipeline.Durable = true
	registered, err := recovery.Recover(ctx, d, d.Checkpoints(), d.registrations(), s.log, &d.progress, s.follower.Index(), func() recovery.Pipeline {
		recovered = pipeline.Recover(s.cfg.Pipeline)
		return recovered
	})
	if err != nil {
		return nil, err
	}
	for worker, cause := range recovered.Lost() {
		s.log.Warn("the state of a worker is lost: routers drop its blocks, and its engine is read again", "worker", worker, "error", cause)
	}
	s.cfg.Ingest.Durable, s.cfg.Ingest.Recovered = true, recovered.Workers()
	p, err := recovered.Pipeline(d)
	if err != nil {
		return nil, err
	}
	if err := s.assemble(p); err != nil {
		return nil, err
	}
	d.recovering.Store(false)
	return registered, nil
}

// run registers the workers that were registered before, writes checkpoints, and notifies the server whether the journal
// stalls, until ctx ends or the journal fails.
func (d *durable) run(ctx context.Context, s *Service, registered []ingestconfig.Worker, discovered <-chan struct{}) error {
	if d.member != nil {
		return d.runMember(ctx, s)
	}
	d.register(ctx, s, registered)
	checkpointer := recovery.Checkpointer{
		Store: d.Checkpoints(), Log: s.log, Pipeline: s.pipeline, State: s.ingest.Checkpoint, Follower: s.follower, Retain: d.Retain,
		Written: d.checkpointWritten, Failed: d.checkpointFailures.Inc,
	}
	working, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { checkpointer.Run(working) })
	group.Go(func() {
		select {
		case <-s.unclaimedAfter(discovered):
			if err := s.ingest.RemoveUnclaimed(working); err != nil && working.Err() == nil {
				s.log.Warn("workers that are not configured any more stay in the stream", "error", err)
			}
		case <-working.Done():
		}
	})
	return d.watch(ctx, s)
}

func (d *durable) checkpointWritten(bytes int, took time.Duration) {
	d.checkpointBytes.Add(float64(bytes))
	d.checkpointTime.Observe(took.Seconds())
}

// register registers the workers that were registered before, unless ctx ends.
func (d *durable) register(ctx context.Context, s *Service, workers []ingestconfig.Worker) {
	for _, w := range workers {
		err := s.ingest.AddWorker(ctx, w)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			continue
		}
		s.log.Warn("a worker that was registered before is not registered again", "worker", w.Name, "error", err)
		if !errors.Is(err, ingestconfig.ErrWorkerExists) {
			continue // it may fit after the next start
		}
		if err := d.registrations().Remove(ctx, w.Name); err != nil {
			s.log.Warn("registration is kept", "worker", w.Name, "error", err)
		}
	}
	close(s.registered)
}

// watch notifies the server whether the journal stalls, and refuses engines that connect while the NATS servers do not answer,
// until ctx ends. It returns an error if the journal fails.
func (d *durable) watch(ctx context.Context, s *Service) error {
	ticker := time.NewTicker(stallPoll)
	defer ticker.Stop()
	engines := listening{listeners: s.ingest, log: s.log}
	for {
		select {
		case now := <-ticker.C:
			s.server.SetStalled(d.isStalled(now))
			if d.member == nil {
				continue
			}
			confirmed := d.member.StreamConfirmed()
			s.server.SetOutdated(now.Sub(confirmed) > s.cfg.ClusterTTL)
			if s.cfg.IngestsEngines {
				engines.look(isUnanswered(now, confirmed, d.isolatedSince(), s.cfg.ClusterTTL), d.member.OthersIngest())
			}
		case <-d.Failed(): // an idle pipeline would not notice
			if err := d.Err(); errors.Is(err, jetstream.ErrOutdated) {
				return fmt.Errorf("%w, because the process stood still or was cut off for too long; kvcast exits: restart it, and it reads the present state", err)
			}
			return fmt.Errorf("%w; kvcast exits, because routers would miss entries: remove the cause and restart kvcast", d.Err())
		case <-ctx.Done():
			return nil
		}
	}
}

// unclaimedAfter returns a channel that receives or is closed when discovery has had time to find the workers that an
// earlier run has found.
func (s *Service) unclaimedAfter(discovered <-chan struct{}) <-chan struct{} {
	if len(s.watches) == 0 {
		return discovered
	}
	passed := make(chan struct{})
	time.AfterFunc(max(s.cfg.Ingest.Grace, 0), func() {
		<-discovered
		close(passed)
	})
	return passed
}

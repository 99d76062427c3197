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

	"github.com/kvcast/kvcast/cmd/kvcast/internal/recovery"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/server/registration"
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
	reading
	progress   recovery.Progress
	recovering atomic.Bool
	// isolatedSince returns since when the servers have accepted no heartbeats; zero: they do, or there are none. An instance that owns
	// no workers has no appends that would show it.
	isolatedSince func() time.Time

	checkpointTime     prometheus.Histogram
	checkpointBytes    prometheus.Counter
	checkpointFailures prometheus.Counter
}

// openDurable opens a journal, with the settings of its mode.
func openDurable(ctx context.Context, s *Service, cfg jetstream.Config, isolatedSince func() time.Time) (*durable, error) {
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	j, log, registry := &s.cfg.Journal, s.log, s.registry
	cfg.Stream, cfg.Retention, cfg.Log = j.Stream, j.Retention, log
	stop := logOpening(log, j.Store)
	entries, err := jetstream.Open(opening, cfg)
	stop()
	if err != nil {
		return nil, fmt.Errorf("open the journal in %s: %w; %s", j.Store, err, journalAdvice(err))
	}
	s.cfg.Pipeline.MaxRecordBytes = entries.MaxRecordBytes()
	d := &durable{
		Journal: entries, reading: reading{s}, isolatedSince: isolatedSince,
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
	if !d.recovering.Load() {
		return nil
	}
	return &kvcastv1.Recovery{
		Workers: uint64(d.progress.Workers.Load()), AppliedSeq: d.progress.Seq.Load(), NewestSeq: d.progress.Until.Load(),
	}
}

func (d *durable) registrations() registrations { return d.stored() }

func (d *durable) stored() recovery.Registrations {
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

// opened leaves it to recover to create what reads engines.
func (*durable) opened() error { return nil }

// alone is the mode of a journal in a directory, which no other server uses.
type alone struct{ *durable }

func openAlone(ctx context.Context, s *Service) (mode, error) {
	j := &s.cfg.Journal
	d, err := openDurable(ctx, s, jetstream.Config{Dir: j.Dir(), SyncInterval: j.Sync, SyncAlways: j.Sync == 0}, func() time.Time { return time.Time{} })
	if err != nil {
		return nil, err
	}
	s.registry.MustRegister(newDisk(j.Dir()))
	return alone{d}, nil
}

func (a alone) configure(c *server.Config) {
	c.Workers, c.Recovery = registration.New(workers{a.s}, a.s.cfg.RegisterHosts), a.status
}

func (a alone) recover(ctx context.Context) ([]ingestconfig.Worker, error) {
	s := a.s
	var recovered *pipeline.Recovery
	s.cfg.Pipeline.Durable = true
	registered, err := recovery.Recover(ctx, a, a.Checkpoints(), a.stored(), s.log, &a.progress, s.follower.Index(), func() recovery.Pipeline {
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
	p, err := recovered.Pipeline(a)
	if err != nil {
		return nil, err
	}
	if err := s.assemble(p); err != nil {
		return nil, err
	}
	a.recovering.Store(false)
	return registered, nil
}

func (a alone) knowledge(behind []server.RankSince, now time.Time) server.Knowledge {
	confirmed := a.Stalled()
	if confirmed.IsZero() {
		confirmed = now
	}
	return a.s.ownKnowledge(behind, confirmed, now)
}

// beside registers the workers that were registered before, writes checkpoints, and notifies the server whether the journal stalls.
func (a alone) beside(ctx context.Context, registered []ingestconfig.Worker, discovered <-chan struct{}) error {
	s := a.s
	a.register(ctx, registered)
	checkpointer := a.checkpointer(a.Checkpoints(), a.Retain)
	working, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { checkpointer.Run(working) })
	group.Go(func() {
		if s.awaitDiscovered(working, discovered) != nil {
			return
		}
		if err := s.ingest.RemoveUnclaimed(working); err != nil && working.Err() == nil {
			s.log.Warn("workers that are not configured any more stay in the stream", "error", err)
		}
	})
	return a.watch(ctx, func(time.Time) {})
}

// checkpointer returns what writes checkpoints to a store.
func (d *durable) checkpointer(store recovery.Store, retain func(uint64)) *recovery.Checkpointer {
	return &recovery.Checkpointer{
		Store: store, Log: d.s.log, Pipeline: d.s.pipeline, State: d.s.ingest.Checkpoint, Follower: d.s.follower, Retain: retain,
		Written: d.checkpointWritten, Failed: d.checkpointFailures.Inc,
	}
}

func (d *durable) checkpointWritten(bytes int, took time.Duration) {
	d.checkpointBytes.Add(float64(bytes))
	d.checkpointTime.Observe(took.Seconds())
}

// register registers the workers that were registered before, unless ctx ends.
func (a alone) register(ctx context.Context, workers []ingestconfig.Worker) {
	s := a.s
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
		if err := a.registrations().Remove(ctx, w.Name); err != nil {
			s.log.Warn("registration is kept", "worker", w.Name, "error", err)
		}
	}
	close(s.registered)
}

// watch notifies the server whether the journal stalls, and calls look as often as it looks, until ctx ends. It returns an error if the
// journal fails.
func (d *durable) watch(ctx context.Context, look func(now time.Time)) error {
	ticker := time.NewTicker(stallPoll)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			d.s.server.SetStalled(d.isStalled(now))
			look(now)
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

// awaitDiscovered waits until discovery has succeeded, and has had time to find the workers that an earlier run has found. While it fails, they
// stay. It returns an error if ctx ends before.
func (s *Service) awaitDiscovered(ctx context.Context, discovered <-chan struct{}) error {
	if len(s.watches) > 0 {
		select {
		case <-time.After(max(s.cfg.Ingest.Grace, 0)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case <-discovered:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

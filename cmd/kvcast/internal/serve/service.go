package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/process"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/tracing"
	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/console"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/history"
	"github.com/kvcast/kvcast/internal/incident"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

// Time limits for stopping the parts. The documented limit for the shutdown is 10 s.
const (
	discoveryStopTimeout  = 500 * time.Millisecond
	ingestStopTimeout     = 2 * time.Second
	pipelineStopTimeout   = 3 * time.Second
	subscriberStopTimeout = 3 * time.Second
	journalStopTimeout    = time.Second
	tracingStopTimeout    = 500 * time.Millisecond
)

// entries is a journal that an follow.Follower can read.
type entries interface {
	journal.Journal
	Pin(seq uint64)
	Bytes() int
	EvictedBytes() int
}

// Service is a server and all its parts.
type Service struct {
	cfg      *config.Config
	log      *slog.Logger
	registry *prometheus.Registry
	serving  chan struct{} // closed when the server starts to serve routers
	watches  []discovery.Watch
	mode     mode
	follower *follow.Follower
	server   *server.Server
	history  *history.History
	admin    *http.Server
	console  *console.Console // nil: none
	tracing  *tracing.Tracing // nil: calls are not traced

	credentials *credentials

	grpcPort  net.Listener
	adminPort net.Listener // nil: none
	egress    egress

	// assembled is closed when ingest and pipeline are set; see mode.
	assembled chan struct{}
	ingest    *ingest.Ingest
	pipeline  *pipeline.Pipeline
	// registered is closed when the workers that were registered in an earlier run are registered again.
	registered chan struct{}
	// recovered reports whether the index had workers when the state was recovered; set before engines are read.
	recovered bool
	ending    *process.Ending
}

// Open creates the parts and opens their ports. On an error, no port stays open. Open sets the loggers, metrics and
// budgets in the configuration. With a durable journal, Run creates pipeline and ingest after the recovery.
func Open(ctx context.Context, c *config.Config, log *slog.Logger) (_ *Service, err error) {
	loaded, err := loadCredentials(c, log)
	if err != nil {
		return nil, cli.UsageError{Err: err}
	}
	process.LimitMemory(log)
	warnIfReadable(c, log)
	warnIfOpen(c, log)
	s := &Service{
		credentials: loaded,
		cfg:         c, log: log, registry: prometheus.NewRegistry(), serving: make(chan struct{}), assembled: make(chan struct{}),
		registered: make(chan struct{}), ending: process.NewEnding(log),
	}
	c.Server.Incidents = new(incident.Log)
	live := collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile("^/gc/heap/live:bytes$")}
	s.registry.MustRegister(collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(live)), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	loaded.register(s.registry)
	if s.watches, err = watches(c, log, s.registry); err != nil {
		return nil, cli.UsageError{Err: err}
	}
	opened, err := openMode(ctx, s)
	if err != nil {
		return nil, err
	}
	s.mode = opened
	defer func() {
		if err != nil {
			err = errors.Join(err, s.closeParts(ctx))
		}
	}()
	state := index.New()
	if c.RetainBlockHashes {
		state.KeepBlockHashes()
	}
	if c.RetainTokenIDs {
		state.RetainTokenIDs(c.TokenIDBytes)
	}
	s.follower = follow.New(s.mode, state, newIndexMetrics(s.registry, s))
	s.follower.Observe(c.Server.Incidents.AddEvent)
	s.history = history.New(s.follower.Index(), func() history.Stream { return s.server.StreamState() })

	if c.Tracing.Endpoint != "" {
		s.tracing, err = tracing.Start(ctx, tracing.Config{Endpoint: c.Tracing.Endpoint, SampleRatio: c.Tracing.SampleRatio, Version: cli.Version(), Log: log})
		if err != nil {
			return nil, err
		}
		c.Server.StatsHandler = s.tracing.Handler()
	}
	c.Server.MaxEvictedBytes = c.Journal.Retention.MaxBytes
	c.Server.Version, c.Server.Logger, c.Server.Registerer = cli.Version(), log, s.registry
	c.Server.Sources, c.Server.Knowledge = s.sourceStatus, s.knowledge
	c.Server.NoRouters, c.Server.Aliases = !c.Cluster.Serve, s.aliases
	c.Server.History, c.Server.Retention = s.history, c.Journal.Retention
	s.mode.configure(&c.Server)
	s.server = server.New(c.Server, s.follower, s.follower.Index())

	if s.grpcPort, err = listen(ctx, "--listen", c.Listen); err != nil {
		return nil, err
	}
	if c.Admin != "" {
		if s.adminPort, err = listen(ctx, "--admin", c.Admin); err != nil {
			return nil, err
		}
	}
	if err := s.openEgress(ctx); err != nil {
		return nil, err
	}
	s.newAdmin()
	c.Pipeline.Blocks, c.Pipeline.AttributeBytes = budget.New("blocks", int64(c.MaxBlocks)), budget.New("attribute_bytes", c.MaxAttributeBytes)
	c.Pipeline.Logger = log
	c.Ingest.Metrics, c.Ingest.Logger, c.Ingest.Observer = s.registry, log, c.Server.Incidents
	c.Ingest.Contents = apply.Contents(s.follower, s.follower.Index(), log)
	if err := c.Pipeline.Validate(); err != nil {
		return nil, cli.UsageError{Err: err}
	}
	return s, s.mode.opened()
}

// assemble creates what reads the engines.
func (s *Service) assemble(p *pipeline.Pipeline) (err error) {
	s.registry.MustRegister(p, budget.Collector{s.cfg.Pipeline.Blocks, s.cfg.Pipeline.AttributeBytes})
	s.pipeline = p
	if s.ingest, err = ingest.New(s.cfg.Ingest, p); err != nil {
		return fmt.Errorf("%w; choose another endpoint with --bind, ZMQ_PORT, or under listeners in the file of --config", err)
	}
	close(s.assembled)
	return nil
}

// isAssembled reports whether ingest and pipeline are set.
func (s *Service) isAssembled() bool {
	select {
	case <-s.assembled:
		return true
	default:
		return false
	}
}

// aliases is pipeline.Pipeline.Aliases.
func (s *Service) aliases(worker string, rank uint32, hashes []uint64) map[uint64][]string {
	if !s.isAssembled() {
		return nil
	}
	return s.pipeline.Aliases(worker, rank, hashes)
}

// closeParts closes the ports and the journal.
func (s *Service) closeParts(ctx context.Context) error {
	errs := []error{closePort(s.grpcPort), closePort(s.adminPort), s.closeEgress(), s.mode.Close(ctx)}
	s.stopTracing(ctx)
	return errors.Join(errs...)
}

// stopTracing sends the spans that are left, within tracingStopTimeout.
func (s *Service) stopTracing(ctx context.Context) {
	if s.tracing != nil {
		ctx, cancel := context.WithTimeout(ctx, tracingStopTimeout)
		defer cancel()
		s.tracing.Stop(ctx)
	}
}

// Addr returns the address of the gRPC port.
func (s *Service) Addr() string { return s.grpcPort.Addr().String() }

// Serving returns a channel that is closed when the server starts to serve routers.
func (s *Service) Serving() <-chan struct{} { return s.serving }

// Run recovers the state from a durable journal, and runs the parts until ctx is done or a part fails. It then stops the
// parts in the order of the event flow, from discovery to the server, so that each part forwards all its events.
func (s *Service) Run(ctx context.Context) error {
	beyond := context.WithoutCancel(ctx)
	grpcDone := background(func() error { return s.server.Serve(s.grpcPort) })
	var portsDone <-chan error // nil without such ports: receiving blocks
	if s.adminPort != nil || s.egress.dynamo != nil || s.egress.zmq != nil || s.egress.smg != nil {
		portsDone = background(s.servePorts)
	}
	sampling, stopSampling := context.WithCancel(beyond)
	defer stopSampling()
	sampleDone := background(func() error { s.history.Run(sampling); return nil })
	returnDone := background(func() error {
		process.ReturnMemory(sampling, func() uint64 { _, blocks := s.follower.Index().Len(); return blocks })
		return nil
	})
	reloading, stopReloading := context.WithCancel(beyond)
	defer stopReloading()
	reloadDone := background(func() error { s.credentials.run(reloading, s.server); return nil })
	s.log.Info("starting", "grpc", s.Addr(), "version", cli.Version())
	s.ending.WaitsFor("the journal, to recover the state")
	registered, err := s.mode.recover(ctx)
	workers, _ := s.follower.Index().Len()
	s.recovered = workers > 0
	switch {
	case err == nil:
		err = s.mode.run(ctx, registered, grpcDone, portsDone)
	case ctx.Err() != nil:
		err = nil
	}
	serving, cancel := context.WithTimeout(beyond, subscriberStopTimeout)
	defer cancel()
	s.ending.WaitsFor("subscribers, to read their last entries")
	s.stopSMG()
	s.server.Shutdown(serving)
	stopSampling()
	s.closePorts()
	errs := []error{err, <-sampleDone, <-returnDone}
	s.ending.WaitsFor("the journal, to close it")
	closing, cancel := context.WithTimeout(beyond, journalStopTimeout) // of its own: slow subscribers may have used up theirs
	defer cancel()
	errs = append(errs, s.mode.Close(closing), <-grpcDone)
	if portsDone != nil {
		errs = append(errs, <-portsDone)
	}
	if s.console != nil {
		s.console.Close() // its requests have ended with the port
	}
	s.ending.WaitsFor("files of tokens and certificates, and the collector of traces")
	stopReloading()
	errs = append(errs, within(discoveryStopTimeout, reloadDone, errors.New("stop reading tokens and certificates: a file takes too long")))
	s.stopTracing(beyond)
	s.log.Info("stopped")
	return errors.Join(errs...)
}

// readEngines reads engines and serves routers until ctx is done or a part fails. It then stops reading engines.
func (s *Service) readEngines(ctx context.Context, registered []ingestconfig.Worker, grpcDone, portsDone <-chan error) error {
	beyond := context.WithoutCancel(ctx)
	starting, stopStarting := context.WithCancel(ctx)
	defer stopStarting()
	discovering, stopDiscovery := context.WithCancel(beyond)
	defer stopDiscovery()
	ingesting, stopIngest := context.WithCancel(beyond)
	defer stopIngest()
	following, stopFollowing := context.WithCancel(beyond)
	defer stopFollowing()

	discovered := make(chan struct{})
	followDone := background(func() error { return s.follower.Run(following) })
	ingestDone := background(func() error { return s.ingest.Run(ingesting) })
	discoveryDone := background(func() error { return discover(discovering, s.watches, s.mode.discoverer(), discovered) })
	startDone := background(func() error { s.start(starting, discovered); return nil })
	besideDone := background(func() error { return s.mode.beside(starting, registered, discovered) })

	var failure error
	select {
	case <-ctx.Done():
	case failure = <-ingestDone:
	case failure = <-grpcDone:
	case failure = <-portsDone:
	case failure = <-besideDone:
	case failure = <-followDone:
		failure = fmt.Errorf("follow the journal: %w; kvcast exits, because snapshots and matches would be outdated: restart kvcast", failure)
	case failure = <-s.pipeline.Failed():
		failure = fmt.Errorf("%w; kvcast exits, because routers would miss entries: remove the cause and restart kvcast", failure)
	}
	s.server.StopServing() // first, so that clients go elsewhere
	stopStarting()
	s.ending.WaitsFor("the engines, to start")
	errs := []error{failure, <-startDone}
	s.ending.WaitsFor("the journal, to hand over or store what it has")
	if err := <-besideDone; failure == nil { // otherwise it may be the same error
		errs = append(errs, err)
	}
	s.log.Info("shutting down")
	stopDiscovery()
	s.ending.WaitsFor("discovery")
	errs = append(errs, within(discoveryStopTimeout, discoveryDone, errors.New("stop discovery: reading a file of workers or resolving a name takes too long")))
	stopIngest()
	s.ending.WaitsFor("ingest")
	errs = append(errs, within(ingestStopTimeout, ingestDone, s.ingestLate()))
	s.ending.WaitsFor("the journal, to append the last entries")
	deadline, cancel := context.WithTimeout(beyond, pipelineStopTimeout)
	defer cancel()
	if err := s.pipeline.Close(deadline); failure == nil { // otherwise Close may return the same error
		errs = append(errs, err)
	}
	stopFollowing()
	s.ending.WaitsFor("the index")
	errs = append(errs, <-followDone)
	return errors.Join(errs...)
}

// ingestLate returns why ingest may not have stopped in time.
func (s *Service) ingestLate() error {
	if s.mode.isStalled(time.Now()) {
		return errors.New("stop ingest: the journal does not acknowledge what ingest appends")
	}
	return errors.New("stop ingest: resolving an engine's name takes too long, or ZeroMQ hangs")
}

// start starts serving routers once the engines have been read, unless ctx is done first.
func (s *Service) start(ctx context.Context, discovered <-chan struct{}) {
	if s.cfg.StartWait > 0 && s.mode.settle(ctx, s.cfg.StartWait) != nil {
		return
	}
	wait := s.cfg.DiscoveryWait
	if s.recovered { // routers have workers of an earlier run, which stay
		wait = min(wait, s.cfg.StartWait)
	}
	missing, ok := startup{sources: s.ingest.Sources, discovered: discovered, discoveryWait: wait, wait: s.cfg.StartWait}.run(ctx)
	if !ok {
		return
	}
	if missing.undiscovered {
		s.log.Warn("serving without the workers that discovery would find: it has not worked yet", "waited", wait)
	}
	if missing.connecting+missing.catchingUp > 0 {
		s.log.Warn("serving before all engines have been read", "not_connected", missing.connecting, "catching_up", missing.catchingUp)
	}
	s.serveFrom(ctx)
}

// serveFrom starts serving routers once the index has the entries that the journal has now, unless ctx is done first.
func (s *Service) serveFrom(ctx context.Context) {
	if s.follower.Wait(ctx, s.mode.Bounds().Newest) != nil {
		return
	}
	s.server.StartServing()
	close(s.serving)
	s.log.Info("serving", "grpc", s.Addr(), "version", cli.Version())
	if s.adminPort != nil {
		s.log.Info("serving", "admin", s.adminPort.Addr().String())
	}
	s.logEgress()
}

// background runs a function in a goroutine. The returned channel receives its error, if any, and is then closed.
func background(run func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		defer close(done)
		if err := run(); err != nil {
			done <- err
		}
	}()
	return done
}

// within waits for a part to stop, at most for d. It returns the error of the part, or late after d.
func within(d time.Duration, done <-chan error, late error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(d):
		return late
	}
}

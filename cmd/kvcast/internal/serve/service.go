package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/index"
	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/discovery"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

// Time limits for stopping the parts. The documented limit for the shutdown is 10 s.
const (
	discoveryStopTimeout  = 500 * time.Millisecond
	ingestStopTimeout     = 2 * time.Second
	subscriberStopTimeout = 7 * time.Second
)

// Service is a server and all its parts.
type Service struct {
	log       *slog.Logger
	serving   chan struct{} // closed when the server starts to serve routers
	startWait time.Duration
	ingest    *ingest.Ingest
	watches   []discovery.Watch
	journal   journal.Journal
	pipeline  *pipeline.Pipeline
	follower  *index.Follower
	server    *server.Server
	admin     *http.Server
	grpcPort  net.Listener
	adminPort net.Listener // nil: none
}

// Open creates the parts and opens their ports. On an error, no port stays open. Open sets the loggers, metrics and
// budgets in the configuration.
func Open(ctx context.Context, c *config.Config, log *slog.Logger) (_ *Service, err error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s := &Service{log: log, serving: make(chan struct{}), startWait: c.StartWait, watches: watches(c, log)}
	entries := journal.NewMemory(c.Journal)
	s.journal = entries

	blocks, attributes := budget.New("blocks", int64(c.MaxBlocks)), budget.New("attribute_bytes", c.MaxAttributeBytes)
	c.Pipeline.Blocks, c.Pipeline.AttributeBytes = blocks, attributes
	if s.pipeline, err = pipeline.New(c.Pipeline, entries); err != nil {
		return nil, cli.UsageError{Err: err}
	}
	registry.MustRegister(s.pipeline, budget.Collector{blocks, attributes})
	s.follower = index.NewFollower(entries, index.New(), indexMetrics(registry, s))

	if c.Server.Tokens != nil && c.Server.TLS == nil {
		log.Warn("tokens without TLS can be read from the network: set --tls-cert and --tls-key, unless a proxy terminates TLS")
	}
	c.Server.MaxEvictedBytes = c.Journal.MaxBytes
	c.Server.Version, c.Server.Logger, c.Server.Registerer = cli.Version(), log, registry
	c.Server.Sources, c.Server.Workers = s.sourceStatus, workers{s}
	c.Server.Aliases = s.pipeline.Aliases
	s.server = server.New(c.Server, s.follower, s.follower.Index())
	s.admin = &http.Server{Handler: s.server.NewAdmin(registry), ReadHeaderTimeout: 5 * time.Second}

	defer func() {
		if err != nil {
			err = errors.Join(err, closePort(s.grpcPort), closePort(s.adminPort))
		}
	}()
	if s.grpcPort, err = listen(ctx, "--listen", c.Listen); err != nil {
		return nil, err
	}
	if c.Admin != "" {
		if s.adminPort, err = listen(ctx, "--admin", c.Admin); err != nil {
			return nil, err
		}
	}
	c.Ingest.Metrics, c.Ingest.Logger = registry, log
	if s.ingest, err = ingest.New(c.Ingest, s.pipeline); err != nil {
		return nil, fmt.Errorf("%w; choose another endpoint with --bind, ZMQ_PORT, or under listeners in the file of --config", err)
	}
	return s, nil
}

// indexMetrics registers the metrics of the follower, and returns the function that it calls.
func indexMetrics(registry *prometheus.Registry, s *Service) func(time.Duration) {
	delay := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvcast_index_delay_seconds",
		Help:    "Time from the receipt of a batch until subscribers can read its entry, of the oldest entry of those that are applied to the index together. Includes batch.timeout.",
		Buckets: prometheus.ExponentialBuckets(50e-6, 2, 16),
	})
	registry.MustRegister(delay, prometheus.NewGaugeFunc(
		prometheus.GaugeOpts{Name: "kvcast_index_behind_entries", Help: "Entries of the journal that are not applied to the index yet."},
		func() float64 {
			applied := s.follower.Bounds().Newest
			return float64(s.journal.Bounds().Newest - applied)
		}))
	return func(d time.Duration) { delay.Observe(d.Seconds()) }
}

func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // omits the address, which the message below contains
		}
		return nil, fmt.Errorf("listen at %s: %w; choose another address with %s", addr, err, flag)
	}
	return l, nil
}

func closePort(l net.Listener) error {
	if l == nil {
		return nil
	}
	return l.Close()
}

// Addr returns the address of the gRPC port.
func (s *Service) Addr() string { return s.grpcPort.Addr().String() }

// Serving returns a channel that is closed when the server starts to serve routers.
func (s *Service) Serving() <-chan struct{} { return s.serving }

// Run runs the parts until ctx is done or a part fails. It then stops the parts in the order of the event flow, from
// discovery to the server, so that each part forwards all its events.
func (s *Service) Run(ctx context.Context) error {
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
	discoveryDone := background(func() error { return discover(discovering, s.watches, s.ingest, discovered) })
	grpcDone := background(func() error { return s.server.Serve(s.grpcPort) })
	var adminDone <-chan error // nil without an admin port: receiving blocks
	if s.adminPort != nil {
		adminDone = background(s.serveAdmin)
	}
	startDone := background(func() error { s.start(starting, discovered); return nil })

	var failure error
	select {
	case <-ctx.Done():
	case failure = <-ingestDone:
	case failure = <-grpcDone:
	case failure = <-adminDone:
	case failure = <-followDone:
		failure = fmt.Errorf("follow the journal: %w; kvcast exits, because snapshots and matches would be outdated: restart kvcast", failure)
	case failure = <-s.pipeline.Failed():
		failure = fmt.Errorf("%w; kvcast exits, because routers would miss entries: remove the cause and restart kvcast", failure)
	}
	stopStarting()
	errs := []error{failure, <-startDone}
	s.log.Info("shutting down")
	s.server.StopServing()
	stopDiscovery()
	errs = append(errs, within(discoveryStopTimeout, discoveryDone, errors.New("stop discovery: reading a file of workers or resolving a name takes too long")))
	stopIngest()
	errs = append(errs, within(ingestStopTimeout, ingestDone, errors.New("stop ingest: resolving an engine's name takes too long, or ZeroMQ hangs")))
	deadline, cancel := context.WithTimeout(beyond, subscriberStopTimeout)
	defer cancel()
	if err := s.pipeline.Close(deadline); failure == nil { // otherwise Close may return the same error
		errs = append(errs, err)
	}
	stopFollowing()
	errs = append(errs, <-followDone)
	s.server.Shutdown(deadline)
	errs = append(errs, s.journal.Close(deadline), s.admin.Close(), <-grpcDone)
	if adminDone != nil {
		errs = append(errs, <-adminDone)
	}
	s.log.Info("stopped")
	return errors.Join(errs...)
}

// start starts serving routers once the engines have been read, unless ctx is done first.
func (s *Service) start(ctx context.Context, discovered <-chan struct{}) {
	s.log.Info("starting", "grpc", s.Addr(), "version", cli.Version())
	missing, ok := startup{sources: s.ingest.Sources, discovered: discovered, wait: s.startWait}.run(ctx)
	if !ok {
		return
	}
	if missing != (unread{}) {
		s.log.Warn("serving before all engines have been read", "not_connected", missing.connecting, "catching_up", missing.catchingUp)
	}
	if s.follower.Wait(ctx, s.journal.Bounds().Newest) != nil {
		return
	}
	s.server.StartServing()
	close(s.serving)
	s.log.Info("serving", "grpc", s.Addr(), "version", cli.Version())
	if s.adminPort != nil {
		s.log.Info("serving", "admin", s.adminPort.Addr().String())
	}
}

func (s *Service) serveAdmin() error {
	if err := s.admin.Serve(s.adminPort); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin port: %w", err)
	}
	return nil
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

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/discovery"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

type serveCmd struct {
	Config   string       `env:"KVCAST_CONFIG" placeholder:"FILE" predictor:"file" help:"Read the configuration from this YAML file; variables and flags go over it."`
	Check    bool         `help:"Print the configuration that is in force, as such a file, or what is wrong with it, and end."`
	Worker   []string     `sep:"none" placeholder:"KEY=VALUE,..." help:"An engine to connect to: name=W,connect=tcp://HOST:PORT, and where wanted model=M, engine=vllm, block_size=16, replay=tcp://HOST:PORT, dp_size=1, topic=PREFIX, endpoint=HOST:PORT (where routers send requests; passed through). Repeatable; adds to the file's workers."`
	Bind     []string     `sep:"none" placeholder:"ENDPOINT" help:"A port for engines to connect to, such as tcp://*:5557; where wanted followed by ,engine=llm-d-sim, ,replay_port=PORT (0 for none), ,topic=PATTERN, ,replay_host=HOST (that topics may name for replays beside their own, such as 10.0.0.0/8) or ,worker=NAME. Repeatable; adds to the file's listeners."`
	Settings settingFlags `embed:""`
}

// Help tells what holds for all flags.
func (*serveCmd) Help() string {
	return examples(
		"kvcast serve",
		"kvcast serve --bind 'tcp://*:5557,engine=llm-d-sim'",
		"kvcast serve --worker name=vllm-0,connect=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558",
		"kvcast serve --config kvcast.yaml",
		"kvcast serve --config kvcast.yaml --check") + `
Where nothing to read from is given, engines may connect to port 5557, as with --bind tcp://*:5557. A file may name none on purpose, where all workers are to be registered.

A flag goes over its variable, and that over the file: --journal-max-bytes, KVCAST_JOURNAL_MAX_BYTES and, in the file, max_bytes under journal are one setting, and so it is with every flag of a single value. KVCAST_WORKER and KVCAST_BIND take a worker or an endpoint a line, and ZMQ_PORT=5557 is --bind tcp://*:5557. Start a file with: kvcast serve --check`
}

// How long the parts have to end, together less than the 10 s that operators are
// promised.
const (
	lookingEnds    = 500 * time.Millisecond
	readingEnds    = 2 * time.Second
	subscribersEnd = 7 * time.Second
)

// Run serves until ctx is done.
func (c *serveCmd) Run(ctx context.Context, line *kong.Context, std stdio) error {
	cfg, from, err := readConfig(configSources{
		file: c.Config, environ: os.Environ(), flags: given(line), workers: c.Worker, binds: c.Bind,
	})
	if err != nil {
		return usageError{err}
	}
	creds, err := cfg.credentials()
	if err != nil {
		return usageError{err}
	}
	if c.Check {
		if err := cfg.checkWatchedFiles(); err != nil {
			return usageError{err}
		}
		return cfg.write(std.out, from)
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.LogLevel)); err != nil {
		return usageError{err}
	}
	log := slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: level}))
	switch {
	case cfg.readsNothing():
		log.Warn("the configuration names nothing to read from: waiting for RegisterWorker", "config", c.Config)
	case from["listeners[0]"] == fromDefault:
		log.Warn("nothing to read from is configured: engines may connect to the default port",
			"bind", defaultBind, "configure", "--worker, --bind, ZMQ_PORT, or a file with --config")
	}
	s, err := cfg.open(ctx, creds, log)
	if err != nil {
		return err
	}
	return s.run(ctx)
}

// service is all the parts of a server, opened and not yet running.
type service struct {
	log      *slog.Logger
	ingest   *ingest.Ingest
	watches  []discovery.Watch
	wait     time.Duration // at the start, for engines that can not be reached
	journal  journal.Journal
	pipeline *pipeline.Pipeline
	server   *server.Server
	grpc     net.Listener
	admin    *http.Server
	adminOn  net.Listener // nil without an admin port
}

// open takes all that the service needs, or nothing.
func (c config) open(ctx context.Context, creds credentials, log *slog.Logger) (_ *service, err error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	in := c.ingestConfig()
	in.Metrics, in.Logger = registry, log

	if creds.tokens != nil && creds.tls == nil {
		log.Warn("tokens are asked for without TLS, so that whoever sees the traffic can use them: set --tls-cert and --tls-key, unless something in front of kvcast does TLS")
	}
	s := &service{log: log, watches: c.watches(log), wait: c.Ingest.StartWait}
	entries := journal.NewMemory(journal.Config{MaxBytes: int(c.Journal.MaxBytes), MaxAge: c.Journal.MaxAge})
	s.journal = entries
	blocks, attributes := budget.New("blocks", int64(c.Ingest.MaxBlocks)), budget.New("attribute_bytes", int64(c.Ingest.MaxAttributeBytes))
	s.pipeline, err = pipeline.New(pipeline.Config{
		Timeout: c.Batch.Timeout, MaxBlocks: c.Batch.MaxBlocks, EmitTokenIDs: c.EmitTokenIDs,
		OnGap: c.Ingest.OnGap, MaxBlocksPerRank: c.Ingest.MaxBlocksPerRank, Blocks: blocks, AttributeBytes: attributes,
	}, entries)
	if err != nil {
		return nil, usageError{err}
	}
	registry.MustRegister(s.pipeline, budget.Collector{blocks, attributes})
	hosts, err := ingestconfig.ParseHosts(hostsOf(c.Ingest.RegisterHosts))
	if err != nil {
		return nil, usageError{err}
	}
	s.server, err = server.New(server.Config{
		ProgressInterval: c.Subscribers.Progress, MaxSubscribers: c.Subscribers.Max, MaxConnections: c.Subscribers.MaxConnections, MaxConnectionsPerAddress: c.Subscribers.MaxConnectionsPerAddress,
		MaxSnapshots: c.Subscribers.MaxSnapshots, MaxSnapshotWait: c.Subscribers.SnapshotWait, StallTimeout: c.Subscribers.Stall,
		MaxEvictedBytes: int(c.Journal.MaxBytes), ResponseBytes: int(c.Subscribers.ResponseBytes), MaxFilterBytes: int64(c.Subscribers.FilterBytes), PingInterval: c.Subscribers.PingInterval,
		MaxConnectionAge: c.Subscribers.MaxConnectionAge, MaxConnectionAgeGrace: c.Subscribers.MaxConnectionAgeGrace,
		TLS: creds.tls, Tokens: creds.tokens,
		Version: currentVersion(), Sources: s.sourceStatus, Workers: registered{s}, RegisterHosts: hosts, Logger: log, Registerer: registry,
	}, entries, s.pipeline)
	if err != nil {
		return nil, err
	}
	if s.grpc, err = listen(ctx, "--listen", c.Listen); err != nil {
		return nil, err
	}
	s.admin = &http.Server{Handler: s.server.NewAdmin(registry), ReadHeaderTimeout: 5 * time.Second}
	if c.Admin != "" {
		if s.adminOn, err = listen(ctx, "--admin", c.Admin); err != nil {
			return nil, errors.Join(err, s.grpc.Close())
		}
	}
	if s.ingest, err = ingest.New(in, s.pipeline); err != nil {
		if s.adminOn != nil {
			err = errors.Join(err, s.adminOn.Close())
		}
		return nil, errors.Join(fmt.Errorf("%w; choose another endpoint with --bind, ZMQ_PORT, or under listeners in the file of --config", err), s.grpc.Close())
	}
	return s, nil
}

func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // without the address, which is said already
		}
		return nil, fmt.Errorf("listen at %s: %w; choose another address with %s", addr, err, flag)
	}
	return l, nil
}

// run runs the parts until ctx is done or one of them fails, and then ends them
// in the order in which events flow, so that each hands on the last it has.
func (s *service) run(ctx context.Context) error {
	beyond := context.WithoutCancel(ctx)
	starting, stopStarting := context.WithCancel(ctx)
	defer stopStarting()
	looking, stopLooking := context.WithCancel(beyond)
	defer stopLooking()
	reading, stopReading := context.WithCancel(beyond)
	defer stopReading()

	ingested := background(func() error { return s.ingest.Run(reading) })
	looked := make(chan struct{})
	discovered := background(func() error { return discover(looking, s.watches, s.ingest, looked) })
	served := background(func() error { return s.server.Serve(s.grpc) })
	var administered <-chan error // nil, which is never ready, without an admin port
	if s.adminOn != nil {
		administered = background(s.serveAdmin)
	}
	started := background(func() error { s.letIn(starting, looked); return nil })

	var failed error
	select {
	case <-ctx.Done():
	case failed = <-ingested:
	case failed = <-served:
	case failed = <-administered:
	case failed = <-s.pipeline.Failed():
		failed = fmt.Errorf("%w; routers would miss entries, so kvcast ends: remove the cause and start it again", failed)
	}
	stopStarting()
	errs := []error{failed, <-started}
	s.log.Info("shutting down")
	s.server.StopServing()
	stopLooking()
	errs = append(errs, within(lookingEnds, discovered, errors.New("stop discovery: a file of workers or a name server takes too long")))
	stopReading()
	errs = append(errs, within(readingEnds, ingested, errors.New("stop reading: an engine's name takes too long to resolve, or ZeroMQ hangs")))
	deadline, cancel := context.WithTimeout(beyond, subscribersEnd)
	defer cancel()
	if err := s.pipeline.Close(deadline); failed == nil { // otherwise it is the same error
		errs = append(errs, err)
	}
	s.server.Shutdown(deadline)
	errs = append(errs, s.journal.Close(deadline))
	errs = append(errs, s.admin.Close())
	errs = append(errs, <-served)
	if administered != nil {
		errs = append(errs, <-administered)
	}
	s.log.Info("stopped")
	return errors.Join(errs...)
}

// letIn lets routers in when the engines have been read, unless ctx is done before.
func (s *service) letIn(ctx context.Context, looked <-chan struct{}) {
	s.log.Info("starting", "grpc", s.grpc.Addr().String(), "version", currentVersion())
	missing, ok := startup{sources: s.ingest.Sources, looked: looked, wait: s.wait}.run(ctx)
	if !ok {
		return
	}
	if missing != (unread{}) {
		s.log.Warn("serving before all engines have been read", "not_connected", missing.connecting, "catching_up", missing.catchingUp)
	}
	s.server.StartServing()
	s.log.Info("serving", "grpc", s.grpc.Addr().String(), "version", currentVersion())
	if s.adminOn != nil {
		s.log.Info("serving", "admin", s.adminOn.Addr().String())
	}
}

// background runs a part, and returns where its error will be, once; then, and
// where it had none, nil.
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

// within waits for a part's end, and returns late if it takes too long.
func within(d time.Duration, done <-chan error, late error) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return late
	}
}

func (s *service) serveAdmin() error {
	if err := s.admin.Serve(s.adminOn); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin port: %w", err)
	}
	return nil
}

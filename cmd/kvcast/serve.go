package main

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

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

type serveCmd struct {
	Listen         string        `default:":50051" placeholder:"ADDR" help:"Where routers connect: gRPC (${default})."`
	Admin          string        `default:"127.0.0.1:9464" placeholder:"ADDR" help:"Where the operator looks: /metrics, /healthz, /readyz, pprof (${default}). Empty: nowhere."`
	Worker         []string      `sep:"none" placeholder:"KEY=VALUE,..." help:"An engine to connect to: name=W,connect=tcp://HOST:PORT, and where wanted model=M, engine=vllm, block_size=16, replay=tcp://HOST:PORT, dp_size=1, topic=PREFIX, endpoint=HOST:PORT. Repeatable."`
	Bind           []string      `sep:"none" placeholder:"ENDPOINT" help:"A port for engines to connect to, such as tcp://*:5557; where wanted followed by ,engine=llm-d-sim, ,topic=PATTERN or ,worker=NAME. Repeatable."`
	BatchTimeout   time.Duration `default:"0s" help:"How long events may wait to be merged with the next batch's, 0s to 15s."`
	BatchMaxBlocks int           `default:"128" help:"The most blocks in an event, 1 to 16384."`
	JournalBytes   byteSize      `name:"journal-max-bytes" default:"64MiB" help:"Memory for entries to resume from."`
	JournalAge     time.Duration `name:"journal-max-age" default:"1h" help:"How long entries are kept at most."`
	Progress       time.Duration `default:"10s" help:"How often an idle subscriber hears that the stream is alive."`
	MaxSubscribers int           `default:"1024" help:"The most subscribers."`
	MaxWorkers     int           `default:"4096" help:"The most workers."`
	EmitTokenIDs   bool          `name:"emit-token-ids" help:"Put the tokens into stored events. They are users' prompts."`
	LogLevel       string        `enum:"debug,info,warn,error" default:"info" help:"debug, info, warn or error."`
}

// How long the parts have to end, together less than the 10 s that operators are
// promised.
const (
	readingEnds    = 2 * time.Second
	subscribersEnd = 7 * time.Second
)

// errNothingToRead says how to give serve something to read.
var errNothingToRead = usageError{errors.New(`nothing to read from: name an engine with --worker, or a port for engines to connect to with --bind, for example
  kvcast serve --worker name=vllm-0,model=Qwen/Qwen3-0.6B,connect=tcp://10.0.0.5:5557
  kvcast serve --bind tcp://*:5557`)}

// Run serves until ctx is done.
func (c *serveCmd) Run(ctx context.Context, std stdio) error {
	if len(c.Worker)+len(c.Bind) == 0 {
		return errNothingToRead
	}
	if err := c.validate(); err != nil {
		return usageError{err}
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return usageError{err}
	}
	s, err := c.open(ctx, slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: level})))
	if err != nil {
		return err
	}
	return s.run(ctx)
}

// validate checks the numbers that the parts would take for "the default".
func (c *serveCmd) validate() error {
	for _, f := range []struct {
		flag    string
		ok      bool
		value   any
		allowed string
	}{
		{"--batch-timeout", c.BatchTimeout >= 0 && c.BatchTimeout <= pipeline.MaxBatchTimeout, c.BatchTimeout, "0s to 15s"},
		{"--batch-max-blocks", c.BatchMaxBlocks >= 1 && c.BatchMaxBlocks <= pipeline.MaxMaxBlocks, c.BatchMaxBlocks, "1 to 16384"},
		{"--journal-max-age", c.JournalAge >= time.Second, c.JournalAge, "1s or more"},
		{"--progress", c.Progress >= 100*time.Millisecond && c.Progress <= time.Hour, c.Progress, "100ms to 1h"},
		{"--max-subscribers", c.MaxSubscribers >= 1, c.MaxSubscribers, "1 or more"},
		{"--max-workers", c.MaxWorkers >= 1, c.MaxWorkers, "1 or more"},
	} {
		if !f.ok {
			return fmt.Errorf("%s: %v is not allowed: want %s", f.flag, f.value, f.allowed)
		}
	}
	return nil
}

// service is all the parts of a server, opened and not yet running.
type service struct {
	log      *slog.Logger
	ingest   *ingest.Ingest
	pipeline *pipeline.Pipeline
	server   *server.Server
	grpc     net.Listener
	admin    *http.Server
	adminOn  net.Listener // nil without an admin port
}

// open takes all that the service needs, or nothing.
func (c *serveCmd) open(ctx context.Context, log *slog.Logger) (_ *service, err error) {
	in, err := c.ingestConfig()
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	in.Metrics, in.Logger = registry, log

	s := &service{log: log}
	entries := journal.NewMemory(journal.Config{MaxBytes: int(c.JournalBytes), MaxAge: c.JournalAge})
	s.pipeline, err = pipeline.New(pipeline.BatchConfig{
		Timeout: c.BatchTimeout, MaxBlocks: c.BatchMaxBlocks, EmitTokenIDs: c.EmitTokenIDs,
	}, entries)
	if err != nil {
		return nil, usageError{err}
	}
	registry.MustRegister(s.pipeline)
	s.server, err = server.New(server.Config{
		Progress: c.Progress, MaxSubscribers: c.MaxSubscribers, Logger: log, Registerer: registry,
	}, entries)
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
		return nil, errors.Join(fmt.Errorf("%w; choose another endpoint with --bind", err), s.grpc.Close())
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
	reading, stopReading := context.WithCancel(context.WithoutCancel(ctx))
	defer stopReading()
	ingested := background(func() error { return s.ingest.Run(reading) })
	served := background(func() error { return s.server.Serve(s.grpc) })
	var administered <-chan error // nil, which is never ready, without an admin port
	if s.adminOn != nil {
		administered = background(s.serveAdmin)
	}
	s.log.Info("serving", "grpc", s.grpc.Addr().String(), "version", currentVersion())
	if s.adminOn != nil {
		s.log.Info("serving", "admin", s.adminOn.Addr().String())
	}

	var failed error
	select {
	case <-ctx.Done():
	case failed = <-ingested:
	case failed = <-served:
	case failed = <-administered:
	}
	s.log.Info("shutting down")
	s.server.StopServing()
	stopReading()
	errs := []error{failed, within(readingEnds, ingested, errors.New("stop reading: an engine's name takes too long to resolve, or ZeroMQ hangs"))}
	s.pipeline.Close() // what is read after this goes nowhere
	deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), subscribersEnd)
	defer cancel()
	s.server.Shutdown(deadline)
	errs = append(errs, s.admin.Close())
	errs = append(errs, <-served)
	if administered != nil {
		errs = append(errs, <-administered)
	}
	s.log.Info("stopped")
	return errors.Join(errs...)
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

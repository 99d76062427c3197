// Package serve is the command kvcast serve: it creates ingest, pipeline, journal and server from a configuration, runs
// them, and stops them.
package serve

import (
	"context"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"

	"github.com/alecthomas/kong"
	"google.golang.org/grpc/grpclog"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/process"
	"github.com/kvcast/kvcast/internal/loglimit"
)

// Command is kvcast serve.
type Command struct {
	Config   string       `placeholder:"FILE" predictor:"file" help:"YAML configuration file ($KVCAST_CONFIG). Variables and flags override it."`
	Check    bool         `help:"Print the resulting configuration as a configuration file, or its mistakes, and exit."`
	Worker   []string     `sep:"none" placeholder:"KEY=VALUE,..." help:"Engine to connect to: name=W,connect=tcp://HOST:PORT (or connect=smg://HOST:PORT or openengine://HOST:PORT for gRPC, lmcache://HOST:PORT, lmcache-coordinator://HOST:PORT, mooncake://HOST:PORT or workers://disk for a pool, or http=http://HOST:PORT, where vLLM or SGLang is asked for its ports), and optionally model=M, engine=vllm, block_size=16, replay=tcp://HOST:PORT, dp_size=1, first_rank=0, topic=PREFIX, endpoint=HOST:PORT (the address for requests, passed to routers). Repeatable; added to the file's workers."`
	Bind     []string     `sep:"none" placeholder:"ENDPOINT" help:"Endpoint for engines to connect to, such as tcp://*:5557, optionally followed by ,engine=llm-d-sim, ,replay_port=PORT (0 for none), ,topic=PATTERN, ,replay_host=HOST (host or CIDR at which replays may be requested, such as 10.0.0.0/8) or ,worker=NAME. Repeatable; added to the file's listeners."`
	Settings kong.Plugins `embed:""`
}

// New returns the command with a flag for each setting.
func New() Command { return Command{Settings: kong.Plugins{config.Flags()}} }

// Help implements kong.HelpProvider.
func (*Command) Help() string {
	return cli.Examples(
		"kvcast serve",
		"kvcast serve --bind 'tcp://*:5557,engine=llm-d-sim'",
		"kvcast serve --worker name=vllm-0,connect=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558",
		"kvcast serve --config kvcast.yaml",
		"kvcast serve --config kvcast.yaml --check") + `
Without a configuration file, workers and listeners, the default is --bind tcp://*:5557. With a configuration file that has no workers and no listeners, the server waits for RegisterWorker calls.

Flags override environment variables, and variables override the file. The flag --journal-max-bytes, the variable KVCAST_JOURNAL_MAX_BYTES and the key max_bytes under journal are the same setting; other settings are named in the same way. KVCAST_WORKER has a value of --worker per line, and KVCAST_BIND a value of --bind per line. ZMQ_PORT=5557 means --bind tcp://*:5557. To create a file: kvcast serve --check > kvcast.yaml`
}

// Run serves until ctx is done.
func (c *Command) Run(ctx context.Context, line *kong.Context, p cli.Process) error {
	flags, file := config.Given(line), c.Config
	if _, ok := flags["config"]; !ok {
		file = p.Getenv("KVCAST_CONFIG")
	}
	cfg, from, err := config.Read(config.Sources{File: file, Environ: p.Environ, Flags: flags, Workers: c.Worker, Binds: c.Bind})
	if err == nil {
		_, err = cfg.LoadCredentials()
	}
	var warnings []string
	if err == nil && c.Check {
		warnings, err = cfg.CheckDiscovery()
	}
	if err != nil {
		return cli.UsageError{Err: err}
	}
	if c.Check {
		for _, w := range warnings { // comments, so that the output is a file
			_, _ = fmt.Fprintf(p.Out, "# warning: %s\n", w)
		}
		return cfg.Write(p.Out, from)
	}
	log := newLogger(p.Err, cfg)
	limitLibraries(log, p.Getenv)
	switch {
	case !cfg.Cluster.Ingest:
		log.Info("serving what another server writes to the journal: no engines are read", "journal", cfg.Journal.Store, "stream", cfg.Journal.Stream)
	case cfg.ReadsNothing():
		log.Warn("no workers, listeners or discovery configured: waiting for RegisterWorker", "config", file)
	case from.ListensByDefault():
		log.Warn("no workers, listeners or discovery configured: listening for engines at the default port",
			"bind", config.DefaultBind, "configure", "--worker, --bind, ZMQ_PORT, or a file with --config")
	}
	e := process.NewEnding(log)
	e.WaitsFor("the journal, to open it")
	go e.Bound(ctx) // until the process ends
	s, err := Open(ctx, cfg, log)
	if err != nil {
		return err
	}
	s.ending = e
	return s.Run(ctx)
}

// limitLibraries makes libraries log to a logger with limits: peers can cause lines that they would write to the standard error.
func limitLibraries(log *slog.Logger, getenv func(string) string) {
	stdlog.SetFlags(0)
	stdlog.SetOutput(loglimit.Writer(log, slog.LevelWarn, "message of a library"))
	if getenv("GRPC_GO_LOG_SEVERITY_LEVEL") == "" { // it asks for everything, at the standard error
		grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, loglimit.Writer(log, slog.LevelWarn, "message of gRPC")))
	}
}

// newLogger returns a logger with limits.
func newLogger(to io.Writer, c *config.Config) *slog.Logger {
	options := &slog.HandlerOptions{Level: c.LogLevel}
	var handler slog.Handler = slog.NewTextHandler(to, options)
	if c.LogFormat == config.LogJSON {
		handler = slog.NewJSONHandler(output.EscapedJSON(to), options)
	}
	return slog.New(loglimit.NewHandler(handler))
}

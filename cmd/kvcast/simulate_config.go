package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

// simulatedReplayPoll is how often vLLM's publisher looks for requests for replay
// while it has nothing to publish.
const simulatedReplayPoll = 100 * time.Millisecond

// orElse is the value of a flag, or what it is where it was not given.
func orElse[T any](flag *T, value T) T {
	if flag != nil {
		return *flag
	}
	return value
}

// check returns the first mistake in the flags.
func (c *simulateCmd) check() error {
	switch {
	case c.Bind != "" && c.Connect != "":
		return errors.New("--bind and --connect can't be used together: give one of them")
	case c.Engines < 1 || c.Engines > maxEngines:
		return fmt.Errorf("--engines: %d is not allowed: want 1 to %d", c.Engines, maxEngines)
	case orElse(c.Blocks, 1) < 1 || c.BlockSize < 1:
		return errors.New("--blocks and --block-size: want 1 or more")
	case !(orElse(c.Rate, 0) >= 0):
		return fmt.Errorf("--rate: %v is not allowed: want 0 or more batches a second", *c.Rate)
	case !(orElse(c.Speed, 0) >= 0):
		return fmt.Errorf("--speed: %v is not allowed: want 0 or more", *c.Speed)
	case c.Requests < 0:
		return fmt.Errorf("--requests: %d is not allowed: want 0 or more", c.Requests)
	case c.Progress < 0:
		return fmt.Errorf("--progress: %s is not allowed: want 0 or more", c.Progress)
	}
	for _, e := range []struct{ flag, endpoint string }{{"--bind", c.Bind}, {"--connect", c.Connect}, {"--replay", c.Replay}} {
		if scheme, rest, ok := strings.Cut(e.endpoint, "://"); e.endpoint != "" && (!ok || rest == "" || scheme != "tcp" && scheme != "ipc") {
			return fmt.Errorf("%s: %q is not allowed: want tcp://HOST:PORT or ipc://PATH", e.flag, e.endpoint)
		}
	}
	if c.Trace == "" {
		if c.Speed != nil || c.Requests > 0 || c.Policy == "prefix" {
			return errors.New("--speed, --requests and --policy are about a trace: give --trace too")
		}
		return nil
	}
	if c.Rate != nil {
		return errors.New("--rate and --trace can't be used together: a trace has its own times, which --speed changes")
	}
	if simulator.TraceBlock%c.BlockSize != 0 {
		return fmt.Errorf("--block-size: %d is not allowed with --trace: want a divisor of %d", c.BlockSize, simulator.TraceBlock)
	}
	return nil
}

// configs are those of the engines. The error is the command line's, or the trace's.
func (c *simulateCmd) configs() ([]simulator.Config, error) {
	if err := c.check(); err != nil {
		return nil, usageError{err}
	}
	var faults simulator.Faults
	if c.Faults != "" {
		var err error
		if faults, err = simulator.ParseFaults(c.Faults); err != nil {
			return nil, usageError{fmt.Errorf("--faults: %w", err)}
		}
	}
	traces, err := c.traces()
	if err != nil {
		return nil, err
	}
	configs := make([]simulator.Config, c.Engines)
	for i := range configs {
		cfg := simulator.Config{
			Seed:    c.Seed + uint64(i),
			Faults:  faults,
			Batches: c.Batches,
			Rate:    orElse(c.Rate, 20),
			Pool:    simulator.PoolConfig{Capacity: orElse(c.Blocks, 2048), BlockSize: c.BlockSize},
			Linger:  c.Stay,
		}
		cfg.Faults.Seed = orElse(c.FaultSeed, c.Seed) + uint64(i)
		if traces != nil {
			cfg.Trace, cfg.Speed = traces[i], orElse(c.Speed, 1)
			cfg.Pool.Capacity = orElse(c.Blocks, 65_536)
		}
		if err := c.place(&cfg, i); err != nil {
			return nil, usageError{err}
		}
		configs[i] = cfg
	}
	return configs, nil
}

// traces are the requests of each engine; nil where they are generated.
func (c *simulateCmd) traces() ([]*simulator.Trace, error) {
	if c.Trace == "" {
		return nil, nil
	}
	trace, err := simulator.ConversationTrace()
	if c.Trace != "conversation" {
		trace, err = simulator.OpenTrace(c.Trace)
	}
	if err != nil {
		return nil, err
	}
	if c.Requests > 0 {
		trace.Requests = trace.Requests[:min(c.Requests, len(trace.Requests))]
	}
	policy := simulator.PolicyRoundRobin
	if c.Policy == "prefix" {
		policy = simulator.PolicyPrefix
	}
	return trace.Split(c.Engines, policy)
}

// place says where and in which form engine i publishes.
func (c *simulateCmd) place(cfg *simulator.Config, i int) (err error) {
	cfg.BatchForm, cfg.EventForm = wire.FormArray, wire.FormArray
	if c.Form == "map" {
		cfg.BatchForm, cfg.EventForm = wire.FormMap, wire.FormMap
	}
	switch {
	case c.Connect != "":
		cfg.Endpoint, cfg.Mode = c.Connect, simulator.ModeConnect
		cfg.Topic = "kv@" + c.worker(i) + "@" + c.Model
	case c.Bind != "":
		cfg.Mode = simulator.ModeBind
		cfg.Endpoint, err = portAfter(c.Bind, i)
	default:
		cfg.Mode = simulator.ModeBind
		cfg.Endpoint, err = portAfter("tcp://127.0.0.1:5557", i)
	}
	if err != nil {
		return fmt.Errorf("--bind: %w", err)
	}
	if c.Replay != "" {
		if cfg.Replay, err = c.replay(i); err != nil {
			return fmt.Errorf("--replay: %w", err)
		}
		cfg.ReplayPoll = simulatedReplayPoll
	}
	if c.Ranks {
		cfg.Rank = uint32(i)
	}
	if c.Wait {
		cfg.Subscribers = 1
	}
	return nil
}

// replay is where engine i serves replay.
func (c *simulateCmd) replay(i int) (string, error) {
	host, ok := c.replayHost(i)
	if !ok || c.alone() {
		return portAfter(c.Replay, i)
	}
	return "tcp://" + host + c.Replay[strings.LastIndexByte(c.Replay, ':'):], nil
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

type simulateCmd struct {
	Bind      string  `placeholder:"ENDPOINT" help:"Publish at this endpoint, for kvcast serve --worker to connect to (tcp://127.0.0.1:5557 unless --connect is given). Several engines use one port after the other."`
	Connect   string  `placeholder:"ENDPOINT" help:"Publish to this endpoint, where kvcast serve --bind listens."`
	Replay    string  `placeholder:"ENDPOINT" help:"Serve replay at this endpoint. Several engines use one port after the other."`
	Engines   int     `default:"1" help:"How many engines to be, 1 to 256."`
	Name      string  `default:"sim" help:"Their name, followed by - and a number; with --connect the topic is kv@NAME@MODEL."`
	Model     string  `default:"sim-model" help:"Their model."`
	Blocks    int     `default:"2048" help:"Blocks that each cache holds."`
	BlockSize int     `default:"16" help:"Tokens in a block."`
	Batches   uint64  `default:"0" placeholder:"N" help:"End after this many batches; 0 means never (${default})."`
	Rate      float64 `default:"20" help:"Batches a second of each engine; 0 means as fast as possible."`
	Seed      uint64  `default:"1" help:"Chooses the requests; the same seed gives the same events."`
	Form      string  `enum:"array,map" default:"array" help:"How batches and events are encoded: array or map."`
	Ranks     bool    `help:"Let the engines be the dp ranks of one worker, as --worker ...,dp_size=N reads them: each batch names its rank."`
	Wait      bool    `help:"Publish nothing before somebody subscribes, so that nothing is lost. Real engines do not wait."`
	Output    string  `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"text for people, json for programs: an object a line (${default})."`
}

const maxEngines = 256

// Run publishes until all batches are out or ctx is done, and then tells what
// each engine holds.
func (c *simulateCmd) Run(ctx context.Context, std stdio) error {
	configs, err := c.configs()
	if err != nil {
		return usageError{err}
	}
	engines := make([]*simulator.Engine, 0, len(configs))
	closeAll := func() (err error) {
		for _, e := range engines {
			err = errors.Join(err, e.Close())
		}
		return err
	}
	for i, cfg := range configs {
		e, err := simulator.New(cfg)
		if err != nil {
			return errors.Join(fmt.Errorf("start %s: %w", c.name(i), err), closeAll())
		}
		engines = append(engines, e)
		if err := c.started(std.out, i, e); err != nil {
			return errors.Join(err, closeAll())
		}
	}
	errs := make([]error, len(engines))
	var wg sync.WaitGroup
	for i, e := range engines {
		wg.Go(func() { errs[i] = e.Run(ctx) })
	}
	wg.Wait()
	for i, e := range engines {
		errs = append(errs, c.ended(std.out, i, e.Summary()))
	}
	return errors.Join(errs...)
}

func (c *simulateCmd) name(i int) string { return fmt.Sprintf("%s-%d", c.Name, i) }

// worker is the name of the worker that engine i belongs to.
func (c *simulateCmd) worker(i int) string {
	if c.Ranks {
		return c.Name
	}
	return c.name(i)
}

// configs are those of the engines.
func (c *simulateCmd) configs() ([]simulator.Config, error) {
	if c.Bind != "" && c.Connect != "" {
		return nil, errors.New("--bind and --connect can't be used together: give one of them")
	}
	if c.Engines < 1 || c.Engines > maxEngines {
		return nil, fmt.Errorf("--engines: %d is not allowed: want 1 to %d", c.Engines, maxEngines)
	}
	if c.Blocks < 1 || c.BlockSize < 1 {
		return nil, errors.New("--blocks and --block-size: want 1 or more")
	}
	if c.Rate < 0 {
		return nil, fmt.Errorf("--rate: %v is not allowed: want 0 or more batches a second", c.Rate)
	}
	configs := make([]simulator.Config, c.Engines)
	for i := range configs {
		cfg := simulator.Config{
			Seed:    c.Seed + uint64(i),
			Batches: c.Batches,
			Rate:    c.Rate,
			Pool:    simulator.PoolConfig{Capacity: c.Blocks, BlockSize: c.BlockSize},
		}
		cfg.BatchForm, cfg.EventForm = wire.FormArray, wire.FormArray
		if c.Form == "map" {
			cfg.BatchForm, cfg.EventForm = wire.FormMap, wire.FormMap
		}
		var err error
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
			return nil, fmt.Errorf("--bind: %w", err)
		}
		if c.Replay != "" {
			if cfg.Replay, err = portAfter(c.Replay, i); err != nil {
				return nil, fmt.Errorf("--replay: %w", err)
			}
		}
		if c.Ranks {
			cfg.Rank = uint32(i)
		}
		if c.Wait {
			cfg.Subscribers = 1
		}
		configs[i] = cfg
	}
	return configs, nil
}

// engineStarted and engineEnded are what programs are told of an engine.
type engineStarted struct {
	Engine   string `json:"engine"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay,omitempty"`
}

type engineEnded struct {
	Engine  string `json:"engine"`
	Batches uint64 `json:"batches"`
	Events  uint64 `json:"events"`
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Blocks  int    `json:"blocks"`
	// Digest is the XOR of splitmix64 over the block hashes held, in decimal: not
	// every reader of JSON can hold 64 bits as a number.
	Digest uint64 `json:"digest,string"`
}

func (c *simulateCmd) started(out io.Writer, i int, e *simulator.Engine) error {
	s := engineStarted{Engine: c.name(i), Endpoint: e.Endpoint(), Replay: e.ReplayEndpoint()}
	if c.Output == "json" {
		return json.NewEncoder(out).Encode(s)
	}
	replay := "no replay"
	if s.Replay != "" {
		replay = "replay at " + s.Replay
	}
	_, err := fmt.Fprintf(out, "%s publishes at %s, %s\n", s.Engine, s.Endpoint, replay)
	return err
}

func (c *simulateCmd) ended(out io.Writer, i int, sum simulator.Summary) error {
	s := engineEnded{
		Engine: c.name(i), Batches: sum.Batches, Events: sum.Events,
		Stored: sum.Stored, Removed: sum.Removed, Blocks: sum.Blocks, Digest: sum.Digest,
	}
	if c.Output == "json" {
		return json.NewEncoder(out).Encode(s)
	}
	_, err := fmt.Fprintf(out, "%s published %d batches with %d events: %d blocks stored, %d removed; it holds %d blocks with digest %016x\n",
		s.Engine, s.Batches, s.Events, s.Stored, s.Removed, s.Blocks, s.Digest)
	return err
}

// Package simulate is the command kvcast simulate: it runs simulated engines, and reports their events and caches.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/simulator"
)

// Command is kvcast simulate.
type Command struct {
	Bind    string `placeholder:"ENDPOINT" xor:"endpoint" help:"Bind the publisher to this endpoint, for kvcast serve --worker to connect to. Several engines use consecutive ports. Default without --connect: tcp://127.0.0.1:5557."`
	Connect string `placeholder:"ENDPOINT" xor:"endpoint" help:"Connect the publisher to this endpoint, where kvcast serve --bind listens."`
	Replay  string `placeholder:"ENDPOINT" help:"Bind the replay socket to this endpoint. Several engines use consecutive ports. With --connect and without --name, its host is the engine's name, because kvcast requests replays from the host in the topic, by default at port 5558; several engines then use consecutive IPv4 addresses."`
	Engines int    `default:"1" help:"Number of engines, 1 to 256."`
	Name    string `placeholder:"NAME" help:"Name of the engines, followed by - and a number. Default: sim. With --connect the topic is kv@NAME@MODEL."`
	Model   string `default:"sim-model" help:"Model of the engines."`
	Form    string `enum:"array,map" default:"array" help:"Encoding of batches and events: array or map (${default})."`
	Ranks   bool   `help:"Make the engines the dp ranks of one worker, as --worker ...,dp_size=N reads them: each batch names its rank."`

	Window []int `placeholder:"TOKENS" help:"Sliding windows of a hybrid model, in tokens: each is an attention group beside full attention, with blocks of the same cache. Block hashes are then those that vLLM computes."`
	Mamba  bool  `help:"Keep states of Mamba layers as a further attention group, with vLLM's block hashes."`

	Blocks    *int     `placeholder:"N" help:"Blocks in each cache. Default: 2048, or 65536 with --trace."`
	BlockSize int      `default:"16" help:"Tokens in a block; with --trace a divisor of 512."`
	Batches   uint64   `default:"0" placeholder:"N" help:"Number of batches per engine; 0 means no limit, or up to the end of the trace (${default})."`
	Rate      *float64 `placeholder:"N" xor:"pace" help:"Batches per second of each engine; 0 means as fast as possible. Default: 20. A trace has its own times."`
	Seed      uint64   `default:"1" help:"Seed of the generated requests; the same seed gives the same events."`

	Trace    string   `placeholder:"TRACE" xor:"pace" help:"Run the requests of a trace: conversation, which is built in (12,031 requests of one hour), or a file in its form (JSON lines, also with gzip)."`
	Speed    *float64 `placeholder:"X" help:"Speed of the trace: 10 runs an hour in six minutes, 0 means as fast as possible. Default: 1."`
	Requests int      `placeholder:"N" help:"Run the first N requests of the trace; 0 runs all."`
	Policy   string   `enum:"round-robin,prefix" default:"round-robin" help:"How requests of the trace are assigned to engines: round-robin, or prefix for the engine with the longest prefix of the prompt (${default})."`

	Faults    string  `placeholder:"PLAN" help:"Faults as NAME=RATE (0 to 1 per batch) or NAME@BATCH (a batch's number, from 0), separated by commas: drop=0.01,restart@500. Names: see above."`
	FaultSeed *uint64 `placeholder:"N" help:"Seed of the faults with a rate. Default: --seed."`

	Wait     bool          `help:"Wait for a subscriber before the first batch, so that no batch is lost. Real engines do not wait."`
	Stay     bool          `help:"Serve replays after the last batch, until interrupted."`
	Progress time.Duration `default:"10s" help:"Interval of progress reports on standard error; 0 disables them (${default})."`
	Output   string        `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"Output format: text, or json for an object per line (${default}). The hit rate is the share of prompt tokens in cached blocks, as vLLM counts it."`
}

// Help implements kong.HelpProvider.
func (*Command) Help() string {
	return cli.Examples(
		"kvcast simulate --connect tcp://localhost:5557 --replay tcp://127.0.0.1:5558",
		"kvcast simulate --bind tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --batches 1000",
		"kvcast simulate --trace conversation --speed 60 --engines 4 --policy prefix",
		"kvcast simulate --replay tcp://127.0.0.1:5558 --faults drop=0.01,restart@500") + `
Faults of a batch: drop does not send it, forget loses it for replays too, twice sends it twice, delay sends it 3 batches later, truncate sends half of it.

Faults of replays and connections: clear-replay empties the replay buffer. For 20 batches, holes omits replies, endless omits the end of replays, mute answers no replay request, silent sends no batch, and dead does both. flap closes the connections for 3 batches.

Restarts: restart, restart-in-place (connections stay open), restart-late (the first 5 batches are lost), restart-ahead (the first 5 seqs are skipped), restart-passed (the new seqs have passed the old ones at reconnect).`
}

// Run publishes until all batches are published or ctx is done. It then reports the cache of each engine.
func (c *Command) Run(ctx context.Context, p cli.Process) error {
	configs, err := c.configs()
	if err != nil {
		return err
	}
	engines := make([]*simulator.Engine, 0, len(configs))
	report := report{out: p.Out, isJSON: c.Output == "json"}
	for i, cfg := range configs {
		e, err := simulator.New(cfg)
		if err == nil {
			engines = append(engines, e)
			err = report.started(c.name(i), e)
		} else {
			err = fmt.Errorf("start %s: %w", c.name(i), err)
		}
		if err != nil {
			for _, e := range engines {
				err = errors.Join(err, e.Close())
			}
			return err
		}
	}
	errs := make([]error, len(engines))
	var running, reporting sync.WaitGroup
	for i, e := range engines {
		running.Go(func() { errs[i] = e.Run(ctx) })
	}
	publishing, stopReporting := context.WithCancel(ctx)
	progress := progress{out: p.Err, engines: engines, requests: countRequests(configs), batches: c.Batches * uint64(len(engines))}
	reporting.Go(func() { progress.report(publishing, c.Progress) })
	for _, e := range engines {
		<-e.Finished()
	}
	stopReporting()
	reporting.Wait()
	var reported error
	for i, e := range engines {
		reported = errors.Join(reported, report.finished(c.name(i), 0, e.Summary()))
	}
	if len(engines) > 1 {
		reported = errors.Join(reported, report.finished("all", len(engines), total(engines)))
	}
	running.Wait()
	return errors.Join(append(errs, reported)...)
}

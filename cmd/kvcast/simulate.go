package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
)

type simulateCmd struct {
	Bind    string `placeholder:"ENDPOINT" help:"Publish at this endpoint, for kvcast serve --worker to connect to (tcp://127.0.0.1:5557 unless --connect is given). Several engines use one port after the other."`
	Connect string `placeholder:"ENDPOINT" help:"Publish to this endpoint, where kvcast serve --bind listens."`
	Replay  string `placeholder:"ENDPOINT" help:"Serve replay at this endpoint. Several engines use one port after the other. With --connect and without --name its host is what the engine is called, since kvcast asks there: at port 5558 unless told otherwise, and several engines use one address after the other, from an IPv4 address on such as 127.0.0.1."`
	Engines int    `default:"1" help:"How many engines to be, 1 to 256."`
	Name    string `help:"Their name, followed by - and a number (sim); with --connect the topic is kv@NAME@MODEL."`
	Model   string `default:"sim-model" help:"Their model."`
	Form    string `enum:"array,map" default:"array" help:"How batches and events are encoded: array or map."`
	Ranks   bool   `help:"Let the engines be the dp ranks of one worker, as --worker ...,dp_size=N reads them: each batch names its rank."`

	Blocks    *int     `placeholder:"N" help:"Blocks that each cache holds (2048; with --trace 65536)."`
	BlockSize int      `default:"16" help:"Tokens in a block; with --trace a divisor of 512."`
	Batches   uint64   `default:"0" placeholder:"N" help:"End after this many batches of each engine; 0 means never, or at the end of the trace (${default})."`
	Rate      *float64 `placeholder:"N" help:"Batches a second of each engine; 0 means as fast as possible (20). Not with --trace."`
	Seed      uint64   `default:"1" help:"Chooses the generated requests; the same seed gives the same events."`

	Trace    string   `placeholder:"TRACE" help:"Run the requests of a trace: conversation, which is built in (12,031 requests of one hour), or a file in its form (JSON lines, also with gzip)."`
	Speed    *float64 `placeholder:"X" help:"How much faster than in the trace the time goes: 10 means an hour in six minutes, 0 as fast as possible (1)."`
	Requests int      `placeholder:"N" help:"Run the first so many requests of the trace; 0 means all."`
	Policy   string   `enum:"round-robin,prefix" default:"round-robin" help:"Which engine gets a request of the trace: round-robin, or prefix, the one that was given most of its prompt before (${default})."`

	Faults    string  `placeholder:"PLAN" help:"What goes wrong, as NAME=RATE (0 to 1 a batch) or NAME@BATCH (its number, from 0), with commas between: drop=0.01,restart@500. Names: drop, forget, twice, delay, truncate, amnesia, holes, endless, mute, silent, dead, restart, restart-in-place, restart-late, restart-ahead, restart-passed, flap."`
	FaultSeed *uint64 `placeholder:"N" help:"Chooses where rates strike (--seed)."`

	Wait     bool          `help:"Publish nothing before somebody subscribes, so that nothing is lost. Real engines do not wait."`
	Stay     bool          `help:"Serve replay after the last batch, until interrupted."`
	Progress time.Duration `default:"10s" help:"Tell how far it is this often, on standard error; 0 means never (${default})."`
	Output   string        `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"text for people, json for programs: an object a line (${default}). The hit rate at the end is the part of all prompt tokens that were in the cache, in whole blocks, as vLLM counts it."`
}

const maxEngines = 256

// Run publishes until all batches are out or ctx is done, and then tells what
// each engine holds.
func (c *simulateCmd) Run(ctx context.Context, std stdio) error {
	configs, err := c.configs()
	if err != nil {
		return err
	}
	engines := make([]*simulator.Engine, 0, len(configs))
	closeAll := func() (err error) {
		for _, e := range engines {
			err = errors.Join(err, e.Close())
		}
		return err
	}
	report := simulateReport{out: std.out, json: c.Output == "json"}
	for i, cfg := range configs {
		e, err := simulator.New(cfg)
		if err != nil {
			return errors.Join(fmt.Errorf("start %s: %w", c.name(i), err), closeAll())
		}
		engines = append(engines, e)
		if err := report.started(c.name(i), e); err != nil {
			return errors.Join(err, closeAll())
		}
	}
	errs := make([]error, len(engines))
	var running, telling sync.WaitGroup
	for i, e := range engines {
		running.Go(func() { errs[i] = e.Run(ctx) })
	}
	finished, finish := context.WithCancel(ctx)
	progress := simulateProgress{out: std.err, engines: engines, requests: requestsOf(configs), batches: c.Batches * uint64(len(engines))}
	telling.Go(func() { progress.tell(finished, c.Progress, isTerminal(std.err)) })
	for _, e := range engines {
		<-e.Finished()
	}
	finish()
	telling.Wait()
	var told error
	for i, e := range engines {
		told = errors.Join(told, report.ended(c.name(i), e.Summary()))
	}
	if len(engines) > 1 {
		told = errors.Join(told, report.total(engines))
	}
	running.Wait()
	return errors.Join(append(errs, told)...)
}

// name is what engine i is called.
func (c *simulateCmd) name(i int) string {
	if host, ok := c.replayHost(i); ok && !c.Ranks {
		return host
	}
	return fmt.Sprintf("%s-%d", cmp.Or(c.Name, "sim"), i)
}

// worker is the name of the worker that engine i belongs to.
func (c *simulateCmd) worker(i int) string {
	if !c.Ranks {
		return c.name(i)
	}
	if host, ok := c.replayHost(i); ok {
		return host
	}
	return cmp.Or(c.Name, "sim")
}

// replayHost is where kvcast asks for replay of engine i by its topic, if that is
// where it is served.
func (c *simulateCmd) replayHost(i int) (host string, ok bool) {
	if c.Connect == "" || c.Replay == "" || c.Name != "" {
		return "", false
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(c.Replay, "tcp://"))
	if err != nil || !strings.HasPrefix(c.Replay, "tcp://") || host == "*" {
		return "", false
	}
	first, err := netip.ParseAddr(host)
	switch {
	case err != nil || first.IsUnspecified():
		return host, err != nil && c.alone()
	case c.alone():
		return host, true
	case !first.Is4():
		return "", false
	}
	b := first.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(i))
	return netip.AddrFrom4(b).String(), true
}

// alone tells that one host is enough for all engines.
func (c *simulateCmd) alone() bool { return c.Engines == 1 || c.Ranks }

// requestsOf is the number of requests in the traces of all engines.
func requestsOf(configs []simulator.Config) (n int) {
	for _, cfg := range configs {
		if cfg.Trace != nil {
			n += len(cfg.Trace.Requests)
		}
	}
	return n
}

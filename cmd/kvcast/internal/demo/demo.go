// Package demo is the command kvcast demo: simulated engines, a server, and routers that check the stream. One router is
// disconnected and resumes.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/serve"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Command is kvcast demo.
type Command struct {
	Listen  string `default:"127.0.0.1:0" placeholder:"ADDR" help:"Listen address of the demo's server; port 0 means any (${default})."`
	Restart bool   `xor:"steps" help:"Kill a server that has a journal in files, and restart it, in place of the other steps."`
	Cluster bool   `xor:"steps" help:"Kill one of three servers that share a journal in a NATS server, in place of the other steps."`
	Console bool   `xor:"steps" help:"Run engines with faults and routers until interrupted, and print the address of the console, in place of the other steps."`
	Stay    bool   `help:"Keep the server running at the end, to inspect it with grpcurl, until interrupted."`
}

// Help implements kong.HelpProvider.
func (*Command) Help() string {
	return cli.Examples("kvcast demo", "kvcast demo --restart", "kvcast demo --cluster", "kvcast demo --console")
}

const (
	engineCount = 2
	batches     = 300 // per engine
	batchRate   = 60  // per engine and second
	cacheBlocks = 512 // few enough for constant eviction
	// networkFaults drops 5 % of the batches, and truncates 2 %.
	networkFaults = "drop=0.05,truncate=0.02"
	// disconnectAfter is the number of entries that the router receives before it disconnects. missedEntries is the number
	// of entries while it is disconnected.
	disconnectAfter = 150
	missedEntries   = 150
	// routeTimeout bounds all steps of the routers together.
	routeTimeout = 2 * time.Minute
)

// Run runs the demo. It fails if a check does.
func (c *Command) Run(ctx context.Context, p cli.Process) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := demo{out: p.Out}
	var err error
	switch {
	case c.Restart:
		err = d.runRestart(ctx)
	case c.Cluster:
		err = d.runCluster(ctx)
	case c.Console:
		err = d.runConsole(ctx, c.Listen)
	default:
		err = d.run(ctx, c.Listen)
	}
	if ctx.Err() != nil && !c.Console {
		err = cli.ErrSilent // interrupted
	}
	switch {
	case err != nil || c.Restart || c.Cluster || c.Console:
	case c.Stay:
		d.heading("the server runs until you press Ctrl-C; try in another terminal")
		d.print(grpcurl, d.addr)
		<-ctx.Done()
	default:
		d.heading("try next: `make run` in one terminal, and each of these commands in another terminal")
		d.print("bin/kvcast simulate --connect tcp://localhost:5557 --replay tcp://127.0.0.1:5558\n"+grpcurl, "localhost:50051")
	}
	cancel()
	return errors.Join(err, d.parts.Wait())
}

const grpcurl = "grpcurl -plaintext -d '{\"earliest\": {}}' %s kvcast.v1.RouterEventService/Subscribe\n(make grpcurl builds it as bin/tools/grpcurl)\n"

// demo contains the engines and the server.
type demo struct {
	out     io.Writer
	parts   errgroup.Group // engines and server, which run until the context is done
	engines []*simulator.Engine
	addr    string // of the server
}

func (d *demo) print(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format, args...) }

func (d *demo) heading(format string, args ...any) { d.print("\n== "+format+"\n", args...) }

func engineName(i int) string { return fmt.Sprintf("engine-%d", i) }

func (d *demo) run(ctx context.Context, listen string) error {
	d.heading("%d simulated engines publish their KV-cache events over ZeroMQ, and some messages are lost", engineCount)
	for i := range engineCount {
		if err := d.startEngine(ctx, i, batches); err != nil {
			return fmt.Errorf("start %s: %w", engineName(i), err)
		}
	}
	d.heading("the server reads both and serves routers over gRPC")
	if err := d.startServer(ctx, map[string]string{"listen": listen, "admin": ""}); err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	d.print("kvcast serves at %s\n", d.addr)
	conn, err := grpc.NewClient(d.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to server: %w", err)
	}
	defer func() { _ = conn.Close() }()
	return d.route(ctx, conn)
}

func (d *demo) startEngine(ctx context.Context, i int, batches uint64) error {
	faults, err := simulator.ParseFaults(networkFaults)
	if err != nil {
		return err
	}
	faults.Seed = uint64(i + 1)
	e, err := simulator.New(simulator.Config{
		SocketConfig: simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
		Pool:         blockpool.Config{Capacity: cacheBlocks, BlockSize: 16},
		Seed:         uint64(i + 1), Faults: faults, Batches: batches, Rate: batchRate,
		Subscribers: 1,
		Linger:      true, // replay batches after the last batch too
	})
	if err != nil {
		return err
	}
	d.engines = append(d.engines, e)
	d.parts.Go(func() error { return e.Run(ctx) })
	d.print("%s publishes at %s\n", engineName(i), e.Endpoint())
	return nil
}

// startServer starts a server with flags of kvcast serve, which reads the engines.
func (d *demo) startServer(ctx context.Context, flags map[string]string) error {
	from := config.Sources{Flags: flags}
	for i, e := range d.engines {
		from.Workers = append(from.Workers, fmt.Sprintf("name=%s,model=demo,block_size=16,connect=%s,replay=%s", engineName(i), e.Endpoint(), e.ReplayEndpoint()))
	}
	cfg, _, err := config.Read(from)
	if err != nil {
		return err
	}
	s, err := serve.Open(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	d.addr = s.Addr()
	d.parts.Go(func() error { return s.Run(ctx) })
	select {
	case <-s.Serving():
	case <-ctx.Done():
	}
	return nil
}

// route runs two routers. One is disconnected for a while, the other is not.
func (d *demo) route(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, routeTimeout)
	defer cancel()
	c := client.FromConn(conn)
	other, router, late := newRouter(c), newRouter(c), newRouter(c)
	other.connect(ctx, client.FromEarliest())
	defer other.disconnect()

	d.heading("a router subscribes from the earliest entry: seq, time, worker, dp rank, event")
	router.connect(ctx, client.FromEarliest())
	defer func() { router.disconnect() }() // which the next connection replaces
	if err := router.receiveUntil(func() bool { return len(router.entries) >= disconnectAfter }, d.show()); err != nil {
		return err
	}
	router.disconnect()
	at := router.at
	d.heading("the router is disconnected after seq %d; the engines continue", at.Seq)
	if err := other.receiveUntil(func() bool { return other.at.Seq >= at.Seq+missedEntries }, nil); err != nil {
		return err
	}
	d.print("the server is at seq %d\n", other.at.Seq)

	d.heading("the router resumes after its position, %s", at)
	router.connect(ctx, client.FromEarliest())
	if err := router.receiveUntil(func() bool { return len(router.entries) > disconnectAfter }, d.show()); err != nil {
		return err
	}

	d.heading("the engines finish, and report the contents of their caches")
	summaries, err := d.finish(ctx)
	if err != nil {
		return err
	}
	err = errors.Join(
		router.receiveUntil(func() bool { return router.matches(summaries) == nil }, nil),
		other.receiveUntil(func() bool { return other.at.Seq >= router.at.Seq }, nil))
	if err != nil {
		return errors.Join(err, router.matches(summaries))
	}
	d.heading("a new router begins with a snapshot; LookupBlocks returns the workers that hold a block")
	late.connect(ctx, client.FromSnapshot())
	defer late.disconnect()
	if err := late.receiveUntil(func() bool { return late.view.Status().Ready }, nil); err != nil {
		return err
	}
	for i := range d.engines {
		d.print("snapshot at seq %d: %s holds %d blocks\n", late.at.Seq, engineName(i), late.blocks(engineName(i)).Blocks)
	}
	if err := d.lookup(ctx, kvcastv1.NewRouterEventServiceClient(conn), router); err != nil {
		return err
	}
	return d.check(router, other, late, at.Seq, summaries)
}

// finish waits until the engines have published all batches, and returns their summaries.
func (d *demo) finish(ctx context.Context) (summaries []simulator.Summary, err error) {
	for i, e := range d.engines {
		select {
		case <-e.Finished():
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for %s: %w", engineName(i), ctx.Err())
		}
		sum := e.Summary()
		summaries = append(summaries, sum)
		d.print("%s: %d batches, %d of them lost or truncated in transit; %d blocks stored, %d removed; its cache has %d distinct blocks, digest %016x\n",
			engineName(i), sum.Batches, lost(sum), sum.Stored, sum.Removed, sum.Blocks, sum.Digest)
	}
	return summaries, nil
}

// lost returns the number of batches of an engine that were dropped or truncated.
func lost(sum simulator.Summary) (n uint64) {
	for _, times := range sum.Faults {
		n += times
	}
	return n
}

func (d *demo) lookup(ctx context.Context, client kvcastv1.RouterEventServiceClient, r *router) error {
	var tokens uint64
	for _, e := range r.entries {
		for _, ev := range e.GetEvents() {
			if hashes := ev.GetStored().GetTokensHashes(); len(hashes) > 0 {
				tokens = hashes[len(hashes)-1]
			}
		}
	}
	found, err := client.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{TokensHashes: []uint64{tokens}})
	if err != nil {
		return fmt.Errorf("look up block: %w", err)
	}
	for _, h := range found.GetHolders() {
		d.print("tokens hash %016x: %s holds it as block %016x, dp rank %d, %s\n",
			tokens, h.GetWorker(), h.GetBlockHash(), h.GetDpRank(), output.TierName(h.GetTier()))
	}
	return nil
}

// show returns a function that prints entries, up to a dozen lines in total.
func (d *demo) show() func(*kvcastv1.Entry) error {
	const maxLines = 12
	lines, p := 0, output.NewPrinter(d.out, "text")
	return func(e *kvcastv1.Entry) error {
		if lines > maxLines {
			return nil
		}
		if lines += len(e.GetEvents()); lines > maxLines {
			d.print("...\n")
			return nil
		}
		return p.Entry(e)
	}
}

// check prints whether the router, the other router, the router that began with a snapshot, and the engines agree.
func (d *demo) check(router, other, late *router, resumedAfter uint64, engines []simulator.Summary) error {
	c := d.newCheck()
	c.report(router.complete(), "the router has entries 1 to %d, each once and in order, %d before it was disconnected and %d after", router.at.Seq, resumedAfter, router.at.Seq-resumedAfter)
	c.report(router.equals(other), "a second router, which was never disconnected, received the same entries")
	total := uint64(0)
	for _, sum := range engines {
		total += lost(sum)
	}
	c.report(router.matches(engines), "the router's view has exactly the blocks in the engines' caches: the %d lost batches were replayed", total)
	c.report(late.matches(engines), "the snapshot has the same blocks")
	return c.failure
}

// check prints the results of checks.
type check struct {
	*demo
	failure error // cli.ErrSilent if a check has failed
}

func (d *demo) newCheck() *check {
	d.heading("checked")
	return &check{demo: d}
}

func (c *check) report(err error, format string, args ...any) {
	if err != nil {
		c.failure = cli.ErrSilent
		c.print("FAILED  %s: %v\n", fmt.Sprintf(format, args...), err)
		return
	}
	c.print("ok      "+format+"\n", args...)
}

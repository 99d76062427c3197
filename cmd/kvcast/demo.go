package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

type demoCmd struct {
	Listen string `default:"127.0.0.1:0" placeholder:"ADDR" help:"Where the demo's server listens; port 0 means any (${default})."`
	Stay   bool   `help:"Leave the server running at the end, to look at with grpcurl, until interrupted."`
}

const (
	demoEngines = 2
	demoBatches = 300 // of each engine
	demoRate    = 60  // a second
	demoBlocks  = 512 // a cache that small evicts all the time
	// demoFaults is what the network does: batches that are lost, and cut short.
	demoFaults = "drop=0.05,truncate=0.02"
	// demoCut is after how many entries the router is cut off, and demoAway how
	// many come while it is.
	demoCut  = 150
	demoAway = 150
	// demoPatience is how long any step may take.
	demoPatience = 2 * time.Minute
)

// Run shows the main job, and fails if any check does.
func (c *demoCmd) Run(ctx context.Context, std stdio) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := demo{out: std.out}
	err := d.run(ctx, c.Listen)
	if ctx.Err() != nil {
		err = errSilent // interrupted, which needs no explanation
	}
	switch {
	case err != nil:
	case c.Stay:
		d.say("the server stays until you interrupt this (Ctrl-C); try in another terminal")
		d.grpcurl(d.server.addr)
		<-ctx.Done()
	default:
		d.say("try next: `make run` in one terminal, an engine and a look at the stream in others")
		_, _ = fmt.Fprintln(d.out, "bin/kvcast simulate --connect tcp://localhost:5557 --replay tcp://127.0.0.1:5558")
		d.grpcurl("localhost:50051")
	}
	cancel()
	return errors.Join(err, d.stop())
}

// demo is a server, engines, and what is shown of them.
type demo struct {
	out     io.Writer
	engines []*simulated
	server  *served
}

// say prints a line about what happens.
func (d *demo) say(format string, args ...any) {
	_, _ = fmt.Fprintf(d.out, "\n== "+format+"\n", args...)
}

func (d *demo) run(ctx context.Context, listen string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	d.say("%d simulated engines, each a process that publishes its KV-cache events over ZeroMQ, which loses some", demoEngines)
	for i := range demoEngines {
		e, err := startSimulated(ctx, self, i)
		if err != nil {
			return err
		}
		d.engines = append(d.engines, e)
		_, _ = fmt.Fprintf(d.out, "%s publishes at %s\n", e.name(), e.endpoint())
	}
	d.say("the server, a process that reads both and serves routers over gRPC")
	if d.server, err = startServed(ctx, self, listen, d.engines); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(d.out, "kvcast serves at %s\n", d.server.addr)

	conn, err := (&connectionFlags{Addr: d.server.addr}).dial()
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return d.follow(ctx, kvcastv1.NewRouterEventServiceClient(conn))
}

// follow is the router's part: two streams with a time between them in which it
// hears nothing, beside a witness that hears all.
func (d *demo) follow(ctx context.Context, client kvcastv1.RouterEventServiceClient) error {
	ctx, cancel := context.WithTimeout(ctx, demoPatience)
	defer cancel()
	witness, router := newFollower(client), newFollower(client)
	if err := witness.begin(ctx); err != nil {
		return err
	}
	defer witness.end()

	d.say("a router subscribes from the earliest entry: seq, time, worker, dp rank, what happened")
	if err := router.begin(ctx); err != nil {
		return err
	}
	if err := router.until(func() bool { return len(router.entries) >= demoCut }, d.show()); err != nil {
		return err
	}
	router.end()
	cut := router.checker.Position()
	d.say("the router is cut off after seq %d; the engines go on", cut.GetSeq())
	if err := witness.until(func() bool { return witness.seq() >= cut.GetSeq()+demoAway }, nil); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(d.out, "the server is at seq %d\n", witness.seq())

	d.say("the router resumes after its position, %s:%d", cut.GetEpoch(), cut.GetSeq())
	if err := router.begin(ctx); err != nil {
		return err
	}
	defer router.end()
	if err := router.until(func() bool { return len(router.entries) > demoCut }, d.show()); err != nil {
		return err
	}

	d.say("the engines end, and say what their caches hold")
	var held []engineEnded
	for _, e := range d.engines {
		h, err := e.ended(ctx)
		if err != nil {
			return err
		}
		held = append(held, h)
		_, _ = fmt.Fprintf(d.out, "%s: %d batches, %d of them lost or cut short on the way; %d blocks stored, %d removed; it holds %d different ones, digest %016x\n",
			h.Engine, h.Batches, lost(h), h.Stored, h.Removed, h.Blocks, h.Digest)
	}
	settled := func() bool { return router.holds(held) == nil }
	errs := []error{router.until(settled, nil), witness.until(func() bool { return witness.seq() >= router.seq() }, nil)}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(d.check(router, witness, nil, cut.GetSeq(), held), err)
	}
	d.say("a router that starts now begins with a snapshot, and may ask who holds a block")
	snapshot, err := d.snapshot(ctx, client)
	if err != nil {
		return err
	}
	if err := d.lookup(ctx, client, router); err != nil {
		return err
	}
	return d.check(router, witness, snapshot, cut.GetSeq(), held)
}

// lost is how many of an engine's batches did not come as they were published.
func lost(h engineEnded) (n uint64) {
	for _, times := range h.Faults {
		n += times
	}
	return n
}

// snapshot takes one, shows its summary, and returns what it amounts to.
func (d *demo) snapshot(ctx context.Context, client kvcastv1.RouterEventServiceClient) (*checker.Checker, error) {
	req := &kvcastv1.SnapshotRequest{}
	c := checker.New(checker.Options{})
	if err := c.BeginSnapshot(req); err != nil {
		return nil, err
	}
	stream, err := client.Snapshot(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("take snapshot: %w", err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("take snapshot: %w", err)
		}
		if err := c.ReceiveSnapshot(m); err != nil {
			return nil, err
		}
	}
	if err := c.EndSnapshot(); err != nil {
		return nil, err
	}
	for _, name := range c.View().Workers() {
		_, _ = fmt.Fprintf(d.out, "snapshot at seq %d: %s holds %d blocks\n", c.Position().GetSeq(), name, c.View().Count(name, 0, kvcastv1.Tier_TIER_DEVICE))
	}
	return c, nil
}

// lookup asks for the last block that the router heard of.
func (d *demo) lookup(ctx context.Context, client kvcastv1.RouterEventServiceClient, router *follower) error {
	var tokens uint64
	for _, e := range router.entries {
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
		_, _ = fmt.Fprintf(d.out, "tokens hash %016x: %s holds it as block %016x, dp rank %d, %s\n",
			tokens, h.GetWorker(), h.GetBlockHash(), h.GetDpRank(), tierName(h.GetTier()))
	}
	return nil
}

// show returns what prints the next entries, a dozen lines of them.
func (d *demo) show() func(*kvcastv1.Entry) error {
	const most = 12
	lines, p := 0, newPrinter(d.out, "text")
	return func(e *kvcastv1.Entry) error {
		if lines > most {
			return nil
		}
		if lines += len(e.GetEvents()); lines > most {
			_, err := fmt.Fprintln(d.out, "...")
			return err
		}
		return p.entry(e)
	}
}

// check compares what the router got with what it should have got. The snapshot
// is nil where none was taken.
func (d *demo) check(router, witness *follower, snapshot *checker.Checker, cut uint64, held []engineEnded) error {
	d.say("checked")
	failed := false
	report := func(err error, what string) {
		if err != nil {
			failed = true
			_, _ = fmt.Fprintf(d.out, "FAILED  %s: %v\n", what, err)
			return
		}
		_, _ = fmt.Fprintf(d.out, "ok      %s\n", what)
	}
	report(router.complete(), fmt.Sprintf("the router has entries 1 to %d, each once and in order, %d before the cut and %d after", router.seq(), cut, router.seq()-cut))
	report(router.same(witness), "they are those of a second router that was never cut off")
	total := uint64(0)
	for _, h := range held {
		total += lost(h)
	}
	report(router.holds(held), fmt.Sprintf("the router's view holds exactly the blocks that the engines hold: the %d batches that were lost were fetched again", total))
	if snapshot != nil {
		var err error
		if diff := router.checker.View().Diff(snapshot.View()); diff != "" {
			err = errors.New(diff)
		}
		report(err, "the snapshot is the same as the router's view")
	}
	if failed {
		return errSilent
	}
	return nil
}

// grpcurl says how to look at a server.
func (d *demo) grpcurl(addr string) {
	_, _ = fmt.Fprintf(d.out, "grpcurl -plaintext -d '{\"earliest\": {}}' %s kvcast.v1.RouterEventService/Subscribe\n"+
		"(make grpcurl builds it as bin/tools/grpcurl)\n", addr)
}

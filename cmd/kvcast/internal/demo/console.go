package demo

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	consoleRouters = 3
	// consoleStall is after how long the server ends the router that reads nothing. slowFor, which is longer, is how long that
	// takes no notice.
	consoleStall = "20s"
	slowFor      = 40 * time.Second
	// consoleAdmin is the admin port's default. Another port is used if it is not free.
	consoleAdmin = "127.0.0.1:9464"
	// smallWindow is in bytes: a router that reads nothing soon blocks its stream.
	smallWindow = 64 << 10
)

// consoleEngine is an engine of the demo of the console. Engines with the same seed get the same prompts.
type consoleEngine struct {
	seed   uint64
	rate   float64 // batches a second
	blocks int
	window int    // of a sliding window beside full attention, in tokens; 0: none
	faults string // empty: none
}

var consoleEngines = []consoleEngine{
	{seed: 1, rate: 30, blocks: 4096},
	{seed: 1, rate: 30, blocks: 4096},
	{seed: 1, rate: 30, blocks: 3072},
	{seed: 2, rate: 20, blocks: 4096, faults: "drop=0.01"},
	{seed: 2, rate: 20, blocks: 2048, faults: "drop=0.01,flap=0.001"},
	{seed: 3, rate: 25, blocks: 4096, faults: "forget=0.002"},
	{seed: 4, rate: 15, blocks: 2048, window: 128},
	{seed: 5, rate: 25, blocks: 1024, faults: "restart=0.002"},
}

// runConsole runs engines, faults and routers until ctx ends, for people to look at in the console.
func (d *demo) runConsole(ctx context.Context, listen string) error {
	d.heading("%d simulated engines with faults: lost batches, lost connections and restarts", len(consoleEngines))
	for i, c := range consoleEngines {
		if err := d.startConsoleEngine(ctx, i, c); err != nil {
			return fmt.Errorf("start %s: %w", engineName(i), err)
		}
	}
	admin, err := freeAdmin(ctx)
	if err != nil {
		return err
	}
	if err := d.startServer(ctx, map[string]string{"listen": listen, "admin": admin, "subscribers-stall": consoleStall}); err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	conn, err := grpc.NewClient(d.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	for i := range consoleRouters {
		d.parts.Go(func() error {
			view := client.NewView()
			for u, err := range client.FromConn(conn).Subscribe(ctx, client.Config{ClientID: fmt.Sprintf("router %d", i+1)}) {
				if err != nil {
					return nil // the server has ended
				}
				view.Apply(u)
			}
			return nil
		})
	}
	d.parts.Go(func() error { return d.subscribeSlowly(ctx) })
	d.print("%d routers follow the stream; the server ends another one, which reads nothing, after %s\n", consoleRouters, consoleStall)
	d.heading("open http://%s/ in a browser; the demo runs until you press Ctrl-C", admin)
	<-ctx.Done()
	return nil
}

func (d *demo) startConsoleEngine(ctx context.Context, i int, c consoleEngine) error {
	var faults simulator.Faults
	if c.faults != "" {
		var err error
		if faults, err = simulator.ParseFaults(c.faults); err != nil {
			return err
		}
	}
	faults.Seed = uint64(i + 1)
	cfg := simulator.Config{
		SocketConfig: simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
		Pool:         blockpool.Config{Capacity: c.blocks, BlockSize: 16, HashSeed: uint64(i)},
		Seed:         c.seed, Rate: c.rate, Faults: faults, Subscribers: 1,
	}
	if c.window > 0 {
		cfg.Pool.VLLMHashes, cfg.Pool.Groups = true, []blockpool.Group{{Window: c.window}}
	}
	e, err := simulator.New(cfg)
	if err != nil {
		return err
	}
	d.engines = append(d.engines, e)
	d.parts.Go(func() error { return e.Run(ctx) })
	return nil
}

// freeAdmin returns the default address of the admin port, or another of this host if that is in use.
func freeAdmin(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", consoleAdmin)
	if err != nil {
		return freeAddress(ctx)
	}
	return consoleAdmin, l.Close()
}

// subscribeSlowly subscribes and reads nothing, and again when the server has ended the stream.
func (d *demo) subscribeSlowly(ctx context.Context) error {
	conn, err := grpc.NewClient(d.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUserAgent("slow-router"),
		grpc.WithStaticStreamWindowSize(smallWindow), grpc.WithStaticConnWindowSize(smallWindow))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	for ctx.Err() == nil {
		stream, cancel := context.WithTimeout(ctx, slowFor)
		_, err := kvcastv1.NewRouterEventServiceClient(conn).Subscribe(stream, &kvcastv1.SubscribeRequest{
			Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}},
		})
		if err == nil {
			<-stream.Done()
		}
		cancel()
	}
	return nil
}

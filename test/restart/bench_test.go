package restart_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// BenchmarkRestart kills a server with 64 workers and some 1,000,000 blocks, and starts it again: from entries alone, and
// mostly from checkpoints. ready-s is the longest time from the start of the process until it serves routers, after all
// engines have answered.
func BenchmarkRestart(b *testing.B) {
	for name, checkpointBytes := range map[string]string{"Entries": "1GiB", "Checkpoints": "4MiB"} {
		b.Run(name, func(b *testing.B) { benchmarkRestart(b, "file:"+b.TempDir(), checkpointBytes, false) })
	}
}

// BenchmarkReplica starts a server that serves what another one with as many workers and blocks writes to a NATS server.
func BenchmarkReplica(b *testing.B) { benchmarkRestart(b, natstest.Start(b), "4MiB", true) }

func benchmarkRestart(b *testing.B, journal, checkpointBytes string, isReplica bool) {
	const workers, perWorker = 64, 16_384
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	b.Cleanup(func() { cancel(); group.Wait() })
	args := []string{
		"--journal", journal, "--journal-max-bytes", "256MiB", "--journal-checkpoint-bytes", checkpointBytes,
	}
	var all []*simulator.Engine
	for i := range workers {
		e, err := simulator.New(simulator.Config{
			SocketConfig: simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
			Pool:         blockpool.Config{Capacity: perWorker, HashSeed: uint64(i)},
			Seed:         uint64(i), Batches: 1500, Subscribers: 1, Linger: true,
		})
		if err != nil {
			b.Fatal(err)
		}
		group.Go(func() { _ = e.Run(ctx) })
		all = append(all, e)
		args = append(args, "--worker", fmt.Sprintf("name=w%d,model=m,connect=%s,replay=%s", i, e.Endpoint(), e.ReplayEndpoint()))
	}
	start := func() *harness.Process {
		p, err := harness.StartProcess(harness.ProcessConfig{Args: args})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = p.Kill() })
		return p
	}
	p := start()
	var blocks uint64
	for _, e := range all {
		<-e.Finished()
		blocks += uint64(e.Summary().Blocks)
	}
	await := func() *kvcastv1.GetStatusResponse {
		addr, err := p.Addr()
		if err != nil {
			b.Fatal(err)
		}
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		for deadline := time.Now().Add(harness.Timeout); ; {
			s, err := kvcastv1.NewRouterEventServiceClient(conn).GetStatus(ctx, &kvcastv1.GetStatusRequest{})
			if err != nil {
				b.Fatal(err)
			}
			if s.GetBlocks() == blocks {
				return s
			}
			if time.Now().After(deadline) {
				b.Fatalf("the server has %d blocks, the engines %d", s.GetBlocks(), blocks)
			}
		}
	}
	await()
	slowest := time.Duration(0)
	if isReplica {
		args = append(args, "--cluster-ingest=false")
		p = start()
	}
	for b.Loop() {
		if err := p.Kill(); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		p = start()
		if _, err := p.Addr(); err != nil {
			b.Fatal(err)
		}
		slowest = max(slowest, time.Since(began))
		await()
	}
	b.ReportMetric(slowest.Seconds(), "ready-s")
	b.ReportMetric(float64(blocks), "blocks")
	rss, err := harness.ResidentBytes(p.PID())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(rss)/1e6, "rss-MB")
}

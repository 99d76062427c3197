package restart_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestRoutersMoveBetweenServers kills, at random entries, the server that reads the engines or the one that follows it.
// Routers know both, and go on with the other.
func TestRoutersMoveBetweenServers(t *testing.T) {
	testclass.Process(t)
	engines := fleet.New(t, *seed)
	args := []string{"--journal", natstest.Start(t), "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "64KiB"}
	for i := range engineCount {
		args = append(args, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	writer := fleet.NewServer(t, args...)
	replica := fleet.NewServer(t, append(args[:len(args):len(args)], "--cluster-ingest=false")...)
	members := []*fleet.Server{writer, replica}
	for _, m := range members {
		m.Start(t)
	}
	routers := []*fleet.Router{
		follow(t, writer.Proxy.Addr()+","+replica.Proxy.Addr()),
		follow(t, replica.Proxy.Addr()+","+writer.Proxy.Addr()),
		follow(t, replica.Proxy.Addr()),
	}
	rng := rand.New(rand.NewPCG(*seed, 2))
	for range *kills {
		awaitEntries(t, rng, routers...)
		m := members[rng.IntN(2)]
		if err := m.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Duration(rng.Int64N(int64(maxStart / 2))))
		m.Start(t)
	}
	engines.WantViews(routers...)

	conn := harness.Dial(t, fleet.Address(t, replica.Process))
	_, err := kvcastv1.NewWorkerServiceClient(conn).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
		Name: "w", Model: fleet.Model, Sources: []*kvcastv1.SourceSpec{{Connect: "tcp://127.0.0.1:1"}},
	}})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "reads no engines") {
		t.Errorf("register at the replica: got %v", err)
	}
	for _, m := range members {
		if lines := m.Process.LogFaults(); len(lines) > 0 {
			t.Errorf("a server logged: %q", lines)
		}
		if err := m.Process.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestReplicatedJournalSurvivesItsServers stops, at random entries, one of three NATS servers, or the server that writes to
// them, which is killed.
func TestReplicatedJournalSurvivesItsServers(t *testing.T) {
	testclass.Process(t)
	engines := fleet.New(t, *seed)
	nats := natstest.StartCluster(t)
	args := []string{
		"--journal", nats.URLs(), "--journal-replicas", "3", "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "64KiB",
	}
	for i := range engineCount {
		args = append(args, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	writer := fleet.NewServer(t, args...)
	replica := fleet.NewServer(t, append(args[:len(args):len(args)], "--cluster-ingest=false")...)
	writer.Start(t)
	replica.Start(t)
	routers := []*fleet.Router{follow(t, writer.Proxy.Addr()), follow(t, replica.Proxy.Addr())}
	rng := rand.New(rand.NewPCG(*seed, 3))
	await := func() {
		t.Helper()
		next := routers[0].Seq() + 1 + rng.Uint64N(maxEntries)
		for i, r := range routers {
			if err := errors.Join(r.Await(t.Context(), next), r.KeepUp(t.Context())); err != nil {
				t.Fatalf("router %d: %v", i, err)
			}
		}
	}
	for range *kills {
		await()
		if rng.IntN(3) == 0 {
			if err := writer.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			writer.Start(t)
			continue
		}
		down := rng.IntN(3)
		nats.Stop(down)
		await() // with two of three servers
		nats.Start(down)
		nats.AwaitReplicas("kvcast", "OBJ_kvcast-checkpoints", "KV_kvcast-workers")
	}
	engines.WantViews(routers...)
	for _, m := range []*fleet.Server{writer, replica} {
		if err := m.Process.Stop(); err != nil {
			t.Error(err)
		}
	}
}

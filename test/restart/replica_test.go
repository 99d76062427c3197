package restart_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// member is a server of several with one journal, over all its lives.
type member struct {
	args    []string
	proxy   *harness.Proxy
	process *harness.Process
}

func (m *member) start(t *testing.T) {
	t.Helper()
	m.process = start(t, m.args...)
	m.proxy.Retarget(address(t, m.process))
}

// TestRoutersMoveBetweenServers kills, at random entries, the server that reads the engines or the one that follows it.
// Routers know both, and go on with the other.
func TestRoutersMoveBetweenServers(t *testing.T) {
	fleet := newFleet(t)
	args := []string{"--journal", harness.StartNATS(t), "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "64KiB"}
	for i := range engines {
		args = append(args, "--worker", fleet.add(fmt.Sprintf("engine-%d", i), 1, bound()).flag())
	}
	writer := &member{args: args, proxy: harness.NewProxy(t, "")}
	replica := &member{args: append(args[:len(args):len(args)], "--cluster-ingest=false"), proxy: harness.NewProxy(t, "")}
	members := []*member{writer, replica}
	for _, m := range members {
		m.start(t)
	}
	routers := []*router{
		follow(t, writer.proxy.Addr()+","+replica.proxy.Addr()),
		follow(t, replica.proxy.Addr()+","+writer.proxy.Addr()),
		follow(t, replica.proxy.Addr()),
	}
	rng := rand.New(rand.NewPCG(*seed, 2))
	for range *kills {
		if err := routers[0].await(t.Context(), routers[0].seq()+1+rng.Uint64N(maxEntries)); err != nil {
			t.Fatal(err)
		}
		m := members[rng.IntN(2)]
		if err := m.process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Duration(rng.Int64N(int64(maxStart / 2))))
		m.start(t)
	}
	fleet.wantViews(routers...)

	conn := harness.Dial(t, address(t, replica.process))
	_, err := kvcastv1.NewWorkerServiceClient(conn).RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
		Name: "w", Model: model, Sources: []*kvcastv1.SourceSpec{{Connect: "tcp://127.0.0.1:1"}},
	}})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "reads no engines") {
		t.Errorf("register at the replica: got %v", err)
	}
	for _, m := range members {
		if lines := m.process.LogFaults(); len(lines) > 0 {
			t.Errorf("a server logged: %q", lines)
		}
		if err := m.process.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestReplicatedJournalSurvivesItsServers stops, at random entries, one of three NATS servers, or the server that writes to
// them, which is killed.
func TestReplicatedJournalSurvivesItsServers(t *testing.T) {
	fleet := newFleet(t)
	nats := harness.StartNATSCluster(t)
	args := []string{
		"--journal", nats.URLs(), "--journal-replicas", "3", "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "64KiB",
	}
	for i := range engines {
		args = append(args, "--worker", fleet.add(fmt.Sprintf("engine-%d", i), 1, bound()).flag())
	}
	writer := &member{args: args, proxy: harness.NewProxy(t, "")}
	replica := &member{args: append(args[:len(args):len(args)], "--cluster-ingest=false"), proxy: harness.NewProxy(t, "")}
	nats.AwaitLeader()
	writer.start(t)
	replica.start(t)
	routers := []*router{follow(t, writer.proxy.Addr()), follow(t, replica.proxy.Addr())}
	rng := rand.New(rand.NewPCG(*seed, 3))
	await := func() {
		t.Helper()
		next := routers[0].seq() + 1 + rng.Uint64N(maxEntries)
		for i, r := range routers {
			if err := r.await(t.Context(), next); err != nil {
				t.Fatalf("router %d: %v\n%s\n%s", i, err, strings.Join(writer.process.Log(), "\n"), strings.Join(replica.process.Log(), "\n"))
			}
		}
	}
	for range *kills {
		await()
		if rng.IntN(3) == 0 {
			if err := writer.process.Kill(); err != nil {
				t.Fatal(err)
			}
			writer.start(t)
			continue
		}
		down := rng.IntN(3)
		nats.Stop(down)
		await() // with two of three servers
		nats.Start(down)
		nats.AwaitReplicas("kvcast", "OBJ_kvcast-checkpoints", "KV_kvcast-workers")
	}
	fleet.wantViews(routers...)
	for _, m := range []*member{writer, replica} {
		if err := m.process.Stop(); err != nil {
			t.Error(err)
		}
	}
}

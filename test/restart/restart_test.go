package restart_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/faultfs"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

var (
	kills    = flag.Int("kills", testclass.Size(6, 200), "number of times that the server is killed")
	lossless = flag.Bool("lossless", false, "fail if a server reports a gap: every batch can be replayed, unless the machine is too busy")
	seed     = flag.Uint64("seed", 1, "seed of the engines, their faults, and the points at which the server is killed")
)

func TestMain(m *testing.M) { os.Exit(faultfs.RunTests(m)) }

const (
	engineCount = 4
	// maxEntries is the maximum number of entries that a router receives between two kills.
	maxEntries = 300
	// maxStart is the maximum time after which a server is killed that has not served yet.
	maxStart = time.Second
)

// TestNothingIsLostWhenTheServerIsKilled compares a server that is killed at random entries with one that is not.
func TestNothingIsLostWhenTheServerIsKilled(t *testing.T) {
	testclass.Process(t)
	engines := fleet.New(t, *seed)
	var flags []string
	for i := range engineCount {
		flags = append(flags, "--worker", engines.Add(fmt.Sprintf("engine-%d", i), 2, fleet.Bound()).Flag())
	}
	reference := fleet.Start(t, flags...)
	follower := follow(t, fleet.Address(t, reference))
	s := newServer(t, flags...)
	s.router.Tell(engines.Truth)
	engines.Ask(s.Proxy.Addr())
	s.kill(*kills)
	engines.WantViews(s.router, follower)
	// Copies that were lost would show when the engines evict everything.
	if err := s.router.Await(t.Context(), s.router.Seq()+20*engineCount); err != nil {
		t.Fatal(err)
	}
	engines.WantViews(s.router, follower)
	t.Logf("answers: %v", engines.Truth.Counts())
	for _, p := range []*harness.Process{s.Process, reference} {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestWorkersThatAreNotConfiguredSurvive kills a server with an engine that connects to it, and one that is registered.
func TestWorkersThatAreNotConfiguredSurvive(t *testing.T) {
	testclass.Process(t)
	listener, replay := harness.FreePort(t), harness.FreePort(t)
	engines := fleet.New(t, *seed)
	registered := engines.Add("registered", 1, fleet.Bound())
	engines.Add("127.0.0.1", 1, simulator.SocketConfig{
		Mode: simulator.ModeConnect, Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", listener), Topic: "kv@127.0.0.1@" + fleet.Model,
		Replay: fmt.Sprintf("tcp://127.0.0.1:%d", replay),
	})
	s := newServer(t, "--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=%d", listener, replay))
	conn := harness.Dial(t, fleet.Address(t, s.Process))
	workers := kvcastv1.NewWorkerServiceClient(conn)
	nowhere := fmt.Sprintf("tcp://127.0.0.1:%d", harness.FreePort(t))
	for name, source := range map[string]*kvcastv1.SourceSpec{
		"deregistered": {Connect: nowhere},
		"registered":   {Connect: registered.Endpoint(), Replay: registered.ReplayEndpoint()},
	} {
		if _, err := workers.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name: name, Model: fleet.Model, Sources: []*kvcastv1.SourceSpec{source},
		}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := workers.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "deregistered"}); err != nil {
		t.Fatal(err)
	}
	s.kill(*kills)
	engines.WantViews(s.router)
	if err := s.Process.Stop(); err != nil {
		t.Error(err)
	}
}

// server is a server with a durable journal, over all its lives, and a router that follows it.
type server struct {
	*fleet.Server
	t       *testing.T
	rng     *rand.Rand
	router  *fleet.Router
	disturb func() // called at random entries between two kills, if it is set
}

// newServer starts a server with a new journal directory. The test stops it.
func newServer(t *testing.T, flags ...string) *server {
	t.Helper()
	t.Logf("%d kills, seed %d", *kills, *seed)
	s := newServerIn(t, t.TempDir(), "16MiB", flags...)
	s.Start(t)
	return s
}

// newServerIn returns a server that is not started, which keeps its journal in a directory, and entries of a size to
// resume from.
func newServerIn(t *testing.T, dir, maxBytes string, flags ...string) *server {
	t.Helper()
	args := append([]string{"--journal", "file:" + dir, "--journal-max-bytes", maxBytes, "--journal-checkpoint-bytes", "64KiB"}, flags...)
	s := &server{Server: fleet.NewServer(t, args...), t: t, rng: rand.New(rand.NewPCG(*seed, 1))}
	s.router = follow(t, s.Proxy.Addr())
	return s
}

// kill kills the server at random entries, and starts it again.
func (s *server) kill(times int) {
	s.t.Helper()
	for range times {
		s.await()
		if s.disturb != nil {
			s.disturb()
			s.await()
		}
		s.end()
		for s.Launch(s.t); s.rng.IntN(4) == 0; s.Launch(s.t) {
			// It is killed while it starts too.
			<-time.After(time.Duration(s.rng.Int64N(int64(maxStart))))
			s.end()
		}
		s.Serve(s.t)
		if lines := s.Process.LogFaults(); len(lines) > 0 {
			s.t.Fatalf("the server logged: %q", lines)
		}
	}
}

// await waits for a random number of entries.
func (s *server) await() {
	s.t.Helper()
	awaitEntries(s.t, s.rng, s.router)
}

// awaitEntries waits until the first of some routers has received a random number of entries, and all keep up.
func awaitEntries(t *testing.T, rng *rand.Rand, routers ...*fleet.Router) {
	t.Helper()
	if err := routers[0].Await(t.Context(), routers[0].Seq()+1+rng.Uint64N(maxEntries)); err != nil {
		t.Fatal(err)
	}
	for i, r := range routers {
		if err := r.KeepUp(t.Context()); err != nil {
			t.Fatalf("router %d: %v", i, err)
		}
	}
}

func (s *server) end() {
	s.t.Helper()
	if err := s.Process.Kill(); err != nil {
		s.t.Fatal(err)
	}
}

// follow follows a server, or one of several.
func follow(t *testing.T, addr string) *fleet.Router {
	t.Helper()
	return fleet.Follow(t, addr, fleet.RouterConfig{Lossless: *lossless})
}

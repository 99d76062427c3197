package restart_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

var (
	kills    = flag.Int("kills", 6, "number of times that the server is killed")
	lossless = flag.Bool("lossless", false, "fail if a server reports a gap: every batch can be replayed, unless the machine is too busy")
	seed     = flag.Uint64("seed", 1, "seed of the engines, their faults, and the points at which the server is killed")
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

const (
	engines = 4
	// batchRate is the rate of each engine, in batches a second.
	batchRate = 60
	// maxEntries is the maximum number of entries that a router receives between two kills.
	maxEntries = 300
	// maxStart is the maximum time after which a server is killed that has not served yet.
	maxStart = time.Second
	model    = "m"
)

// TestNothingIsLostWhenTheServerIsKilled compares a server that is killed at random entries with one that is not.
func TestNothingIsLostWhenTheServerIsKilled(t *testing.T) {
	fleet := newFleet(t)
	var flags []string
	for i := range engines {
		flags = append(flags, "--worker", fleet.add(fmt.Sprintf("engine-%d", i), 2, bound()).flag())
	}
	reference := start(t, flags...)
	follower := follow(t, address(t, reference))
	s := newServer(t, flags...)
	s.kill(*kills)
	fleet.wantViews(s.router, follower)
	// Copies that were lost would show when the engines evict everything.
	if err := s.router.await(t.Context(), s.router.seq()+20*engines); err != nil {
		t.Fatal(err)
	}
	fleet.wantViews(s.router, follower)
	for _, p := range []*harness.Process{s.process, reference} {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestWorkersThatAreNotConfiguredSurvive kills a server with an engine that connects to it, and one that is registered.
func TestWorkersThatAreNotConfiguredSurvive(t *testing.T) {
	listener, replay := freePort(t), freePort(t)
	fleet := newFleet(t)
	registered := fleet.add("registered", 1, bound())
	fleet.add("127.0.0.1", 1, simulator.SocketConfig{
		Mode: simulator.ModeConnect, Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", listener), Topic: "kv@127.0.0.1@" + model,
		Replay: fmt.Sprintf("tcp://127.0.0.1:%d", replay),
	})
	s := newServer(t, "--bind", fmt.Sprintf("tcp://127.0.0.1:%d,replay_port=%d", listener, replay))
	conn := harness.Dial(t, address(t, s.process))
	workers := kvcastv1.NewWorkerServiceClient(conn)
	for _, name := range []string{"deregistered", "registered"} {
		if _, err := workers.RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: &kvcastv1.WorkerSpec{
			Name: name, Model: model,
			Sources: []*kvcastv1.SourceSpec{{Connect: registered.Endpoint(), Replay: registered.ReplayEndpoint()}},
		}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := workers.DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "deregistered"}); err != nil {
		t.Fatal(err)
	}
	s.kill(*kills)
	fleet.wantViews(s.router)
	if err := s.process.Stop(); err != nil {
		t.Error(err)
	}
}

// server is a server with a durable journal, over all its lives, and a router that follows it.
type server struct {
	t       *testing.T
	rng     *rand.Rand
	args    []string
	proxy   *harness.Proxy
	process *harness.Process
	router  *router
}

// newServer starts a server with a new journal directory. The test stops it.
func newServer(t *testing.T, flags ...string) *server {
	t.Helper()
	t.Logf("%d kills, seed %d", *kills, *seed)
	s := newServerIn(t, t.TempDir(), "16MiB", flags...)
	s.process = start(t, s.args...)
	s.proxy.Retarget(address(t, s.process))
	return s
}

// newServerIn returns a server that is not started, which keeps its journal in a directory, and entries of a size to
// resume from.
func newServerIn(t *testing.T, dir, maxBytes string, flags ...string) *server {
	t.Helper()
	s := &server{
		t: t, rng: rand.New(rand.NewPCG(*seed, 1)), proxy: harness.NewProxy(t, ""),
		args: append([]string{"--journal", "file:" + dir, "--journal-max-bytes", maxBytes, "--journal-checkpoint-bytes", "64KiB"}, flags...),
	}
	s.router = follow(t, s.proxy.Addr())
	return s
}

// kill kills the server at random entries, and starts it again.
func (s *server) kill(times int) {
	s.t.Helper()
	for range times {
		if err := s.router.await(s.t.Context(), s.router.seq()+1+s.rng.Uint64N(maxEntries)); err != nil {
			s.t.Fatal(err)
		}
		s.end()
		for s.process = start(s.t, s.args...); s.rng.IntN(4) == 0; s.process = start(s.t, s.args...) {
			// It is killed while it starts too.
			<-time.After(time.Duration(s.rng.Int64N(int64(maxStart))))
			s.end()
		}
		s.proxy.Retarget(address(s.t, s.process))
		if lines := s.process.LogFaults(); len(lines) > 0 {
			s.t.Fatalf("the server logged: %q", lines)
		}
	}
}

func (s *server) end() {
	s.t.Helper()
	if err := s.process.Kill(); err != nil {
		s.t.Fatal(err)
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// start starts kvcast serve. The test stops it.
func start(t *testing.T, args ...string) *harness.Process {
	t.Helper()
	p, err := harness.StartProcess(harness.ProcessConfig{Race: harness.RaceEnabled(), Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// address waits until a server serves, and returns its address.
func address(t *testing.T, p *harness.Process) string {
	t.Helper()
	addr, err := p.Addr()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// fleet is engines that lose messages in transit and restart, and whose replay has every batch.
type fleet struct {
	t       *testing.T
	rate    float64 // of each engine, in batches a second
	pool    int     // of each engine, in blocks
	prompts int     // the least length of a prompt, in blocks; 0: the simulator's default
	faults  map[simulator.Fault]float64
	engines []engine
}

// engine is the only engine of a worker.
type engine struct {
	*simulator.Engine
	worker string
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	return &fleet{t: t, rate: batchRate, pool: 512, faults: map[simulator.Fault]float64{
		simulator.FaultDrop: 0.01, simulator.FaultDuplicate: 0.01, simulator.FaultDelay: 0.01, simulator.FaultTruncate: 0.005,
		simulator.FaultRestartInPlace: 0.0005,
	}}
}

// bound returns sockets that servers connect to.
func bound() simulator.SocketConfig {
	return simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"}
}

// add starts an engine for a number of servers. It ends with the test.
func (f *fleet) add(worker string, servers int, sockets simulator.SocketConfig) engine {
	f.t.Helper()
	i := len(f.engines)
	e, err := simulator.New(simulator.Config{
		SocketConfig: sockets,
		Pool:         blockpool.Config{Capacity: f.pool, HashSeed: *seed + uint64(i)},
		Workload:     workload.Config{ResetEvery: 700 + 100*i, MinPrompt: f.prompts, MaxPrompt: 3 * f.prompts},
		Seed:         *seed + uint64(i), Rate: f.rate, Subscribers: servers,
		Faults: simulator.Faults{Seed: *seed + uint64(i), Rates: f.faults},
	})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.t.Errorf("%s: %v", worker, err)
		}
	})
	f.engines = append(f.engines, engine{e, worker})
	return f.engines[i]
}

// flag returns the value of --worker for a server that connects to the engine.
func (e engine) flag() string {
	return fmt.Sprintf("name=%s,model=%s,connect=%s,replay=%s", e.worker, model, e.Endpoint(), e.ReplayEndpoint())
}

// wantViews pauses the engines, and waits until the views of routers equal their contents.
func (f *fleet) wantViews(routers ...*router) {
	f.t.Helper()
	states := f.pause()
	for i, r := range routers {
		if err := r.converge(f.t.Context(), states); err != nil {
			f.t.Errorf("the view of router %d: %v", i, err)
		}
	}
	f.resume()
}

// publish makes each engine publish some batches, and returns what they hold then. They are paused before and after it.
func (f *fleet) publish(batches uint64) map[string]client.BlocksDigest {
	f.t.Helper()
	var targets []uint64
	for _, e := range f.engines {
		targets = append(targets, e.Summary().Batches+batches)
	}
	f.resume()
	for i, e := range f.engines {
		harness.WaitFor(f.t, func() bool { return e.Summary().Batches >= targets[i] })
	}
	return f.pause()
}

// pause pauses the engines, and returns what they hold.
func (f *fleet) pause() map[string]client.BlocksDigest {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), harness.Timeout)
	defer cancel()
	states := make(map[string]client.BlocksDigest)
	for _, e := range f.engines {
		s, err := e.Pause(ctx)
		if err != nil {
			f.t.Fatal(err)
		}
		states[e.worker] = client.BlocksDigest{Blocks: uint64(len(s.Blocks)), XOR: s.Digest}
	}
	return states
}

func (f *fleet) resume() {
	for _, e := range f.engines {
		e.Resume()
	}
}

// router follows a server over all its lives.
type router struct {
	mu      sync.Mutex // guards all below
	at      client.Position
	eventID map[string]uint64 // of the last event, by worker
	view    *client.View
	err     error         // the first violation
	changed chan struct{} // closed by the next update
}

// follow follows the entries from the first on.
func follow(t *testing.T, addr string) *router {
	t.Helper()
	r := &router{view: client.NewView(), eventID: make(map[string]uint64), changed: make(chan struct{})}
	c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		cfg := client.Config{Start: client.FromEarliest(), GapPolicy: client.GapFail, BackoffMin: 10 * time.Millisecond, BackoffMax: 100 * time.Millisecond, Digests: true}
		for u, err := range c.Subscribe(ctx, cfg) {
			if err == nil {
				err = r.receive(u)
			}
			if err != nil && ctx.Err() == nil {
				r.fail(err)
				return
			}
		}
	}()
	return r
}

// receive checks and applies an update.
func (r *router) receive(u client.Update) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.Message.GetSnapshotBegin() != nil {
		return errors.New("got a snapshot, want to resume")
	}
	if u.Message.GetAccepted() != nil && r.at.Epoch == "" {
		r.at = u.Position // the journal begins after it
	}
	for _, e := range u.Message.GetEntries() {
		if e.GetSeq() != r.at.Seq+1 {
			return fmt.Errorf("got entry %d after entry %d", e.GetSeq(), r.at.Seq)
		}
		r.at.Seq = e.GetSeq()
		for _, ev := range e.GetEvents() {
			if last := r.eventID[e.GetWorker()]; ev.GetEventId() != last+1 {
				return fmt.Errorf("entry %d: got event id %d of %s after %d", e.GetSeq(), ev.GetEventId(), e.GetWorker(), last)
			}
			r.eventID[e.GetWorker()]++
			if g := ev.GetGap(); g != nil && *lossless {
				return fmt.Errorf("entry %d: %s lost batches that its engine has: %v", e.GetSeq(), e.GetWorker(), g)
			}
		}
	}
	if epoch := u.Position.Epoch; epoch != "" {
		if r.at.Epoch != "" && epoch != r.at.Epoch {
			return fmt.Errorf("got epoch %s after %s", epoch, r.at.Epoch)
		}
		r.at.Epoch = epoch
	}
	r.view.Apply(u)
	close(r.changed)
	r.changed = make(chan struct{})
	return nil
}

func (r *router) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
	close(r.changed)
	r.changed = make(chan struct{})
}

// seq returns the seq of the last entry.
func (r *router) seq() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at.Seq
}

// epoch returns the epoch of the last entry.
func (r *router) epoch() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.at.Epoch
}

// until waits until a condition returns no error.
func (r *router) until(ctx context.Context, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, harness.Timeout)
	defer cancel()
	for {
		r.mu.Lock()
		failed, unmet, changed := r.err, condition(), r.changed
		r.mu.Unlock()
		switch {
		case failed != nil:
			return failed
		case unmet == nil:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return unmet
		}
	}
}

// await waits for an entry.
func (r *router) await(ctx context.Context, seq uint64) error {
	return r.until(ctx, func() error {
		if r.at.Seq < seq {
			return fmt.Errorf("entry %d has not arrived: the last is %d", seq, r.at.Seq)
		}
		return nil
	})
}

// converge waits until the view equals the engines, except where a gap was reported.
func (r *router) converge(ctx context.Context, engines map[string]client.BlocksDigest) error {
	return r.until(ctx, func() error {
		workers := r.view.Workers()
		if len(workers) != len(engines) {
			return fmt.Errorf("there are %d workers, want %d", len(workers), len(engines))
		}
		for _, w := range workers {
			if len(w.Ranks) != 1 {
				return fmt.Errorf("%s has ranks %+v, want one", w.Name, w.Ranks)
			}
			if w.Ranks[0].Gaps > 0 && !*lossless {
				continue
			}
			if got, want := w.Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE], engines[w.Name]; got != want {
				return fmt.Errorf("%s: the view has %+v, the engine %+v", w.Name, got, want)
			}
		}
		return nil
	})
}

package restart_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
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

// TestNothingIsLostWhenTheServerIsKilled kills the server at random entries.
func TestNothingIsLostWhenTheServerIsKilled(t *testing.T) {
	t.Logf("%d kills, seed %d", *kills, *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	fleet := startEngines(t)
	reference := start(t, fleet.flags...)
	follower := follow(t, address(t, reference))

	durable := append([]string{"--journal", "file:" + t.TempDir(), "--journal-max-bytes", "16MiB", "--journal-checkpoint-bytes", "256KiB"}, fleet.flags...)
	proxy := harness.NewProxy(t, "")
	resumed := follow(t, proxy.Addr())
	killed := start(t, durable...)
	proxy.Retarget(address(t, killed))
	for range *kills {
		if err := resumed.await(t.Context(), resumed.seq()+1+rng.Uint64N(maxEntries)); err != nil {
			t.Fatal(err)
		}
		if err := killed.Kill(); err != nil {
			t.Fatal(err)
		}
		for killed = start(t, durable...); rng.IntN(4) == 0; killed = start(t, durable...) {
			// It is killed while it starts too.
			<-time.After(time.Duration(rng.Int64N(int64(maxStart))))
			if err := killed.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		proxy.Retarget(address(t, killed))
		if lines := killed.LogFaults(); len(lines) > 0 {
			t.Fatalf("the server logged: %q", lines)
		}
	}
	states := fleet.pause(t)
	for name, r := range map[string]*router{"killed": resumed, "reference": follower} {
		if err := r.converge(t.Context(), states); err != nil {
			t.Errorf("the view of the %s server: %v", name, err)
		}
	}
	// Copies and names that were lost would show when the engines evict everything.
	fleet.resume()
	if err := resumed.await(t.Context(), resumed.seq()+20*engines); err != nil {
		t.Fatal(err)
	}
	states = fleet.pause(t)
	if err := errors.Join(resumed.converge(t.Context(), states), follower.converge(t.Context(), states)); err != nil {
		t.Error(err)
	}
	for _, p := range []*harness.Process{killed, reference} {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}
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

// fleet is the engines, and the flags of a server that reads them.
type fleet struct {
	engines []*simulator.Engine
	flags   []string
}

func workerName(i int) string { return fmt.Sprintf("engine-%d", i) }

// startEngines starts engines that lose messages in transit and restart, and whose replay has every batch.
func startEngines(t *testing.T) *fleet {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	t.Cleanup(func() { cancel(); group.Wait() })
	f := &fleet{}
	for i := range engines {
		e, err := simulator.New(simulator.Config{
			SocketConfig: simulator.SocketConfig{Mode: simulator.ModeBind, Endpoint: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
			Pool:         blockpool.Config{Capacity: 512, HashSeed: *seed + uint64(i)},
			Workload:     workload.Config{ResetEvery: 700 + 100*i},
			Seed:         *seed + uint64(i), Rate: batchRate, Subscribers: 2,
			Faults: simulator.Faults{Seed: *seed + uint64(i), Rates: map[simulator.Fault]float64{
				simulator.FaultDrop: 0.01, simulator.FaultDuplicate: 0.01, simulator.FaultDelay: 0.01, simulator.FaultTruncate: 0.005,
				simulator.FaultRestartInPlace: 0.0005,
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		group.Go(func() {
			if err := e.Run(ctx); err != nil {
				t.Errorf("%s: %v", workerName(i), err)
			}
		})
		f.engines = append(f.engines, e)
		f.flags = append(f.flags, "--worker", fmt.Sprintf("name=%s,model=%s,connect=%s,replay=%s", workerName(i), model, e.Endpoint(), e.ReplayEndpoint()))
	}
	return f
}

// pause pauses the engines, and returns the digests of their contents by worker.
func (f *fleet) pause(t *testing.T) map[string]client.BlocksDigest {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Timeout)
	defer cancel()
	states := make(map[string]client.BlocksDigest)
	for i, e := range f.engines {
		s, err := e.Pause(ctx)
		if err != nil {
			t.Fatal(err)
		}
		states[workerName(i)] = client.BlocksDigest{Blocks: uint64(len(s.Blocks)), XOR: s.Digest}
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

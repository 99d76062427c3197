package ingest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
)

func release(t *testing.T, in *ingest.Ingest, worker string) {
	t.Helper()
	if err := in.Release(harness.Context(t), worker); err != nil {
		t.Errorf("release %s: %v", worker, err)
	}
}

// wantForgotten checks that nothing is left of a worker, the only one.
func wantForgotten(t *testing.T, in *ingest.Ingest, registry *prometheus.Registry, worker string) {
	t.Helper()
	wantNoMetricsOf(t, registry, worker)
	for _, resource := range []string{"sources", "worker_bytes", "ranks"} {
		if n := budgetOf(t, registry, resource); n != 0 {
			t.Errorf("%v of %s in use", n, resource)
		}
	}
	if len(in.Sources()) != 0 || in.Connected(worker) {
		t.Errorf("sources: got %+v, want none", in.Sources())
	}
	if err := in.Release(harness.Context(t), worker); !errors.Is(err, config.ErrNoWorker) {
		t.Errorf("release again: got %v, want ErrNoWorker", err)
	}
}

func TestReleasedWorkerIsAddedAgain(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	registry := prometheus.NewRegistry()
	c := config.Config{Metrics: registry, MaxWorkers: 1, Grace: -1}
	w := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")}).Workers[0]
	r := newRecorder(t)
	in, _ := start(t, c, r)
	for range 2 {
		if err := in.AddWorker(harness.Context(t), w); err != nil {
			t.Fatal(err)
		}
		e.awaitSubscriber("")
		e.publish(0, stored(1))
		r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[1]")
		if !in.Connected("w") {
			t.Error("the worker is not connected")
		}
		release(t, in, "w")
		wantForgotten(t, in, registry, "w")
		r.wantNone()
	}
}

func TestReleasedPodEntersAgain(t *testing.T) {
	t.Parallel()
	for name, lc := range map[string]config.Listener{"pod": {}, "one worker for all": {Worker: "w"}} {
		t.Run(name, func(t *testing.T) {
			registry := prometheus.NewRegistry()
			lc.Bind = "tcp://127.0.0.1:*"
			r := newRecorder(t)
			in, _ := start(t, config.Config{Metrics: registry, Listeners: []config.Listener{lc}, Grace: time.Millisecond, MaxWorkers: 1}, r)
			const added = "add w model m block_size 0 ranks []"
			e := newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			e.send("kv@w@m", seqFrame(0), payload(0, stored(1)))
			r.want(added, "w 0/0: batch 0 +[1]")
			release(t, in, "w")
			wantForgotten(t, in, registry, "w")
			e.send("kv@w@m", seqFrame(1), payload(1, stored(2))) // on the same connection
			r.want(added, "w 0/0: joined late, after 0-0", "w 0/0: batch 1 +[2]")
			release(t, in, "w")
			e.Close()
			e = newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			e.send("kv@w@m", seqFrame(0), payload(0, stored(1)))
			r.want(added, "w 0/0: batch 0 +[1]")
			release(t, in, "w")
			r.wantNone()
		})
	}
}

// A worker that is released at any batch, and continues later, gets what it would have got without the interruption.
func TestReleasedWorkersContinueWhereTheyEnded(t *testing.T) {
	t.Parallel()
	forEachDeployment(t, true, func(t *testing.T, zmq config.ZMQ, d *deployment, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 3))
		sink, claims := newDurableSink(), make(chan *feed.Recovered, 1)
		isBound, isRestored := len(d.config.Listeners) > 0, random.IntN(2) == 0
		d.config.Claim = func(ctx context.Context, worker string) (*feed.Recovered, error) {
			if worker != d.worker {
				t.Errorf("claimed: %s", worker)
			}
			select {
			case r := <-claims:
				return r, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		claims <- nil
		if isBound && isRestored {
			d.config.Claim = nil
		}
		d.publish(random, random.IntN(10))
		in, stop := d.run(t, zmq, sink, nil)
		kept := 0
		for range 3 {
			wanted := 1 + random.IntN(20)
			d.publish(random, wanted)
			sink.await(t, "a call", func() bool { return sink.workers[d.worker] != nil && len(sink.workers[d.worker].calls) >= kept+wanted })
			if random.IntN(2) == 0 {
				sink.store(t, in, d.worker)
			}
			if isBound && isRestored {
				d.awaitLast(t, sink) // a message that comes before Restore would begin anew
			} else {
				d.publish(random, random.IntN(20))
			}
			release(t, in, d.worker)
			recovered := sink.recovered(func(n int) int { kept = 1 + random.IntN(n); return kept })[0]
			d.publish(random, random.IntN(10)*map[bool]int{true: 0, false: 1}[isBound && isRestored])
			switch {
			case isBound && isRestored:
				in.Restore(recovered)
			case isBound:
				claims <- &recovered
			default:
				in.Restore(recovered)
				if err := in.AddWorker(harness.Context(t), d.config.Workers[0]); err != nil {
					t.Fatal(err)
				}
			}
		}
		d.publish(random, random.IntN(20))
		d.awaitLast(t, sink)
		stop()
		for _, p := range d.publishers() {
			if diff := cmp.Diff(texts(d.uninterrupted(t, p)), texts(sink.of(d.worker, p))); diff != "" {
				t.Errorf("calls for %+v (-uninterrupted +released):\n%s", p, diff)
			}
		}
		checkRawIDs(t, sink.workers[d.worker])
		sink.wantRemoved(t)
	})
}

// claimer lets a test answer the calls of Config.Claim: with answers, or with late once the context has ended.
type claimer struct {
	calls         chan string
	answers, late chan error
}

func newClaimer() *claimer {
	return &claimer{make(chan string, 10), make(chan error), make(chan error, 1)}
}

func (c *claimer) claim(ctx context.Context, worker string) (*feed.Recovered, error) {
	c.calls <- worker
	select {
	case err := <-c.answers:
		return nil, err
	case <-ctx.Done():
		c.calls <- worker + " ended"
		return nil, <-c.late
	}
}

func (c *claimer) want(t *testing.T, call string) {
	t.Helper()
	select {
	case got := <-c.calls:
		if got != call {
			t.Fatalf("claim: got %s, want %s", got, call)
		}
	case <-time.After(harness.Timeout):
		t.Fatalf("no claim: want %s", call)
	}
}

// While a claim blocks, other workers can be checkpointed and released, and the worker itself can be released.
func TestClaimThatBlocks(t *testing.T) {
	t.Parallel()
	registry, claims := prometheus.NewRegistry(), newClaimer()
	r := newRecorder(t)
	in, stop := start(t, config.Config{
		Metrics: registry, Durable: true, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}}, Claim: claims.claim,
	}, r)
	e := newEngine(t)
	e.connect(in.Endpoints()[0])
	e.awaitSubscriber("")
	e.send("kv@p@m", seqFrame(0), payload(0))
	claims.want(t, "p")
	claims.answers <- nil
	r.want("add p model m block_size 0 ranks []", "p 0/0: batch 0")
	e.send("kv@q@m", seqFrame(0), payload(0))
	claims.want(t, "q")
	if n := len(in.Sources()); n != 1 {
		t.Errorf("%d sources, want 1", n)
	}
	metricsOf(t, registry, "p")
	if !in.Checkpoint("p", func([]byte) {}) {
		t.Error("no checkpoint of p")
	}
	release(t, in, "p")
	release(t, in, "q")
	claims.want(t, "q ended")
	wantForgotten(t, in, registry, "q")
	// Before the claim returns, another worker gets the name.
	other := config.Worker{Name: "q", Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}}}
	if err := in.AddWorker(harness.Context(t), other); err != nil {
		t.Fatal(err)
	}
	r.want("add q model  block_size 0 ranks [0]")
	claims.late <- nil
	e.send("kv@s@m", seqFrame(0), payload(0))
	claims.want(t, "s")
	if err := in.AddWorker(harness.Context(t), other); !errors.Is(err, config.ErrWorkerExists) {
		t.Errorf("add q again: got %v, want ErrWorkerExists", err)
	}
	claims.late <- nil
	stop()
	claims.want(t, "s ended")
	r.wantNone()
}

// A worker that may not enter the stream is forgotten, and may enter with its next message.
func TestClaimThatIsRefused(t *testing.T) {
	t.Parallel()
	r, claims := newRecorder(t), newClaimer()
	in, _ := start(t, config.Config{
		Grace: -1, Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}}, Claim: claims.claim,
	}, r)
	for range 2 {
		e := newEngine(t)
		e.connect(in.Endpoints()[0])
		e.awaitSubscriber("")
		e.send("kv@p@m", seqFrame(0), payload(0))
		claims.want(t, "p")
		claims.answers <- errors.New("refused")
		e.send("kv@p@m", seqFrame(1), payload(1))
		claims.want(t, "p")
		if n := len(in.Sources()); n != 0 {
			t.Errorf("%d sources, want none", n)
		}
		claims.answers <- nil
		e.send("kv@p@m", seqFrame(2), payload(2)) // no further claim
		r.want("add p model m block_size 0 ranks []", "p 0/0: joined late, after 0-0", "p 0/0: batch 1", "p 0/0: batch 2")
		e.Close()
		r.want("remove p")
		harness.WaitFor(t, func() bool { return len(in.Sources()) == 0 })
	}
	r.wantNone()
}

package ingest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// durableSink is a Sink that stores the calls of each worker's lane with their state, as a durable journal does. It
// outlives an Ingest.
type durableSink struct {
	mu      sync.Mutex // guards the fields below
	changed chan struct{}
	workers map[string]*durableLane
	// removed are the workers that were removed.
	removed []string
	// kept is how many calls for each publisher recovered has left.
	kept map[feed.Publisher]int
}

// durableLane has the stored calls of a worker's lane.
type durableLane struct {
	sink  *durableSink
	desc  feed.Worker
	added int // number of calls of AddWorker
	calls []storedCall
	// checkpoint is the state after the first checkpointed calls; nil if there is none.
	checkpoint   []byte
	checkpointed int
}

// storedCall is a call of a lane.
type storedCall struct {
	progress feed.Progress
	source   int
	text     string
	// first and last are the seqs that the call covers; both are 0 for a gap of unknown seqs.
	first, last uint64
	rawIDs      []uint64
}

func newDurableSink() *durableSink {
	return &durableSink{changed: make(chan struct{}), workers: make(map[string]*durableLane)}
}

// change calls f, and wakes await.
func (s *durableSink) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *durableSink) AddWorker(w feed.Worker) (l feed.Lane) {
	s.change(func() {
		if s.workers[w.Name] == nil {
			s.workers[w.Name] = &durableLane{sink: s, desc: w}
		}
		s.workers[w.Name].added++
		l = s.workers[w.Name]
	})
	return l
}

func (s *durableSink) RemoveWorker(name string, _ feed.RemoveReason) {
	s.change(func() {
		delete(s.workers, name)
		s.removed = append(s.removed, name)
	})
}

// await waits until a condition of the sink is true.
func (s *durableSink) await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	limit := time.After(harness.Timeout)
	for {
		s.mu.Lock()
		ok, changed := holds(), s.changed
		s.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-limit:
			s.mu.Lock()
			defer s.mu.Unlock()
			for name, l := range s.workers {
				t.Logf("%s: %d calls, the last are\n%s", name, len(l.calls), strings.Join(texts(l.calls[max(0, len(l.calls)-20):]), "\n"))
			}
			t.Fatalf("%s does not come", what)
		}
	}
}

// recovered forgets all but the first calls of each worker, and returns what is recovered. keep returns how many of n
// calls are left.
func (s *durableSink) recovered(keep func(n int) int) (all []feed.Recovered) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = make(map[feed.Publisher]int)
	for _, l := range s.workers {
		l.calls = l.calls[:keep(len(l.calls))]
		l.added = 0
		r := feed.Recovered{Worker: l.desc, Cursors: make(map[feed.Publisher][]byte)}
		calls := l.calls
		if l.checkpointed > len(calls) {
			l.checkpoint, l.checkpointed = nil, 0
		}
		if l.checkpoint != nil {
			r.Checkpoint, calls = l.checkpoint, calls[l.checkpointed:]
		}
		for i := range calls {
			r.Cursors[calls[i].progress.Publisher] = calls[i].progress.Cursor
			if learned := calls[i].progress.Learned; len(learned) > 0 {
				r.Learned = append(r.Learned, learned)
			}
		}
		for _, c := range l.calls {
			if c.text != proved {
				s.kept[c.progress.Publisher]++
			}
		}
		all = append(all, r)
	}
	return all
}

// store checkpoints a worker.
func (s *durableSink) store(t *testing.T, in *ingest.Ingest, worker string) {
	t.Helper()
	if !in.Checkpoint(worker, func(state []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		l := s.workers[worker]
		l.checkpoint, l.checkpointed = bytes.Clone(state), len(l.calls)
	}) {
		t.Fatal("no checkpoint of a worker that is in the stream")
	}
}

func (l *durableLane) add(c storedCall) {
	c.progress.Cursor, c.progress.Learned = bytes.Clone(c.progress.Cursor), bytes.Clone(c.progress.Learned)
	l.sink.change(func() { l.calls = append(l.calls, c) })
}

// proved is the text of a call that a replay socket is the publisher's.
const proved = "proved"

func (l *durableLane) Batch(b *feed.Batch) {
	c := storedCall{progress: b.Progress, source: b.Source, first: b.Seq, last: b.Seq}
	if b.Proved {
		c.text = proved
		l.add(c)
		return
	}
	var text strings.Builder
	fmt.Fprintf(&text, "rank %d: batch %d", b.Rank, b.Seq)
	for _, e := range b.Events {
		fmt.Fprintf(&text, " %d%v of %d salt %q content %x", e.Kind, e.BlockHashes, e.BlockSize, e.CacheSalt, e.TokensHashes)
		c.rawIDs = append(c.rawIDs, e.RawID)
	}
	c.text = text.String()
	l.add(c)
}

func (l *durableLane) Gap(g feed.Gap) {
	l.add(storedCall{
		progress: g.Progress, source: g.Source, first: g.FirstSeq, last: g.LastSeq,
		text: fmt.Sprintf("rank %d: gap %v %d-%d", g.Rank, g.Reason, g.FirstSeq, g.LastSeq),
	})
}

func (l *durableLane) Restarted(r feed.Restart) {
	l.add(storedCall{progress: r.Progress, source: r.Source, text: fmt.Sprintf("rank %d: restarted", r.Rank)})
}

func texts(calls []storedCall) []string {
	all := make([]string, len(calls))
	for i := range calls {
		all[i] = calls[i].text
	}
	return all
}

// of returns the calls for a publisher of a worker.
func (s *durableSink) of(worker string, p feed.Publisher) (calls []storedCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ofLocked(worker, p)
}

// ofLocked is of for callers that hold mu.
func (s *durableSink) ofLocked(worker string, p feed.Publisher) (calls []storedCall) {
	if l := s.workers[worker]; l != nil {
		for _, c := range l.calls {
			if c.progress.Publisher == p && c.text != proved {
				calls = append(calls, c)
			}
		}
	}
	return calls
}

// publish publishes n random batches: requests with and without a cache salt, whose later blocks do not name it, and
// removes of the oldest blocks.
func (c *cache) publish(random *rand.Rand, n int) {
	c.t.Helper()
	for range n {
		if len(c.blocks) > 20 {
			c.evict(c.Publish)
			continue
		}
		c.next++
		ev := enginetest.Stored(c.next)
		switch {
		case random.IntN(3) == 0:
			ev.CacheSalt = []string{"", "one", "two"}[random.IntN(3)]
		case c.blocks[c.next-1]:
			ev.HasParent, ev.Parent = true, c.next-1
		}
		c.blocks[c.next] = true
		c.do(c.Publish, ev)
	}
}

// deployment is a worker of one or several engines, and how kvcast reads it.
type deployment struct {
	worker string
	config config.Config
	caches map[feed.Publisher]*cache
}

// deployments are the ways to read a worker. replay reports whether its engines have a replay socket.
var deployments = []struct {
	name string
	make func(t *testing.T, replay bool) *deployment
}{
	{"one rank", func(t *testing.T, replay bool) *deployment { return connected(t, replay, 1, feed.EngineVLLM) }},
	{"two ranks", func(t *testing.T, replay bool) *deployment { return connected(t, replay, 2, feed.EngineVLLM) }},
	{"KVBM beside vLLM", func(t *testing.T, replay bool) *deployment {
		return connected(t, replay, 1, feed.EngineVLLM, feed.EngineKVBM)
	}},
	{"bound, two ranks", bound},
}

// hosts counts the addresses that newHost has returned.
var hosts atomic.Uint32

// newHost returns a loopback address, and the first of many ports on it, that no other test and no outgoing connection
// uses, also while nothing is bound.
func newHost() (address string, port int) {
	n, pid := int(hosts.Add(1)), os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 1+pid%250, pid/250%250, 1+n%250), 20_000 + 100*(n/250)
}

// connected returns a worker whose engines are connected to.
func connected(t *testing.T, replay bool, ranks int, engines ...feed.Engine) *deployment {
	host, port := newHost()
	at := func(port int) string { return fmt.Sprintf("tcp://%s:%d", host, port) }
	d := &deployment{worker: "w", caches: make(map[feed.Publisher]*cache)}
	w := config.Worker{Name: "w", Model: "m"}
	for source, engine := range engines {
		live, replays := port+20*source, port+20*source+10
		s := config.Source{Engine: engine, Connect: at(live), DPSize: ranks}
		if replay {
			s.Replay = at(replays)
		}
		w.Sources = append(w.Sources, s)
		for rank := range ranks {
			c := newCache(t, simulator.PublisherConfig{
				SocketConfig: simulator.SocketConfig{Endpoint: at(live + rank), Mode: simulator.ModeBind, Replay: at(replays + rank)},
				BatchConfig:  simulator.BatchConfig{Rank: uint32(rank), EventForm: wire.FormMap},
			})
			c.next = uint64(source) << 32 // equal hashes of two sources name one content
			d.caches[feed.Publisher{Source: source, Rank: uint32(rank)}] = c
		}
	}
	d.config.Workers = []config.Worker{w}
	return d
}

// bound returns a pod of two dp ranks that connects to a listener.
func bound(t *testing.T, replay bool) *deployment {
	host, port := newHost()
	d := &deployment{worker: host, caches: make(map[feed.Publisher]*cache)}
	listener := config.Listener{Bind: fmt.Sprintf("tcp://%s:%d", host, port), ReplayPort: port + 10, ReplayHosts: []string{host}}
	if !replay {
		listener.ReplayPort = -1
	}
	d.config.Listeners = []config.Listener{listener}
	for rank := range uint32(2) {
		c := newCache(t, simulator.PublisherConfig{
			SocketConfig: simulator.SocketConfig{
				Endpoint: listener.Bind, Mode: simulator.ModeConnect, Topic: "kv@" + host + "@m",
				Replay: fmt.Sprintf("tcp://%s:%d", host, port+10+int(rank)),
			},
			BatchConfig: simulator.BatchConfig{Rank: rank, EventForm: wire.FormMap},
		})
		c.connects = true
		d.caches[feed.Publisher{Rank: rank}] = c
	}
	return d
}

// run starts an Ingest, and waits until the engines have subscribers.
func (d *deployment) run(t *testing.T, zmq config.ZMQ, sink *durableSink, recovered []feed.Recovered) (in *ingest.Ingest, stop func()) {
	t.Helper()
	c := d.config
	c.ConnectZMQ, c.ListenZMQ = zmq, zmq
	c.Durable, c.Recovered = true, recovered
	c.Grace, c.Silence, c.ReplayTimeout = time.Hour, -1, harness.Timeout
	in, stop = start(t, c, sink)
	d.awaitSubscribers()
	return in, stop
}

// awaitSubscribers waits until each engine has a subscriber.
func (d *deployment) awaitSubscribers() {
	for _, e := range d.caches {
		e.must(e.WaitSubscribed(harness.Context(e.t), 1))
	}
}

// publish publishes n random batches with each engine.
func (d *deployment) publish(random *rand.Rand, n int) {
	for _, key := range d.publishers() {
		d.caches[key].publish(random, n)
	}
}

func (d *deployment) publishers() (all []feed.Publisher) {
	for source := range 4 {
		for rank := range uint32(4) {
			if p := (feed.Publisher{Source: source, Rank: rank}); d.caches[p] != nil {
				all = append(all, p)
			}
		}
	}
	return all
}

// awaitLast publishes one more batch with each engine, and waits until all batches are read. It returns their seqs.
func (d *deployment) awaitLast(t *testing.T, sink *durableSink) map[feed.Publisher]uint64 {
	t.Helper()
	lasts, want := make(map[feed.Publisher]uint64), make(map[feed.Publisher]string)
	for p, c := range d.caches {
		c.next++
		c.blocks[c.next] = true
		seq, err := c.Publish(enginetest.Stored(c.next))
		c.must(err)
		lasts[p], want[p] = seq, fmt.Sprintf(": batch %d %d[%d] ", seq, wire.KindStored, c.next)
	}
	sink.await(t, "the last batch", func() bool {
		for p, text := range want {
			if calls := sink.ofLocked(d.worker, p); len(calls) == 0 || !strings.Contains(calls[len(calls)-1].text, text) {
				return false
			}
		}
		return true
	})
	return lasts
}

// uninterrupted returns the calls for all batches that an engine can replay.
func (d *deployment) uninterrupted(t *testing.T, p feed.Publisher) []storedCall {
	t.Helper()
	lane := newDurableSink().AddWorker(feed.Worker{Name: "w"}).(*durableLane)
	c := config.Config{ReplayTimeout: harness.Timeout, Workers: []config.Worker{{Name: "w", Sources: []config.Source{{
		Connect: "tcp://127.0.0.1:1", Replay: d.caches[p].ReplayEndpoint(),
	}}}}}
	if err := ingest.ReplayFrom(harness.Context(t), c, 0, lane); err != nil {
		t.Fatal(err)
	}
	return lane.calls
}

// twoLives runs an Ingest until a random batch, lets meanwhile happen, and runs another Ingest that recovers what was
// stored. It returns the sink, and the seqs of the last batches.
func (d *deployment) twoLives(t *testing.T, zmq config.ZMQ, seed uint64, meanwhile func(random *rand.Rand)) (*durableSink, map[feed.Publisher]uint64) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 2))
	sink := newDurableSink()
	d.publish(random, random.IntN(10))
	in, stop := d.run(t, zmq, sink, nil)
	d.publish(random, 1+random.IntN(30))
	wanted := 1 + random.IntN(20)
	d.publish(random, wanted)
	sink.await(t, "a call", func() bool { return sink.workers[d.worker] != nil && len(sink.workers[d.worker].calls) >= wanted })
	if random.IntN(2) == 0 {
		sink.store(t, in, d.worker)
	}
	d.publish(random, random.IntN(20))
	stop()
	if random.IntN(3) == 0 {
		sink.store(t, in, d.worker)
	}
	for _, e := range d.caches {
		e.must(e.WaitUnsubscribed(harness.Context(t)))
	}
	recovered := sink.recovered(func(n int) int { return random.IntN(n + 1) })
	meanwhile(random)
	_, stop = d.run(t, zmq, sink, recovered)
	d.publish(random, random.IntN(20))
	lasts := d.awaitLast(t, sink)
	stop()
	return sink, lasts
}

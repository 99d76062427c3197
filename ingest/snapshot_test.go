package ingest_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/blockpool/pooltest"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// shortReplay is how many batches the replay socket of a pooled engine has.
const shortReplay = 20

// pooled is a simulated engine with snapshots, whose batches are those of a block pool.
type pooled struct {
	*simulator.Publisher
	t      *testing.T
	engine feed.Engine
	pool   *blockpool.Pool
	copies *pooltest.Replica
	random *rand.Rand
	last   uint64 // seq of the last batch
}

func newPooled(t *testing.T) *pooled { return newPooledOf(t, feed.EngineVLLM) }

func newPooledOf(t *testing.T, engine feed.Engine) *pooled {
	t.Helper()
	e := &pooled{t: t, engine: engine, random: rand.New(rand.NewPCG(1, 2))}
	c := simulator.SocketConfig{Mode: simulator.ModeBind, Replay: "tcp://127.0.0.1:*", ReplayLimit: shortReplay, Snapshot: "tcp://127.0.0.1:*"}
	if engine == feed.EngineSGLang {
		c.ReplayForm, c.SnapshotForm = simulator.ReplayPlain, simulator.SnapshotSGLang
	}
	e.Publisher = enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: c})
	e.empty()
	return e
}

func (e *pooled) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

// empty is what a restart does to the cache.
func (e *pooled) empty() {
	var err error
	e.pool, err = blockpool.New(blockpool.Config{Capacity: 40, BlockSize: blockSize})
	e.must(err)
	e.copies = pooltest.NewReplica()
}

// publish runs requests until n batches are published. Some prompts are repeated, so that blocks have several copies.
func (e *pooled) publish(n int) {
	e.t.Helper()
	for n > 0 {
		prompt := make([]uint32, blockSize*(1+e.random.IntN(3)))
		if e.engine == feed.EngineSGLang {
			prompt = append(prompt, 0) // otherwise the last block is computed again, and SGLang has no copies
		}
		for i := range prompt {
			prompt[i] = uint32(e.random.IntN(3))
		}
		events, ok := e.pool.Request(prompt)
		if !ok || len(events) == 0 {
			continue
		}
		e.copies.Apply(e.t, events)
		var err error
		e.last, err = e.Publish(events...)
		e.must(err)
		n--
	}
}

// config returns the config of a worker that reads the engine.
func (e *pooled) config() config.Config {
	c := worker(config.Source{Engine: e.engine, Connect: e.Endpoint(), Replay: e.ReplayEndpoint(), Snapshot: e.SnapshotEndpoint()})
	c.ReplayTimeout, c.Silence, c.Grace = harness.Timeout, -1, time.Hour
	return c
}

// awaitEqual publishes two more batches, and waits after each until a view has the engine's blocks, with the same copies,
// and no loss is reported of them. The first may be included in a snapshot; the second follows it.
func (e *pooled) awaitEqual(v *view) {
	e.t.Helper()
	for range 2 {
		e.must(e.WaitSubscribed(harness.Context(e.t), 1))
		e.publish(1)
		v.await(e.t, "the engine's cache", func() bool { return v.lastSeq >= e.last && e.equals(v.blocks) && !v.incomplete })
	}
}

// equals reports whether these copies of blocks are the engine's.
func (e *pooled) equals(blocks map[uint64]int) bool {
	if len(blocks) != e.pool.Len() {
		return false
	}
	for h, n := range blocks {
		if e.copies.Copies(0, h) != n {
			return false
		}
	}
	return true
}

// wantReported compares how often a view was told of something, beside the worker itself.
func (e *pooled) wantReported(v *view, want map[string]int) {
	e.t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.reported, "added")
	if d := cmp.Diff(want, v.reported); d != "" {
		e.t.Errorf("reported (-want +got):\n%s", d)
	}
}

// wantSnapshots compares the number of snapshots that were used, in the status and the statistics.
func wantSnapshots(t *testing.T, in *ingest.Ingest, want uint64) {
	t.Helper()
	if got := in.Sources()[0].Snapshots; got != want {
		t.Errorf("status: %d snapshots used, want %d", got, want)
	}
	if s, _ := in.Stats("w"); s.Snapshots != want {
		t.Errorf("statistics: %d snapshots used, want %d", s.Snapshots, want)
	}
}

func TestLateJoinBeginsWithSnapshot(t *testing.T) {
	t.Parallel()
	for _, zmq := range []config.ZMQ{config.ZMQNative, config.ZMQLib} {
		if !zmq.Available() {
			continue
		}
		t.Run(string(zmq), func(t *testing.T) {
			e := newPooled(t)
			e.publish(300)
			v := newView()
			var log harness.Log
			c := e.config()
			c.ConnectZMQ, c.Logger = zmq, log.Logger()
			in, stop := start(t, c, v)
			e.awaitEqual(v)
			e.publish(shortReplay / 2)
			e.awaitEqual(v)
			e.wantReported(v, map[string]int{})
			wantSnapshots(t, in, 1)
			stop()
			want := regexp.MustCompile(`level=INFO msg="snapshot of the engine's cache used" worker=w source=0 rank=0 cause=start snapshot_seq=\d+ batches=\d+ took=\S+`)
			if got := log.String(); !want.MatchString(got) {
				t.Errorf("log has no line that matches %s:\n%s", want, got)
			}
		})
	}
}

func TestGapBeyondTheReplayIsRepairedBySnapshot(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.Disconnect())
	e.publish(200)
	e.must(e.Reconnect())
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 1)
}

func TestGapOnAConnectionIsRepairedBySnapshot(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.SetSilent(true))
	e.publish(100)
	e.must(e.SetSilent(false))
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 1)
}

// A short gap is repaired by replay.
func TestSnapshotIsNotRequestedIfTheReplaySuffices(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.SetSilent(true))
	e.publish(shortReplay / 2)
	e.must(e.SetSilent(false))
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 0)
}

// An engine without a replay socket is read from a snapshot on.
func TestSnapshotWithoutReplaySocket(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	e.publish(100)
	v := newView()
	c := e.config()
	c.Workers[0].Sources[0].Replay = ""
	in, _ := start(t, c, v)
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 1)
}

func TestRestartDuringSnapshot(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	e.publish(100)
	e.must(e.SetSnapshotFaults(simulator.SnapshotFaults{NoAnswer: true}))
	v := newView()
	in, _ := start(t, e.config(), v)
	e.must(e.WaitSnapshots(harness.Context(t), 1))
	e.must(e.Disconnect())
	e.empty()
	e.must(e.Restart(0)) // ends the faults
	e.publish(100)
	e.must(e.Reconnect())
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 1)
}

// An engine that restarted while kvcast was away is recognised by the publisher id of its snapshot.
func TestSnapshotShowsRestart(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.Disconnect())
	e.empty()
	e.must(e.Restart(0))
	e.publish(200)
	e.must(e.Reconnect())
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{"restarted": 1})
	wantSnapshots(t, in, 1)
}

// failedSnapshots are answers that are no usable snapshot.
var failedSnapshots = []struct {
	name   string
	faults simulator.SnapshotFaults
}{
	{"not now", simulator.SnapshotFaults{Unavailable: true}},
	{"seq of 7 bytes", edit(func(f [][]byte) { f[0] = f[0][1:] })},
	{"seq without a meaning", edit(func(f [][]byte) { f[0] = bytes.Repeat([]byte{0xf0}, 8) })},
	{"seq that was read before", edit(func(f [][]byte) { binary.BigEndian.PutUint64(f[0], 1) })},
	{"publisher id of 15 bytes", edit(func(f [][]byte) { f[1] = f[1][1:] })},
	{"publisher id of another engine", edit(func(f [][]byte) { f[1] = bytes.Repeat([]byte{1}, 16) })},
	{"no publisher id", simulator.SnapshotFaults{Edit: func(f [][]byte) [][]byte { return f[:1] }}},
	{"last payload is malformed", edit(func(f [][]byte) { f[len(f)-1] = []byte("no batch") })},
	{"last payload is empty", edit(func(f [][]byte) { f[len(f)-1] = nil })},
	{"frame too large", edit(func(f [][]byte) { f[len(f)-1] = make([]byte, 9<<20) })},
}

func edit(change func([][]byte)) simulator.SnapshotFaults {
	return simulator.SnapshotFaults{Edit: func(frames [][]byte) [][]byte {
		frames = slices.Clone(frames)
		for i := range frames {
			frames[i] = slices.Clone(frames[i])
		}
		change(frames)
		return frames
	}}
}

// A snapshot that fails is requested again.
func TestFailedSnapshotIsRequestedAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range failedSnapshots {
		t.Run(tt.name, func(t *testing.T) {
			e := newPooled(t)
			v := newView()
			in, _ := start(t, e.config(), v)
			e.publish(3)
			e.awaitEqual(v)
			faults := tt.faults
			faults.Requests = 1
			e.must(e.SetSnapshotFaults(faults))
			e.must(e.Disconnect())
			e.publish(100)
			e.must(e.Reconnect())
			e.awaitEqual(v)
			v.mu.Lock()
			delete(v.reported, "restarted")         // by another publisher id
			delete(v.reported, "replay_incomplete") // until the next snapshot, if a part was delivered
			v.mu.Unlock()
			e.wantReported(v, map[string]int{})
			if s, _ := in.Stats("w"); s.Snapshots != 1 || s.SnapshotsFailed != 1 {
				t.Errorf("%d snapshots used, %d failed, want one of each", s.Snapshots, s.SnapshotsFailed)
			}
		})
	}
}

// If there is no snapshot, the gap is reported as without snapshots.
func TestWithoutSnapshotTheGapIsReported(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	c := e.config()
	c.Workers[0].Sources[0].Snapshot = "tcp://127.0.0.1:1"
	in, _ := start(t, c, v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.Disconnect())
	e.publish(100)
	e.must(e.Reconnect())
	v.await(t, "the gap", func() bool { return v.reported["replay_forgotten"] == 1 })
	wantSnapshots(t, in, 0)
}

// The blocks that snapshots have replaced are reported as lost when the snapshots break off, although the engine publishes
// nothing after them.
func TestLossOfBrokenSnapshotsIsReported(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.SetSnapshotFaults(edit(func(f [][]byte) { f[len(f)-1] = nil })))
	e.must(e.Disconnect())
	e.publish(100)
	e.must(e.Reconnect())
	v.await(t, "the loss", func() bool { return v.reported["replay_incomplete"] > 0 && v.incomplete })
	wantSnapshots(t, in, 0)
}

// snapshotSink stores the calls of a lane with their cursors, as a durable journal does.
type snapshotSink struct {
	*view
	desc  feed.Worker
	calls []snapshotCall // guarded by mu
}

type snapshotCall struct {
	do       func(*view)
	progress feed.Progress
}

func (s *snapshotSink) AddWorker(w feed.Worker) feed.Lane {
	s.desc = w
	s.view.AddWorker(w)
	return s
}

func (s *snapshotSink) add(p feed.Progress, do func(*view)) {
	p.Cursor, p.Learned = bytes.Clone(p.Cursor), bytes.Clone(p.Learned)
	s.mu.Lock()
	s.calls = append(s.calls, snapshotCall{do, p})
	s.mu.Unlock()
	do(s.view)
}

func (s *snapshotSink) Batch(b *feed.Batch) {
	c := feed.Batch{Seq: b.Seq, Rank: b.Rank}
	for _, e := range b.Events {
		c.Events = append(c.Events, wire.Event{Kind: e.Kind, BlockHashes: slices.Clone(e.BlockHashes)})
	}
	s.add(b.Progress, func(v *view) { v.Batch(&c) })
}

func (s *snapshotSink) Gap(g feed.Gap) { s.add(g.Progress, func(v *view) { v.Gap(g) }) }

func (s *snapshotSink) Restarted(r feed.Restart) {
	s.add(r.Progress, func(v *view) { v.Restarted(r) })
}

// killed returns a sink with the first calls, and what is recovered of them.
func (s *snapshotSink) killed(calls int) (*snapshotSink, []feed.Recovered) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := &snapshotSink{view: newView(), calls: slices.Clone(s.calls[:calls])}
	r := feed.Recovered{Worker: s.desc, Cursors: make(map[feed.Publisher][]byte)}
	for _, c := range next.calls {
		c.do(next.view)
		r.Cursors[c.progress.Publisher] = c.progress.Cursor
		if len(c.progress.Learned) > 0 {
			r.Learned = append(r.Learned, c.progress.Learned)
		}
	}
	return next, []feed.Recovered{r}
}

// TestKilledDuringSnapshot ends kvcast after each call of the lane that a snapshot leads to.
func TestKilledDuringSnapshot(t *testing.T) {
	t.Parallel()
	e := newPooled(t)
	first := &snapshotSink{view: newView()}
	c := e.config()
	c.Durable = true
	_, stop := start(t, c, first)
	e.publish(2)
	e.awaitEqual(first.view)
	e.must(e.Disconnect())
	e.publish(100)
	e.must(e.Reconnect())
	e.awaitEqual(first.view)
	stop()
	e.must(e.WaitUnsubscribed(harness.Context(t)))
	if len(first.calls) < 6 {
		t.Fatalf("%d calls of the lane: no snapshot in several batches", len(first.calls))
	}
	for n := range first.calls {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			sink, recovered := first.killed(n)
			c := c
			c.Recovered = recovered
			if n == 0 {
				c.Recovered = nil
			}
			_, stop := start(t, c, sink)
			e.awaitEqual(sink.view)
			stop()
			e.must(e.WaitUnsubscribed(harness.Context(t)))
			delete(sink.reported, "replay_incomplete") // until the next snapshot, if a part was delivered
			e.wantReported(sink.view, map[string]int{})
		})
	}
}

// TestRandomFaultsWithSnapshots loses many batches at random times, and restarts the engine.
func TestRandomFaultsWithSnapshots(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 3))
			e := newPooled(t)
			e.publish(random.IntN(30))
			v := newView()
			_, _ = start(t, e.config(), v)
			e.must(e.WaitSubscribed(harness.Context(t), 1))
			// That may be more than the replay socket has, before what follows the first snapshot is requested: some is then reported as lost.
			e.publish(random.IntN(30))
			settled := func() bool { return v.lastSeq >= e.last && e.equals(v.blocks) || v.incomplete }
			if random.IntN(2) == 0 {
				e.publish(1)
				v.await(t, "the engine's cache or a report", settled)
			}
			switch random.IntN(3) {
			case 0:
				e.empty()
				e.must(e.RestartProcess(0))
			case 1:
				e.must(e.Disconnect())
				e.publish(random.IntN(50))
				e.must(e.Reconnect())
			default:
				e.must(e.SetSilent(true))
				e.publish(random.IntN(50))
				e.must(e.SetSilent(false))
			}
			e.publish(random.IntN(50))
			e.must(e.WaitSubscribed(harness.Context(t), 1))
			e.publish(1)
			v.await(t, "the engine's cache or a report", settled)
		})
	}
}

// A source of SGLang begins with a snapshot, whose blocks have no contents.
func TestSGLangBeginsWithSnapshot(t *testing.T) {
	t.Parallel()
	e := newPooledOf(t, feed.EngineSGLang)
	e.publish(300)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.awaitEqual(v)
	e.publish(shortReplay / 2)
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
	wantSnapshots(t, in, 1)
	// The replay of the barrier shows that the engine did not restart.
	e.must(e.Disconnect())
	e.publish(shortReplay / 2)
	e.must(e.Reconnect())
	e.awaitEqual(v)
	e.wantReported(v, map[string]int{})
}

// A gap is not repaired by a snapshot of SGLang, because the contents of blocks would be lost.
func TestSGLangGapIsReported(t *testing.T) {
	t.Parallel()
	e := newPooledOf(t, feed.EngineSGLang)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.must(e.WaitSubscribed(harness.Context(t), 1)) // or else a snapshot may replace what was published before
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.Disconnect())
	e.publish(100)
	e.must(e.Reconnect())
	v.await(t, "the gap", func() bool { return v.reported["replay_forgotten"] == 1 })
	wantSnapshots(t, in, 0)
}

func TestSGLangRestartBeginsWithSnapshot(t *testing.T) {
	t.Parallel()
	e := newPooledOf(t, feed.EngineSGLang)
	v := newView()
	in, _ := start(t, e.config(), v)
	e.publish(3)
	e.awaitEqual(v)
	e.must(e.Disconnect())
	e.empty()
	e.must(e.Restart(0))
	e.publish(200)
	e.must(e.Reconnect())
	e.must(e.WaitSubscribed(harness.Context(t), 1))
	e.publish(1)
	v.await(t, "the engine's cache or a report", func() bool { return e.equals(v.blocks) && !v.incomplete })
	if got := in.Sources()[0].Restarts; got != 1 {
		t.Errorf("%d restarts, want 1", got)
	}
}

// A snapshot of SGLang that fails is requested again.
func TestFailedSGLangSnapshotIsRequestedAgain(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string]simulator.SnapshotFaults{
		"busy":                {Unavailable: true},
		"no header":           edit(func(f [][]byte) { f[0] = []byte("chunk") }),
		"malformed":           edit(func(f [][]byte) { f[1] = []byte{0xc1} }),
		"records are missing": edit(func(f [][]byte) { f[1] = bytes.TrimSuffix(f[1], f[1][max(0, len(f[1])-5):]) }),
		"one frame":           {Edit: func(f [][]byte) [][]byte { return f[:1] }},
	} {
		t.Run(name, func(t *testing.T) {
			e := newPooledOf(t, feed.EngineSGLang)
			e.publish(100)
			faults.Requests = 1
			e.must(e.SetSnapshotFaults(faults))
			v := newView()
			in, _ := start(t, e.config(), v)
			e.awaitEqual(v)
			e.wantReported(v, map[string]int{})
			if s, _ := in.Stats("w"); s.Snapshots != 1 || s.SnapshotsFailed != 1 {
				t.Errorf("%d snapshots used, %d failed, want one of each", s.Snapshots, s.SnapshotsFailed)
			}
		})
	}
}

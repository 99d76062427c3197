package routers_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

// heldBlocks is a Sink that has the blocks of one engine.
type heldBlocks struct {
	mu       sync.Mutex // guards all below
	blocks   map[uint64]bool
	complete bool // no loss was reported since the last clear
	gaps     []feed.GapReason
	relayed  bool // the last batch has said that it comes from a relay
	restarts int
}

// heldView is what heldBlocks shows.
type heldView struct {
	Blocks   []uint64
	Complete bool
	Relayed  bool
}

func (h *heldBlocks) AddWorker(feed.Worker) feed.Lane { return h }

func (h *heldBlocks) RemoveWorker(string, feed.RemoveReason) { h.clear() }

func (h *heldBlocks) clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.blocks, h.complete = make(map[uint64]bool), true
}

func (h *heldBlocks) Batch(b *feed.Batch) {
	h.mu.Lock()
	h.relayed = slices.ContainsFunc(b.Doubts, func(d feed.Doubt) bool { return d.Reason == feed.GapRelayed && d.Tiers == kvblock.AllTiers })
	h.mu.Unlock()
	for _, e := range b.Events {
		if e.Kind == wire.KindCleared {
			h.clear()
		}
		h.mu.Lock()
		for _, hash := range e.BlockHashes {
			if e.Kind == wire.KindStored {
				h.blocks[hash] = true
			} else {
				delete(h.blocks, hash)
			}
		}
		h.mu.Unlock()
	}
}

func (h *heldBlocks) Gap(g feed.Gap) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gaps, h.complete = append(h.gaps, g.Reason), false
}

func (h *heldBlocks) Restarted(feed.Restart) {
	h.clear()
	h.mu.Lock()
	h.restarts++
	h.mu.Unlock()
}

func (h *heldBlocks) view() heldView {
	h.mu.Lock()
	defer h.mu.Unlock()
	return heldView{slices.Sorted(maps.Keys(h.blocks)), h.complete, h.relayed}
}

func (h *heldBlocks) reported() (gaps []feed.GapReason, restarts int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.gaps), h.restarts
}

// view returns the blocks that the engine holds.
func (e *engine) view() heldView {
	v := heldView{Complete: true, Relayed: true}
	for path := range e.held {
		v.Blocks = append(v.Blocks, e.hash(path))
	}
	slices.Sort(v.Blocks)
	return v
}

// relay is SMG's server in front of an engine.
type relay struct {
	t       *testing.T
	engine  *engine
	address string
	cmd     *exec.Cmd
	in      io.Closer
}

func (r *relay) start() {
	r.t.Helper()
	r.cmd = exec.CommandContext(harness.Context(r.t), smg, "testdata/relay.py", r.address, r.engine.sockets.Endpoint, r.engine.sockets.Replay)
	in, err := r.cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	r.in = in
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		err = r.cmd.Start()
	}
	if err == nil {
		_, err = io.ReadFull(out, make([]byte, len("listening\n")))
	}
	if err != nil {
		r.t.Fatalf("start SMG's relay: %v", err)
	}
}

func (r *relay) kill() {
	_ = r.in.Close()
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}

// awaitRelay waits until the relay has subscribed to the engine.
func (e *engine) awaitRelay() {
	e.t.Helper()
	if err := e.publisher.WaitSubscribed(harness.Context(e.t), 1); err != nil {
		e.t.Fatal(err)
	}
}

func (e *engine) steps(n int) {
	for range n {
		e.step()
	}
	e.flush()
}

// clear makes the engine clear its cache, after which all its blocks are known again.
func (e *engine) clear() {
	e.t.Helper()
	clear(e.held)
	if _, err := e.publisher.Publish(wire.Event{Kind: wire.KindCleared}); err != nil {
		e.t.Fatal(err)
	}
}

// read reads a gRPC server of SMG's protocol until the test ends.
func read(t *testing.T, address string) *heldBlocks {
	t.Helper()
	held := new(heldBlocks)
	held.clear()
	in, err := ingest.New(config.Config{
		ReconnectMin: 10 * time.Millisecond, ReconnectMax: 50 * time.Millisecond, Grace: time.Hour,
		Workers: []config.Worker{{Name: "w", Sources: []config.Source{{Connect: "smg://" + address}}}},
	}, held)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(harness.Context(t))
	done := make(chan error, 1)
	go func() { done <- in.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return held
}

// TestSMGRelayAsASource reads an engine through SMG's own relay, which is killed and started again. The blocks are those of the engine, or
// a loss is reported. The engine is not restarted: the relay takes its batches for those that it has replayed if their numbers are the
// same, and nobody can know (GapRelayed).
func TestSMGRelayAsASource(t *testing.T) {
	testclass.Peers(t)
	need(t, smg)
	e := newEngine(t, 1)
	r := &relay{t: t, engine: e, address: fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))}
	r.start()
	t.Cleanup(func() { r.kill() })
	held := read(t, r.address)
	check := func(when string) {
		t.Helper()
		await(t, "blocks "+when, e.view(), func() heldView {
			e.flush()
			return held.view()
		})
	}
	wantReport := func() {
		t.Helper()
		harness.WaitFor(t, func() bool {
			e.flush()
			gaps, _ := held.reported()
			return slices.Contains(gaps, feed.GapPossibleRestart)
		})
	}

	e.awaitRelay()
	e.flush() // the first batch is not lost
	e.steps(200)
	check("at the start")
	if gaps, restarts := held.reported(); len(gaps) > 0 || restarts > 0 {
		t.Errorf("gaps %v and %d restarts were reported where the relay has repaired all losses", gaps, restarts)
	}

	r.kill()
	if err := e.publisher.WaitUnsubscribed(harness.Context(t)); err != nil {
		t.Fatal(err)
	}
	e.steps(50)
	r.start()
	e.awaitRelay()
	e.steps(50)
	wantReport()
	e.clear()
	e.steps(50)
	check("after a restart of the relay")
}

// TestKvcastAsASource reads a worker of kvcast by its own egress.smg, which sends the present state when a call begins anew.
func TestKvcastAsASource(t *testing.T) {
	testclass.Peers(t)
	address := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
	w := newWorld(t, fmt.Sprintf("  smg:\n    enabled: true\n    workers: [{authority: %q, worker: e1}]\n", address), "--listen", address)
	e := w.engines[0]
	w.steps(100)
	held := read(t, address)
	check := func(when string) {
		t.Helper()
		await(t, "blocks "+when, e.view(), func() heldView {
			e.touch() // a gap is seen when the next batch comes
			return held.view()
		})
	}
	check("at the start")
	w.steps(100)
	check("after changes")
	e.restart()
	w.steps(50)
	check("after a restart of the engine")
	w.restart()
	w.steps(50)
	check("after a restart of kvcast")
}

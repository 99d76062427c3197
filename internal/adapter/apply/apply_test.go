package apply_test

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// patience bounds every wait of the tests.
const patience = time.Minute

// blocks are the hashes of the blocks of each worker.
type blocks map[string][]uint64

// target is an apply.Target that keeps blocks.
type target struct {
	t       *testing.T
	lock    sync.Mutex // guards workers
	workers map[string]map[uint64]bool
	flushed chan struct{}
}

func newTarget(t *testing.T) *target {
	return &target{t: t, workers: make(map[string]map[uint64]bool), flushed: make(chan struct{}, 1)}
}

// wantLocked fails the test unless the lock is held.
func (g *target) wantLocked() {
	if g.lock.TryLock() {
		g.lock.Unlock()
		g.t.Error("the target was called without the lock")
	}
}

func (g *target) Begin(worker string, _ *kvcastv1.WorkerAdded) {
	g.wantLocked()
	g.workers[worker] = make(map[uint64]bool)
}

func (g *target) Apply(worker string, event *kvcastv1.RouterEvent) {
	g.wantLocked()
	for _, hash := range event.GetStored().GetBlockHashes() {
		g.workers[worker][hash] = true
	}
	for _, hash := range event.GetRemoved().GetBlockHashes() {
		delete(g.workers[worker], hash)
	}
}

func (g *target) Flush(worker string, at float64) {
	g.wantLocked()
	if g.workers[worker] == nil || at <= 0 {
		g.t.Errorf("flush of worker %q at %v", worker, at)
	}
	g.signal()
}

func (g *target) End(worker string) {
	g.wantLocked()
	if g.workers[worker] == nil {
		g.t.Errorf("worker %q ends, and has not begun", worker)
	}
	delete(g.workers, worker)
	g.signal()
}

func (g *target) signal() {
	select {
	case g.flushed <- struct{}{}:
	default:
	}
}

// want waits until the target has exactly these blocks.
func (g *target) want(want blocks) {
	g.t.Helper()
	for timeout := time.After(patience); ; {
		g.lock.Lock()
		got := make(blocks)
		for worker, hashes := range g.workers {
			got[worker] = slices.Sorted(maps.Keys(hashes))
		}
		g.lock.Unlock()
		diff := cmp.Diff(want, got)
		if diff == "" {
			return
		}
		select {
		case <-g.flushed:
		case <-timeout:
			g.t.Fatalf("the target has other blocks (-want +got):\n%s", diff)
		}
	}
}

// pausedJournal is a journal whose entries are compacted before they are read, while it is paused.
type pausedJournal struct {
	journal.Reader
	mu        sync.Mutex // held while it is paused
	compacted atomic.Bool
}

func (j *pausedJournal) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.compacted.Swap(false) {
		return journal.Chunk{}, journal.ErrCompacted
	}
	return j.Reader.Read(ctx, q)
}

// world is a journal with its index, which has applied all entries when append returns.
type world struct {
	t        *testing.T
	journal  *journal.Memory
	index    *index.Index
	follower *follow.Follower
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, journal: journal.NewMemory(journal.Config{}), index: index.New()}
	w.follower = follow.New(w.journal, w.index, follow.Delays{})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = w.follower.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		_ = w.journal.Close(context.Background())
	})
	return w
}

// append appends an entry of a worker whose engine's time is at, and waits until the index has applied it.
func (w *world) append(worker string, at time.Time, events ...*kvcastv1.RouterEvent) {
	w.t.Helper()
	body, err := proto.Marshal(&kvcastv1.Entry{Worker: worker, Model: "m", EngineTimeUnixNano: at.UnixNano(), Events: events})
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := w.journal.Append(w.t.Context(), journal.Record{Source: &journal.Source{Worker: worker, Model: "m"}, Tiers: 1<<kvcastv1.Tier_TIER_DEVICE | 1, Body: body})
	if err != nil {
		w.t.Fatal(err)
	}
	seq, err := p.Wait(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for timeout := time.After(patience); ; {
		changed := w.follower.Changed()
		if w.follower.Bounds().Newest >= seq {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			w.t.Fatalf("the index has not applied entry %d", seq)
		}
	}
}

func added() *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Ranks: []uint32{0}}}}
}

func removed() *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}}}
}

func store(hash uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Tier: kvcastv1.Tier_TIER_DEVICE, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
		BlockSize: 2, BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash},
	}}}
}

func remove(hash uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Tier: kvcastv1.Tier_TIER_DEVICE, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: []uint64{hash}}}}
}

// TestTargetGetsNoPools has pools that the index knows at the start, that come later, and that become workers, and the other way round.
func TestTargetGetsNoPools(t *testing.T) {
	w, now := newWorld(t), time.Now()
	pool := func() *kvcastv1.RouterEvent {
		e := added()
		e.GetWorkerAdded().Pool = true
		return e
	}
	w.append("a", now, pool(), store(1))
	w.append("b", now, added(), store(2))
	g := newTarget(t)
	source := &apply.Source{Journal: w.follower, Index: w.index, Lock: &g.lock, Logger: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- source.Run(ctx, g, func() { close(begun) }) }()
	<-begun
	w.append("a", now, store(3))
	w.append("c", now, pool())
	w.append("c", now, store(4))
	w.append("d", now, added(), store(5))
	g.want(blocks{"b": {2}, "d": {5}})
	w.append("a", now, removed())
	w.append("a", now, added(), store(6))
	w.append("b", now, pool(), store(7))
	w.append("c", now, added(), store(8))
	w.append("d", now, store(9))
	g.want(blocks{"a": {6}, "c": {8}, "d": {5, 9}})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestTargetOfAPool has a pool and workers that load from it, and others, some of which the index knows at the start.
func TestTargetOfAPool(t *testing.T) {
	w, now := newWorld(t), time.Now()
	pool, member, other := added(), added(), added()
	pool.GetWorkerAdded().Pool = true
	member.GetWorkerAdded().Pools = []string{"another", "p"}
	other.GetWorkerAdded().Pools = []string{"another"}
	w.append("p", now, pool, store(1))
	w.append("a", now, member, store(2))
	w.append("b", now, other, store(3))
	g := newTarget(t)
	source := &apply.Source{Journal: w.follower, Index: w.index, Lock: &g.lock, Logger: slog.New(slog.DiscardHandler), Pool: "p"}
	ctx, cancel := context.WithCancel(t.Context())
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- source.Run(ctx, g, func() { close(begun) }) }()
	<-begun
	g.want(blocks{"p": {1}, "a": {2}})
	w.append("c", now, store(4)) // of a worker that was not added
	w.append("b", now, store(5))
	w.append("d", now, member, store(6))
	w.append("p", now, store(7))
	g.want(blocks{"p": {1, 7}, "a": {2}, "d": {6}})
	w.append("a", now, other, store(8)) // which does not load from the pool any more
	w.append("b", now, member, store(9))
	g.want(blocks{"p": {1, 7}, "b": {9}, "d": {6}})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestTargetFollowsTheIndex has workers that the index knows at the start, that come, change and leave later, and that do so
// while entries are compacted before they are read.
func TestTargetFollowsTheIndex(t *testing.T) {
	w, now := newWorld(t), time.Now()
	w.append("a", now, added(), store(1), store(2))
	w.append("b", now, added(), store(3))
	g, restarts := newTarget(t), atomic.Int32{}
	j := &pausedJournal{Reader: w.follower}
	source := &apply.Source{
		Journal: j, Index: w.index, Lock: &g.lock, Logger: slog.New(slog.DiscardHandler), Restarted: func() { restarts.Add(1) },
	}
	ctx, cancel := context.WithCancel(t.Context())
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- source.Run(ctx, g, func() { close(begun) }) }()
	<-begun
	g.want(blocks{"a": {1, 2}, "b": {3}})

	w.append("a", now, remove(1), store(4))
	w.append("c", now, store(5)) // of a worker that was not added
	w.append("a", time.Unix(0, 0), store(6))
	w.append("b", now, removed())
	g.want(blocks{"a": {2, 4, 6}, "c": {5}})
	w.append("b", now, added(), store(6))
	w.append("a", now, added(), store(7)) // which begins anew
	g.want(blocks{"a": {7}, "b": {6}, "c": {5}})

	j.mu.Lock()
	j.compacted.Store(true)
	w.append("a", now, removed())
	w.append("b", now, remove(6), store(8))
	w.append("d", now, added(), store(9))
	j.mu.Unlock()
	g.want(blocks{"b": {8}, "c": {5}, "d": {9}})
	w.append("d", now, store(10))
	g.want(blocks{"b": {8}, "c": {5}, "d": {9, 10}})
	if restarts.Load() != 1 {
		t.Errorf("%d restarts, want 1", restarts.Load())
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

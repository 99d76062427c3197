package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
)

// step is an action of the property test. The numbers a, b and c select the objects of the action.
type step struct {
	what    string
	a, b, c int
}

var steps = rapid.Custom(func(t *rapid.T) step {
	return step{
		what: rapid.SampledFrom([]string{
			"publish", "publish", "publish", "fill", "evict", "engine restarts", "gap", "worker leaves",
			"subscribe", "subscribe", "kill", "resume", "resume", "read", "read", "catch up",
			"snapshot", "replay", "stall", "wait", "server restarts",
		}).Draw(t, "what"),
		a: rapid.IntRange(0, 1000).Draw(t, "a"), b: rapid.IntRange(0, 1000).Draw(t, "b"), c: rapid.IntRange(0, 1000).Draw(t, "c"),
	}
})

// TestStreamsAreCorrectUnderRandomActions executes random actions: engines publish, restart and are removed, entries
// are evicted, routers with different filters connect, stall and resume, and servers restart. A checker checks all
// streams of each router and compares digests. At the end, each view must equal the engines' blocks.
func TestStreamsAreCorrectUnderRandomActions(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		all := rapid.SliceOfN(steps, 1, 50).Draw(rt, "steps")
		var err error
		synctest.Test(t, func(t *testing.T) { err = runMachine(t, all) })
		if err != nil {
			rt.Fatal(err)
		}
	})
}

// place is a rank and tier of a worker.
type place struct {
	rank uint32
	tier kvcastv1.Tier
}

// machineEngine is a worker with its blocks. It may be removed.
type machineEngine struct {
	name, model string
	lane        feed.Lane // nil: removed
	blocks      map[place]map[uint64]struct{}
}

type machine struct {
	t       *testing.T
	h       *fixture
	engines []*machineEngine
	routers []*machineRouter
	next    uint64 // block
}

func runMachine(t *testing.T, all []step) error {
	m := &machine{t: t}
	for n := range 3 {
		m.engines = append(m.engines, &machineEngine{
			name: fmt.Sprintf("w%d", n), model: fmt.Sprintf("m%d", n%2), blocks: make(map[place]map[uint64]struct{}),
		})
	}
	m.serve()
	for i, s := range all {
		if err := m.do(s); err != nil {
			return fmt.Errorf("step %d, %v: %w", i, s, err)
		}
	}
	if err := m.converge(); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	for _, r := range m.routers {
		r.leave()
	}
	return nil
}

// serve starts a server and adds all engines to it.
func (m *machine) serve() {
	m.h = inMemory(m.t, server.Config{Limits: server.Limits{MaxSnapshots: 1}}, journal.Config{MaxBytes: 256 << 10})
	for _, e := range m.engines {
		if e.lane != nil || len(e.blocks) == 0 {
			m.arrive(e)
		}
	}
}

func (m *machine) arrive(e *machineEngine) {
	e.lane = m.h.Pipeline.AddWorker(feed.Worker{Name: e.name, Model: e.model, Ranks: []uint32{0}})
	for at, blocks := range e.blocks {
		for hash := range blocks {
			m.store(e, at, hash)
		}
	}
}

func (m *machine) store(e *machineEngine, at place, hashes ...uint64) {
	m.batch(e, at.rank, wire.Event{Kind: wire.KindStored, Tier: kvblock.Tier(at.tier), BlockHashes: hashes})
}

func (m *machine) batch(e *machineEngine, rank uint32, events ...wire.Event) {
	m.h.batches++
	e.lane.Batch(&feed.Batch{
		Rank: rank, EngineTime: m.h.batches, IngestTime: m.h.batches, Events: events, GroupsOmitted: m.h.batches%5 == 0,
	})
}

func (m *machine) do(s step) error {
	e := m.engines[s.a%len(m.engines)]
	at := place{uint32(s.b % 2), kvcastv1.Tier(1 + s.c%4)}
	switch s.what {
	case "publish":
		for range 1 + s.b%30 {
			m.publish(e, at)
		}
	case "evict": // evicts all earlier entries
		for range 300 + s.b {
			m.publish(e, at)
		}
	case "fill": // exceeds the transport's buffers, so that a snapshot is not sent at once
		m.publish(e, at)
		hashes := make([]uint64, 12<<10)
		for i := range hashes {
			m.next++
			hashes[i], e.blocks[at][m.next] = m.next, struct{}{}
		}
		m.store(e, at, hashes...)
	case "engine restarts":
		if e.lane != nil {
			e.lane.Restarted(feed.Restart{Rank: at.rank, At: 1})
			maps.DeleteFunc(e.blocks, func(p place, _ map[uint64]struct{}) bool { return p.rank == at.rank })
		}
	case "gap":
		if e.lane != nil {
			e.lane.Gap(feed.Gap{Rank: at.rank, Reason: feed.GapReplayForgotten, FirstSeq: 1, LastSeq: 2, Missed: 2, At: 1})
		}
	case "worker leaves":
		if e.lane != nil {
			m.h.Pipeline.RemoveWorker(e.name, feed.RemovedDiscovery)
			e.lane, e.blocks = nil, make(map[place]map[uint64]struct{})
		}
	case "wait":
		<-time.After(time.Duration(s.a) * 100 * time.Millisecond)
	case "stall": // exceeds the transport's buffers with entries that do not change the state
		for range 40 {
			m.publish(e, at)
			m.batch(e, at.rank, wire.Event{Kind: wire.KindRemoved, Tier: kvblock.Tier(at.tier), BlockHashes: make([]uint64, 8<<10)})
		}
		<-time.After(time.Minute)
	case "server restarts":
		ctx, cancel := context.WithTimeout(m.t.Context(), time.Second)
		defer cancel()
		if err := m.h.Pipeline.Close(ctx); err != nil {
			m.t.Error(err)
		}
		m.h.Server.Shutdown(ctx)
		m.serve()
	case "subscribe":
		return m.subscribe(s)
	case "snapshot":
		return m.snapshot(m.filter(s.b))
	case "replay":
		return m.replay(m.filter(s.b))
	default:
		if len(m.routers) > 0 {
			return m.doRouter(m.routers[s.a%len(m.routers)], s)
		}
	}
	return nil
}

// publish stores a new block or removes a block. It adds the engine if it was removed.
func (m *machine) publish(e *machineEngine, at place) {
	if e.lane == nil {
		m.arrive(e)
	}
	blocks := e.blocks[at]
	if blocks == nil {
		blocks = make(map[uint64]struct{})
		e.blocks[at] = blocks
	}
	if len(blocks) > 20 {
		for hash := range blocks {
			delete(blocks, hash)
			m.batch(e, at.rank, wire.Event{Kind: wire.KindRemoved, Tier: kvblock.Tier(at.tier), BlockHashes: []uint64{hash}})
			return
		}
	}
	m.next++
	blocks[m.next] = struct{}{}
	m.store(e, at, m.next)
}

// snapshot requests a snapshot and compares it with the engines' blocks.
func (m *machine) snapshot(f *kvcastv1.Filter) error {
	c := checker.New(checker.Options{})
	req := &kvcastv1.SnapshotRequest{Filter: f}
	if err := c.BeginSnapshot(req); err != nil {
		return err
	}
	stream, err := m.h.client.Snapshot(m.t.Context(), req)
	if err != nil {
		return err
	}
	for {
		msg, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			if err := c.EndSnapshot(); err != nil {
				return err
			}
			return m.compare(c, f)
		case status.Code(err) == codes.ResourceExhausted:
			return nil // the snapshot timed out while another, which is not read, used the slot
		case err != nil:
			return err
		}
		if err := c.ReceiveSnapshot(msg); err != nil {
			return err
		}
	}
}

// replay reads all retained entries.
func (m *machine) replay(f *kvcastv1.Filter) error {
	c := checker.New(checker.Options{})
	req := &kvcastv1.ReplayRequest{Filter: f}
	if err := c.BeginReplay(req); err != nil {
		return err
	}
	stream, err := m.h.client.Replay(m.t.Context(), req)
	if err != nil {
		return err
	}
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return c.EndReplay()
		}
		if err != nil {
			return err
		}
		if err := c.ReceiveReplay(msg); err != nil {
			return err
		}
	}
}

// compare compares a view with the engines' blocks.
func (m *machine) compare(c *checker.Checker, f *kvcastv1.Filter) error {
	for _, e := range m.engines {
		if !among(f.GetWorkers(), e.name) || !among(f.GetModels(), e.model) {
			continue
		}
		for n := range 2 * 4 {
			at := place{uint32(n % 2), kvcastv1.Tier(1 + n/2)}
			if tiers := f.GetTiers(); len(tiers) > 0 && at.tier != tiers[0] && at.tier != tiers[len(tiers)-1] {
				continue
			}
			if err := c.Converged(e.name, at.rank, at.tier, e.blocks[at]); err != nil {
				return err
			}
		}
	}
	return nil
}

// converge makes all routers catch up with the newest entry.
func (m *machine) converge() error {
	for _, r := range m.routers {
		if err := m.catchUp(r); err != nil {
			return err
		}
		if err := m.compare(r.checker, r.req.GetFilter()); err != nil {
			return fmt.Errorf("router with %v: %w", r.req, err)
		}
	}
	return nil
}

package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

func fromSnapshot(f *kvcastv1.Filter) *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{
		Start:  &kvcastv1.SubscribeRequest_Snapshot{Snapshot: &kvcastv1.FromSnapshot{}},
		Filter: f,
	}
}

// busyEngine generates random batches of a worker from a seed.
type busyEngine struct {
	lane   feed.Lane
	rng    *rand.Rand
	now    int64
	blocks []uint64
}

func (e *busyEngine) step() {
	e.now++
	b := feed.Batch{EngineTime: e.now, IngestTime: e.now, Rank: uint32(e.rng.IntN(2))}
	tier := kvblock.TierDevice
	if e.rng.IntN(5) == 0 {
		tier = kvblock.TierDisk
	}
	for range 1 + e.rng.IntN(3) {
		switch r := e.rng.IntN(200); {
		case r < 120:
			// As in an engine, the hash determines the block's parent: the block before, or that of half the hash.
			ev := wire.Event{Kind: wire.KindStored, Tier: tier, BlockSize: 16}
			first := uint64(e.rng.IntN(5000)) + 1
			for h := first; h < first+20 && (h == first || h%16 != 1); h++ {
				ev.BlockHashes, ev.TokensHashes = append(ev.BlockHashes, h), append(ev.TokensHashes, h*7)
			}
			if ev.HasParent, ev.Parent = first > 1, first-1; first%16 == 1 {
				ev.Parent = first / 2
			}
			e.blocks = append(e.blocks, ev.BlockHashes...)
			b.Events = append(b.Events, ev)
		case r < 199:
			for range e.rng.IntN(10) {
				if len(e.blocks) > 0 {
					b.Events = append(b.Events, wire.Event{Kind: wire.KindRemoved, Tier: tier, BlockHashes: []uint64{e.blocks[e.rng.IntN(len(e.blocks))]}})
				}
			}
		default:
			e.blocks = e.blocks[:0]
			b.Events = append(b.Events, wire.Event{Kind: wire.KindCleared})
		}
	}
	e.lane.Batch(&b)
}

// TestSnapshotPlusEntriesIsTheState subscribes repeatedly from snapshots, while engines publish and workers are added
// and removed.
func TestSnapshotPlusEntriesIsTheState(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSnapshots: 8, StallTimeout: harness.Timeout}}, journal.Config{MaxBytes: 1 << 30})
	steps := testclass.Size(460, 1500)
	var engines sync.WaitGroup
	for n := range 3 {
		engines.Go(func() {
			name := fmt.Sprintf("w%d", n)
			add := func() feed.Lane {
				return h.Pipeline.AddWorker(feed.Worker{Name: name, Model: fmt.Sprintf("m%d", n%2)})
			}
			e := &busyEngine{lane: add(), rng: rand.New(rand.NewPCG(1, uint64(n)))}
			for i := range steps {
				e.step()
				switch {
				case n == 2 && i%250 == 125:
					h.Pipeline.RemoveWorker(name, feed.RemovedDiscovery)
					e.lane, e.blocks = add(), nil
				case i%350 == 349:
					e.lane.Gap(feed.Gap{Rank: 1, Reason: feed.GapReplayUnavailable, FirstSeq: 1, LastSeq: 1, Missed: 1, At: 1})
				case i%450 == 449:
					e.lane.Restarted(feed.Restart{At: 1})
				}
			}
		})
	}
	filters := []*kvcastv1.Filter{
		nil, nil, nil,
		{Workers: []string{"w1", "absent"}},
		{Models: []string{"m0"}},
		{Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DISK}},
		{Workers: []string{"w2"}, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE}},
	}
	type follower struct {
		filter *kvcastv1.Filter
		subs   []*subscription
	}
	all := make([]*follower, len(filters))
	var starting sync.WaitGroup
	for i, f := range filters {
		all[i] = &follower{filter: f}
		starting.Go(func() {
			for range testclass.Size(2, 4) {
				s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(f))
				for done := false; !done; {
					m, err := s.next()
					if err != nil {
						t.Errorf("filter %v: %v", f, err)
						return
					}
					done = m.GetSnapshotEnd() != nil
				}
				all[i].subs = append(all[i].subs, s)
			}
		})
	}
	starting.Wait()
	engines.Wait()
	newest := h.Journal.Bounds().Newest
	for _, f := range all {
		// want is the state after all entries, with the same filter.
		req := earliest()
		req.Filter = f.filter
		unfiltered := h.subscribe(checker.New(checker.Options{}), req)
		last := h.last(t, f.filter)
		unfiltered.until(t, last)
		for i, s := range f.subs {
			s.until(t, last)
			if diff := unfiltered.checker.View().Diff(s.checker.View()); diff != "" {
				t.Errorf("filter %v, snapshot %d, at %d of %d: %s", f.filter, i, last, newest, diff)
			}
		}
	}
}

// last returns the seq of the last entry that a filter selects.
func (h *fixture) last(t *testing.T, f *kvcastv1.Filter) (seq uint64) {
	t.Helper()
	stream, err := h.client.Replay(t.Context(), &kvcastv1.ReplayRequest{Filter: f})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return seq
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetEntries() {
			seq = e.GetSeq()
		}
	}
}

func TestSnapshotReplacesCompactedEntries(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
	h.addWorker()
	h.fill(5000)
	h.append(1 << 40)
	for name, at := range map[string]*kvcastv1.Position{
		"entries are not retained": {Seq: 1},
		"another epoch":            {Epoch: "feed", Seq: 3},
	} {
		t.Run(name, func(t *testing.T) {
			s := h.subscribe(checker.New(checker.Options{}), after(at))
			m, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			if m.GetAccepted().GetMode() != kvcastv1.Accepted_MODE_SNAPSHOT || m.GetPosition() != nil {
				t.Errorf("accepted: got %v, want MODE_SNAPSHOT and no position", m)
			}
			s.until(t, 5002)
			if got := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != 5001 {
				t.Errorf("got %d blocks, want 5001", got)
			}
			h.append(2 << 40)
			if m, err := s.next(); err != nil || len(m.GetEntries()) != 1 {
				t.Errorf("after the snapshot: got %v, %v, want the next entry", m, err)
			}
			h.batch(h.lane, wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{2 << 40}})
			h.batch(h.lane, wire.Event{Kind: wire.KindCleared})
			h.fill(4998)
			h.append(1 << 40)
		})
		h = overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
		h.addWorker()
		h.fill(5000)
		h.append(1 << 40)
	}
}

// gatedJournal blocks Read while its gate is locked.
type gatedJournal struct {
	*follow.Follower
	gate sync.RWMutex
}

func (j *gatedJournal) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	j.gate.RLock()
	defer j.gate.RUnlock()
	return j.Follower.Read(ctx, q)
}

// TestCompactedSubscriberGetsSnapshotInSameStream blocks the reads of a stream, evicts all entries, and unblocks the
// reads.
func TestCompactedSubscriberGetsSnapshotInSameStream(t *testing.T) {
	t.Parallel()
	var j gatedJournal
	h := start(t, harness.InstanceConfig{Journal: journal.Config{MaxBytes: 256 << 10}, WrapJournal: func(f *follow.Follower) server.Journal {
		j.Follower = f
		return &j
	}})
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	if _, err := s.next(); err != nil {
		t.Fatal(err)
	}
	j.gate.Lock()
	h.addWorker()
	hashes := make([]uint64, 8<<10)
	for n := range hashes {
		hashes[n] = uint64(n)
	}
	for range 30 { // much more than the journal keeps
		h.append(hashes...)
	}
	h.append(1 << 50)
	j.gate.Unlock()
	begun := false
	for s.checker.Position().GetSeq() < h.Journal.Bounds().Newest {
		m, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		begun = begun || m.GetSnapshotBegin() != nil
	}
	if !begun {
		t.Error("there was no snapshot, so the test had no effect")
	}
	if got, want := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE), len(hashes)+1; got != want {
		t.Errorf("got %d blocks, want %d", got, want)
	}
}

func TestEmptySnapshot(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	s := h.subscribe(checker.New(checker.Options{}), &kvcastv1.SubscribeRequest{})
	s.untilMessage(t, isSnapshotEnd)
	h.addWorker()
	s.until(t, 1)

	c := checker.New(checker.Options{})
	req := &kvcastv1.SnapshotRequest{Filter: &kvcastv1.Filter{Workers: []string{"absent"}}}
	if err := c.BeginSnapshot(req); err != nil {
		t.Fatal(err)
	}
	stream, err := h.client.Snapshot(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = c.ReceiveSnapshot(m)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := c.EndSnapshot(); err != nil {
		t.Error(err)
	}
}

// messages receives n messages, or fewer if there is an error, and returns the last message.
func (s *subscription) messages(n int) (m *kvcastv1.SubscribeResponse, err error) {
	for range n {
		if m, err = s.next(); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func TestReplay(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
	h.addWorker()
	h.fill(5000)
	b := h.Journal.Bounds()
	at := func(seq uint64) *kvcastv1.Position { return &kvcastv1.Position{Epoch: b.Epoch, Seq: seq} }
	for _, tt := range []struct {
		name        string
		req         *kvcastv1.ReplayRequest
		first, last uint64
	}{
		{"all", &kvcastv1.ReplayRequest{}, b.Oldest, b.Newest},
		{"from a position", &kvcastv1.ReplayRequest{After: at(4900)}, 4901, b.Newest},
		{"to a position", &kvcastv1.ReplayRequest{Until: at(4990)}, b.Oldest, 4990},
		{"without epochs", &kvcastv1.ReplayRequest{After: &kvcastv1.Position{Seq: 4980}, Until: &kvcastv1.Position{Seq: 4981}}, 4981, 4981},
		{"filter by tier", &kvcastv1.ReplayRequest{After: at(4990), Filter: &kvcastv1.Filter{Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE}}}, 4991, b.Newest},
		{"all entries filtered out", &kvcastv1.ReplayRequest{After: at(4990), Filter: &kvcastv1.Filter{Workers: []string{"absent"}}}, 0, 0},
		{"empty range", &kvcastv1.ReplayRequest{After: at(4980), Until: at(4980)}, 0, 0},
		{"after the newest", &kvcastv1.ReplayRequest{After: at(b.Newest)}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stream, err := h.client.Replay(t.Context(), tt.req)
			if err != nil {
				t.Fatal(err)
			}
			c := checker.New(checker.Options{})
			if err := c.BeginReplay(tt.req); err != nil {
				t.Fatal(err)
			}
			var first, last uint64
			for {
				m, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				if err == nil {
					err = c.ReceiveReplay(m)
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range m.GetEntries() {
					if last = e.GetSeq(); first == 0 {
						first = last
					}
				}
			}
			if err := c.EndReplay(); err != nil {
				t.Errorf("end: %v", err)
			}
			if first != tt.first || last != tt.last {
				t.Errorf("got entries %d to %d, want %d to %d", first, last, tt.first, tt.last)
			}
		})
	}
}

func TestStatusCalls(t *testing.T) {
	t.Parallel()
	sources := map[string][]*kvcastv1.SourceStatus{"w": {
		{Endpoint: "tcp://a:1", State: kvcastv1.SourceState_SOURCE_STATE_LIVE, Started: true, LastSeq: 7},
		{Endpoint: "tcp://a:2", State: kvcastv1.SourceState_SOURCE_STATE_CONNECTING, DpRank: 1},
	}}
	sources["absent"] = []*kvcastv1.SourceStatus{{Endpoint: "tcp://b:1", State: kvcastv1.SourceState_SOURCE_STATE_CONNECTING}}
	h := overTCP(t, server.Config{Version: "v1", Sources: func() map[string][]*kvcastv1.SourceStatus { return maps.Clone(sources) }}, journal.Config{})
	h.addWorker()
	h.append(1, 2, 3)
	s := h.subscribe(checker.New(checker.Options{}), earliest())
	s.until(t, 2)
	got, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got.GetOldestSeq() != 1 || got.GetNewestSeq() != 2 || got.GetWorkers() != 1 || got.GetBlocks() != 3 ||
		got.GetSubscribers() != 1 || got.GetVersion() != "v1" || got.GetEpoch() == "" || got.GetJournalBytes() == 0 {
		t.Errorf("status: got %v", got)
	}
	list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	if err != nil || len(list.GetWorkers()) != 2 {
		t.Fatalf("workers: got %v, %v", list, err)
	}
	if w := list.GetWorkers()[1]; w.GetName() != "absent" || w.GetState() != kvcastv1.WorkerState_WORKER_STATE_CONNECTING || len(w.GetSources()) != 1 {
		t.Errorf("a worker without entries: got %v", w)
	}
	list, err = h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: []string{"w"}}})
	if err != nil || len(list.GetWorkers()) != 1 {
		t.Fatalf("one worker: got %v, %v", list, err)
	}
	if w := list.GetWorkers()[0]; w.GetName() != "w" || w.GetState() != kvcastv1.WorkerState_WORKER_STATE_DEGRADED || len(w.GetSources()) != 2 {
		t.Errorf("worker: got %v", w)
	}
	found, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{2, 9}})
	if err != nil || len(found.GetHolders()) != 1 || found.GetHolders()[0].GetWorker() != "w" {
		t.Errorf("lookup: got %v, %v", found, err)
	}
}

// TestSnapshotEndsWithItsClient cancels snapshots in progress.
func TestSnapshotEndsWithItsClient(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSnapshots: 1}}, journal.Config{})
	h.addWorker()
	h.store(testclass.Size(60_000, 200_000))
	for range 3 {
		deadline := time.Now().Add(harness.Timeout)
		for {
			s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
			_, err := s.messages(3)
			s.cancel()
			if err == nil {
				break
			}
			if status.Code(err) != codes.ResourceExhausted || time.Now().After(deadline) {
				t.Fatalf("the slot of the canceled snapshot was not released: %v", err)
			}
		}
	}
}

// TestSnapshotOfIdleWorker reads the blocks of a worker whose last entry is evicted.
func TestSnapshotOfIdleWorker(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{MaxBytes: 64 << 10})
	h.addWorker()
	h.append(1, 2, 3)
	busy := h.Pipeline.AddWorker(feed.Worker{Name: "busy", Model: "m"})
	for n := range uint64(5000) {
		h.batch(busy, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{n % 10}})
	}
	if h.Journal.Bounds().Oldest < 10 {
		t.Fatal("no entry was evicted, so the test has no effect")
	}
	s := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
	s.until(t, h.Journal.Bounds().Newest)
	if got := s.checker.View().Count("w", 0, kvcastv1.Tier_TIER_DEVICE); got != 3 {
		t.Errorf("the idle worker: got %d blocks, want 3", got)
	}
	if got := s.checker.View().Count("busy", 0, kvcastv1.Tier_TIER_DEVICE); got != 10 {
		t.Errorf("the other worker: got %d blocks, want 10", got)
	}
}

// TestFilteredSubscriberGetsProgress appends entries that the filter excludes.
func TestFilteredSubscriberGetsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{Limits: server.Limits{ProgressInterval: time.Second}}, journal.Config{})
		h.addWorker()
		ctx, cancel := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		busy.Go(func() {
			for ctx.Err() == nil {
				h.append(1)
				<-time.After(100 * time.Millisecond)
			}
		})
		req := earliest()
		req.Filter = &kvcastv1.Filter{Workers: []string{"absent"}}
		s := h.subscribe(checker.New(checker.Options{}), req)
		for _, what := range []string{"Accepted", "Progress, when it has caught up"} {
			began := time.Now()
			if m, err := s.next(); err != nil || time.Since(began) > 200*time.Millisecond {
				t.Fatalf("%s: got %v, %v after %v", what, m, err, time.Since(began))
			}
		}
		for range 3 {
			began := time.Now()
			m, err := s.next()
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); m.GetProgress() == nil || took > 1100*time.Millisecond || took < 700*time.Millisecond {
				t.Errorf("got %v after %v, want Progress after about a second", m, took)
			}
		}
		if s.checker.Position().GetSeq() < 20 {
			t.Errorf("the position is %v, although the stream has read further entries", s.checker.Position())
		}
		cancel()
		busy.Wait()
		s.cancel()
		_, _ = s.stream.Recv()
	})
}

// TestWaitingSnapshotSendsHeartbeats makes two streams wait for a snapshot slot while the only slot is in use: one
// before its first position, one after entries.
func TestWaitingSnapshotSendsHeartbeats(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxSnapshots: 1, MaxSnapshotWait: time.Hour, StallTimeout: time.Hour, ProgressInterval: 10 * time.Millisecond}}, journal.Config{MaxBytes: 256 << 10})
	h.addWorker()
	h.store(30_000)
	first, err := h.withSmallWindow().client.Snapshot(t.Context(), &kvcastv1.SnapshotRequest{}) // the snapshot has some 500 KB
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	follows := h.withSmallWindow().subscribe(checker.New(checker.Options{}), latest())
	if _, err := follows.next(); err != nil {
		t.Fatal(err)
	}
	h.store(150_000) // more than 1 MiB of entries; the journal retains 256 KiB
	waiting := h.subscribe(checker.New(checker.Options{}), fromSnapshot(nil))
	for range 3 {
		m, err := waiting.next()
		if err != nil {
			t.Fatal(err)
		}
		if m.GetAccepted() == nil && (m.GetProgress() == nil || m.GetPosition() != nil) {
			t.Fatalf("got %v, want Progress without a position", m)
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	alone, err := h.client.Snapshot(ctx, &kvcastv1.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := alone.Recv(); err != nil || m.GetProgress() == nil || m.GetPosition() != nil {
		t.Fatalf("Snapshot: got %v, %v", m, err)
	}
	leave()
	// The heartbeats of a stream that needs a snapshot after entries have its position.
	for begun := false; !begun; {
		m, err := follows.next()
		if err != nil {
			t.Fatal(err)
		}
		if begun = m.GetProgress() != nil && m.GetPosition() != nil; m.GetSnapshotBegin() != nil {
			t.Fatal("the snapshot did not wait")
		}
	}
	for err == nil { // reads the first snapshot to its end
		_, err = first.Recv()
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	// Either stream may get the slot next, so both are read.
	var all sync.WaitGroup
	defer all.Wait()
	for _, s := range []*subscription{waiting, follows} {
		all.Go(func() {
			for s.checker.Position().GetSeq() < h.Journal.Bounds().Newest {
				if _, err := s.next(); err != nil {
					t.Errorf("at %v: %v", s.checker.Position(), err)
					return
				}
			}
		})
	}
}

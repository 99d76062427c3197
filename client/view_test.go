package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// startedView returns a View whose subscription has started.
func startedView() *client.View {
	v := client.NewView()
	v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
		Epoch: "e", OldestSeq: 1, Mode: kvcastv1.Accepted_MODE_EARLIEST,
	}}})
	return v
}

func entries(e ...*kvcastv1.Entry) client.Update {
	return client.Update{Message: &kvcastv1.SubscribeResponse{Entries: e}}
}

// inAllTiers returns the trust of each tier if it is the same.
func inAllTiers(t kvcastv1.Trust) [kvcastv1.Tier_TIER_EXTERNAL + 1]kvcastv1.Trust {
	return [...]kvcastv1.Trust{0, t, t, t, t}
}

// digestOf returns the digest of a set of blocks.
func digestOf(blocks ...uint64) (d uint64) {
	for _, h := range blocks {
		d ^= kvblock.Digest(h)
	}
	return d
}

// chainOf returns an event that stores a chain of blocks whose contents equal their hashes.
func chainOf(rank uint32, tier kvcastv1.Tier, parent *uint64, blocks ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{DpRank: &rank, Tier: tier, Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
		ParentHash: parent, BlockHashes: blocks, TokensHashes: blocks, BlockSize: 16,
	}}}
}

func removed(rank uint32, tier kvcastv1.Tier, blocks ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{DpRank: &rank, Tier: tier, Event: &kvcastv1.RouterEvent_Removed{
		Removed: &kvcastv1.Removed{BlockHashes: blocks},
	}}
}

func of(worker string, events ...*kvcastv1.RouterEvent) *kvcastv1.Entry {
	return &kvcastv1.Entry{Worker: worker, Model: "m", Events: events}
}

const (
	device = kvcastv1.Tier_TIER_DEVICE
	host   = kvcastv1.Tier_TIER_HOST_PINNED
)

// TestMatch matches a prompt of five blocks with one rank.
func TestMatch(t *testing.T) {
	t.Parallel()
	prompt := []uint64{1, 2, 3, 4, 5}
	two := proto.Uint64(2)
	for _, tt := range []struct {
		name         string
		events       []*kvcastv1.RouterEvent
		blocks       int
		device, host int
	}{
		{"all blocks", []*kvcastv1.RouterEvent{chainOf(0, device, nil, 1, 2, 3, 4, 5)}, 5, 5, 0},
		{"the first blocks", []*kvcastv1.RouterEvent{chainOf(0, device, nil, 1, 2, 9)}, 2, 2, 0},
		{"a removed block", []*kvcastv1.RouterEvent{chainOf(0, device, nil, 1, 2, 3, 4, 5), removed(0, device, 3)}, 2, 2, 0},
		{"a block removed and stored again", []*kvcastv1.RouterEvent{
			chainOf(0, device, nil, 1, 2, 3, 4, 5), removed(0, device, 3), chainOf(0, device, two, 3),
		}, 5, 5, 0},
		{"a block removed from one tier", []*kvcastv1.RouterEvent{
			chainOf(0, device, nil, 1, 2, 3, 4, 5), chainOf(0, host, nil, 1, 2, 3), removed(0, device, 3),
		}, 5, 2, 3},
		{"the last blocks in another tier", []*kvcastv1.RouterEvent{chainOf(0, device, nil, 1, 2), chainOf(0, host, two, 3, 4)}, 4, 2, 0},
		{"a child stored before its parent", []*kvcastv1.RouterEvent{chainOf(0, device, two, 3, 4), chainOf(0, device, nil, 1, 2)}, 4, 4, 0},
		{"a parent removed before its child is stored", []*kvcastv1.RouterEvent{
			chainOf(0, device, nil, 1, 2), removed(0, device, 2), chainOf(0, device, two, 3),
		}, 1, 1, 0},
		{"a parent removed before its child is stored, and stored again", []*kvcastv1.RouterEvent{
			chainOf(0, device, nil, 1, 2), removed(0, device, 2), chainOf(0, device, two, 3), chainOf(0, device, proto.Uint64(1), 2),
		}, 3, 3, 0},
		{"a parent in another rank", []*kvcastv1.RouterEvent{chainOf(1, host, nil, 8, 2), chainOf(0, device, two, 3)}, 0, 0, 0},
		{"the same contents after an unknown parent", []*kvcastv1.RouterEvent{chainOf(0, device, proto.Uint64(77), 1, 2, 3)}, 0, 0, 0},
		{"unknown contents", []*kvcastv1.RouterEvent{{
			DpRank: proto.Uint32(0), Tier: device,
			Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{1, 2}}},
		}}, 0, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := startedView()
			v.Apply(entries(of("other", chainOf(0, device, nil, 1)), of("w", tt.events...)))
			var got client.Match
			for _, m := range v.Match(client.Prompt{TokensHashes: prompt}) {
				if m.Worker == "w" && m.Rank == 0 {
					got = m
				}
			}
			if got.Blocks != tt.blocks || got.TierBlocks[device] != tt.device || got.TierBlocks[host] != tt.host {
				t.Errorf("got %+v, want %d blocks, %d on the device, %d on the host", got, tt.blocks, tt.device, tt.host)
			}
		})
	}
}

func TestMatchIsFilteredAndSorted(t *testing.T) {
	t.Parallel()
	v := startedView()
	added := func(model, endpoint string) *kvcastv1.RouterEvent {
		return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{
			WorkerAdded: &kvcastv1.WorkerAdded{Model: model, Endpoint: endpoint, BlockSize: 16},
		}}
	}
	v.Apply(entries(
		of("c", added("m", "c:80"), chainOf(0, device, nil, 1, 2)),
		of("b", added("m", "b:80"), chainOf(1, host, nil, 1, 2, 3), chainOf(0, device, nil, 1, 2, 3)),
		of("a", added("m", "a:80"), chainOf(0, device, nil, 1, 2)),
		of("x", added("another", "x:80"), chainOf(0, device, nil, 1, 2, 3, 4)),
	))
	match := func(worker string, rank uint32, tier kvcastv1.Tier, blocks int) client.Match {
		m := client.Match{Worker: worker, Model: "m", Endpoint: worker + ":80", Rank: rank, Blocks: blocks, Tokens: 16 * blocks, Trust: kvcastv1.Trust_TRUST_EXACT, TierTrust: inAllTiers(kvcastv1.Trust_TRUST_EXACT)}
		m.TierBlocks[tier], m.TierTokens[tier] = blocks, 16*blocks
		return m
	}
	want := []client.Match{match("b", 0, device, 3), match("b", 1, host, 3), match("a", 0, device, 2), match("c", 0, device, 2)}
	if diff := cmp.Diff(want, v.Match(client.Prompt{Model: "m", TokensHashes: []uint64{1, 2, 3, 4}})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := v.Match(client.Prompt{TokensHashes: []uint64{1, 2, 3, 4}}); len(got) != 5 || got[0].Worker != "x" {
		t.Errorf("any model: got %+v", got)
	}
	for _, none := range []client.Prompt{{}, {Model: "no", TokensHashes: []uint64{1}}, {TokensHashes: []uint64{9}}, {TokensHashes: []uint64{}}, {Tokens: []uint32{1}}} {
		if got := v.Match(none); len(got) > 0 {
			t.Errorf("%+v: got %+v", none, got)
		}
	}
}

func TestMatchHashesTokens(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 100)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	v := startedView()
	for name, of := range map[string]struct {
		size       int
		lora, salt string
	}{"small": {16, "", ""}, "large": {32, "", ""}, "lora": {16, "l", ""}, "salt": {16, "", "s"}} {
		e := stored(name, 0, client.TokensHashes(tokens, of.size, of.lora, of.salt))
		e.Events[0].GetStored().BlockSize = uint32(of.size)
		v.Apply(entries(e))
	}
	for _, tt := range []struct {
		prompt client.Prompt
		want   map[string]int // tokens
	}{
		{client.Prompt{}, map[string]int{"small": 96, "large": 96}},
		{client.Prompt{BlockSize: 32}, map[string]int{"large": 96}},
		{client.Prompt{LoRA: "l"}, map[string]int{"lora": 96}},
		{client.Prompt{Salt: "s", BlockSize: 16}, map[string]int{"salt": 96}},
		{client.Prompt{Eagle: true}, map[string]int{}},
	} {
		got := make(map[string]int)
		tt.prompt.Tokens = tokens
		for _, m := range v.Match(tt.prompt) {
			got[m.Worker] = m.Tokens
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", tt.prompt, diff)
		}
	}
}

func TestWorkers(t *testing.T) {
	t.Parallel()
	v := startedView()
	gap := &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_FORGOTTEN, MissedBatches: 3, FirstSeq: 1, LastSeq: 3}
	added := &kvcastv1.WorkerAdded{Model: "m", Endpoint: "e:1", Labels: map[string]string{"zone": "a"}}
	v.Apply(entries(of("w",
		&kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: added}},
		chainOf(1, host, nil, 5, 6),
		&kvcastv1.RouterEvent{DpRank: proto.Uint32(1), Event: &kvcastv1.RouterEvent_Gap{Gap: gap}},
		&kvcastv1.RouterEvent{DpRank: proto.Uint32(1)}, // of an unknown kind
	)))
	want := client.Worker{Name: "w", Model: "m", BlockSize: 16, Added: added, Ranks: []client.Rank{{
		Rank: 1, Trust: kvcastv1.Trust_TRUST_DEGRADED, Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_GAP},
		Incomplete: true, Gaps: 1, LastGap: gap,
	}}}
	want.Ranks[0].Blocks[host] = client.BlocksDigest{Blocks: 2, XOR: digestOf(5, 6)}
	got, ok := v.Worker("w")
	if diff := cmp.Diff(want, got, cmp.Comparer(proto.Equal)); !ok || diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, ok := v.Worker("x"); ok {
		t.Error("worker x exists")
	}
	if got := v.Holds("w", 1, 6); !slices.Equal(got, []kvcastv1.Tier{host}) {
		t.Errorf("block 6 is in %v, want TIER_HOST_PINNED", got)
	}
	if got := append(v.Holds("w", 0, 6), v.Holds("x", 0, 6)...); len(got) > 0 {
		t.Errorf("got %v, want nothing", got)
	}
}

func TestDigestDifferenceRequestsSnapshot(t *testing.T) {
	digest := func(worker string, seq uint64, blocks ...uint64) *kvcastv1.WorkerDigest {
		return &kvcastv1.WorkerDigest{Worker: worker, Tier: device, Blocks: uint64(len(blocks)), Digest: digestOf(blocks...), Seq: seq}
	}
	withGroups := func(d *kvcastv1.WorkerDigest, blocks uint64) *kvcastv1.WorkerDigest {
		d.GroupBlocks = &blocks
		return d
	}
	for _, tt := range []struct {
		name              string
		filter            *kvcastv1.Filter
		digests           []*kvcastv1.WorkerDigest
		compared, differs uint64
	}{
		{"no digests", nil, nil, 0, 0},
		{"equal", nil, []*kvcastv1.WorkerDigest{digest("w", 2, 7)}, 4, 0},
		{"a worker without blocks", nil, []*kvcastv1.WorkerDigest{digest("x", 2)}, 1, 0},
		{"one more block", nil, []*kvcastv1.WorkerDigest{digest("w", 2, 7, 8)}, 4, 1},
		{"another block", nil, []*kvcastv1.WorkerDigest{digest("w", 2, 8)}, 4, 1},
		{"one more worker", nil, []*kvcastv1.WorkerDigest{digest("w", 2, 7), digest("x", 1, 7)}, 5, 1},
		{"no digest of a tier with blocks", nil, []*kvcastv1.WorkerDigest{{Worker: "w", Tier: host, Seq: 2}}, 4, 1},
		{"no digest of a rank with blocks", nil, []*kvcastv1.WorkerDigest{{Worker: "w", DpRank: 1, Tier: device, Seq: 2}}, 5, 1},
		{"no block of another group", nil, []*kvcastv1.WorkerDigest{withGroups(digest("w", 2, 7), 0)}, 4, 0},
		{"a block of another group", nil, []*kvcastv1.WorkerDigest{withGroups(digest("w", 2, 7), 1)}, 4, 1},
		{"an unknown tier", nil, []*kvcastv1.WorkerDigest{{Worker: "w", Tier: 9, Blocks: 1, Seq: 2}}, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := play(t, script{messages: earliest(two(), progress(2, tt.digests...))}, script{messages: snapshot(9)})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				v := client.NewView()
				var cause *client.DigestError
				for u, err := range s.client.Subscribe(ctx, client.Config{Start: client.FromEarliest(), Digests: true, IdleTimeout: -1, Filter: tt.filter}) {
					if err != nil {
						t.Fatal(err)
					}
					v.Apply(u)
					if u.Interruption != nil {
						errors.As(u.Interruption.Err, &cause)
					}
					if u.Message.GetSnapshotEnd() != nil || tt.differs == 0 && u.Message.GetProgress() != nil {
						cancel()
					}
				}
				got := v.Status()
				if got.Compared != tt.compared || got.Differed != tt.differs {
					t.Errorf("got %+v, want %d compared, %d differed", got, tt.compared, tt.differs)
				}
				if tt.differs > 0 && (cause == nil || got.Snapshots != 1 || s.requests()[1].GetSnapshot() == nil) {
					t.Errorf("cause %v, %+v; requests %v", cause, got, s.requests())
				}
				if tt.differs > 0 && cause.Groups != (tt.name == "a block of another group") {
					t.Errorf("got %v", cause)
				}
			})
		})
	}
}

func TestChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := client.NewView()
		ctx, cancel := context.WithCancel(t.Context())
		var got []client.Change
		var mu sync.Mutex
		done := make(chan struct{})
		go func() {
			defer close(done)
			for c := range v.Changes(ctx) {
				mu.Lock()
				got = append(got, c)
				mu.Unlock()
			}
		}()
		last := func() client.Change {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return got[len(got)-1]
		}
		if c := last(); c.Status.Ready || len(c.Workers) > 0 {
			t.Errorf("first: got %+v", c)
		}
		for i, m := range snapshot(9) {
			u := client.Update{Message: m}
			if i == 4 {
				u.Position = client.Position{Epoch: "e", Seq: 9}
			}
			v.Apply(u)
		}
		if c := last(); !c.Status.Ready || !c.Snapshot || !slices.Equal(c.Workers, []string{"w"}) || c.Status.Position.Seq != 9 {
			t.Errorf("after a snapshot: got %+v", c)
		}
		v.Apply(client.Update{Message: message(9, entryOf(10, "x", workerAdded(1)), entryOf(11, "w", store(4, 1))), Position: client.Position{Epoch: "e", Seq: 11}})
		synctest.Wait()
		mu.Lock()
		var names []string
		for _, c := range got[2:] {
			names = append(names, c.Workers...)
		}
		mu.Unlock()
		slices.Sort(names)
		if c := last(); c.Snapshot || c.Status.Position.Seq != 11 || !slices.Equal(slices.Compact(names), []string{"w", "x"}) {
			t.Errorf("after two entries: got %+v, of %v", c, names)
		}
		v.Apply(client.Update{Interruption: &client.Interruption{}})
		if c := last(); c.Status.Live {
			t.Errorf("after an interruption: got %+v", c)
		}
		n := len(got)
		v.Apply(client.Update{Interruption: &client.Interruption{}})
		if last(); len(got) != n {
			t.Errorf("an empty change: %+v", got[n:])
		}
		cancel()
		<-done
	})
}

func TestWaitReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := client.NewView()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := v.WaitReady(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		ready := make(chan error)
		go func() { ready <- v.WaitReady(t.Context()) }()
		synctest.Wait()
		for _, m := range snapshot(9) {
			v.Apply(client.Update{Message: m})
		}
		if err := <-ready; err != nil {
			t.Error(err)
		}
	})
}

// TestReadersSeeCompleteEntries queries a View concurrently with entries that store or remove a chain of four blocks,
// and with snapshots.
func TestReadersSeeCompleteEntries(t *testing.T) {
	t.Parallel()
	const rounds = 300
	v := startedView()
	v.Apply(entries(of("w", chainOf(0, device, nil, 1, 2, 3, 4))))
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				for _, m := range v.Match(client.Prompt{TokensHashes: []uint64{1, 2, 3, 4}}) {
					if m.Blocks != 4 {
						t.Errorf("got %+v, want all blocks or none", m)
						return
					}
				}
				for _, w := range v.Workers() {
					for _, r := range w.Ranks {
						if n := r.Blocks[device].Blocks; n%4 != 0 {
							t.Errorf("%s has %d blocks, want 4 of each chain", w.Name, n)
							return
						}
					}
				}
				_ = v.Status()
			}
		})
	}
	for i := range rounds {
		name := fmt.Sprintf("w%d", i%3)
		v.Apply(entries(of(name, chainOf(0, device, nil, 1, 2, 3, 4)), of(name, removed(0, device, 1, 2, 3, 4)), of(name, chainOf(0, device, nil, 1, 2, 3, 4))))
		if i%10 == 9 {
			end := snapshot(9)
			end[3].SnapshotBlocks[0].Events = []*kvcastv1.RouterEvent{chainOf(0, device, nil, 1, 2), chainOf(0, device, proto.Uint64(2), 3, 4)}
			for _, m := range end[1:] {
				v.Apply(client.Update{Message: m})
			}
		}
	}
	close(done)
	readers.Wait()
}

// TestViewHasNewestBlockSize restarts an engine with another block size. One View follows the entries, another starts
// with a snapshot afterwards.
func TestViewHasNewestBlockSize(t *testing.T) {
	t.Parallel()
	chain := func(size uint32, hash uint64) *kvcastv1.RouterEvent {
		ev := chainOf(0, device, nil, hash)
		ev.GetStored().BlockSize = size
		return ev
	}
	want := func(v *client.View, size uint32) {
		t.Helper()
		if got, _ := v.Worker("w"); got.BlockSize != size {
			t.Errorf("block size: got %d, want %d", got.BlockSize, size)
		}
		m := v.Match(client.Prompt{TokensHashes: []uint64{2}})
		if len(m) != 1 || m[0].Tokens != int(size) {
			t.Errorf("match: got %+v, want %d tokens", m, size)
		}
	}
	v := startedView()
	v.Apply(entries(of("w", &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{}}}, chain(16, 2))))
	want(v, 16)
	v.Apply(entries(of("w",
		&kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Cleared{
			Cleared: &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_RESTARTED},
		}},
		chain(32, 2), chain(0, 9),
	)))
	want(v, 32)

	fresh := client.NewView()
	for _, m := range []*kvcastv1.SubscribeResponse{
		{SnapshotBegin: &kvcastv1.SnapshotBegin{}},
		{SnapshotWorker: &kvcastv1.SnapshotWorker{Worker: "w", Added: &kvcastv1.WorkerAdded{BlockSize: 32}}},
		// A snapshot may have blocks of a rank that has not restarted yet.
		{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{{Worker: "w", Events: []*kvcastv1.RouterEvent{chain(32, 2), chain(16, 3)}}}},
		{SnapshotEnd: &kvcastv1.SnapshotEnd{}},
	} {
		fresh.Apply(client.Update{Message: m})
	}
	want(fresh, 32)
	fresh.Apply(entries(of("w", chain(64, 5))))
	want(fresh, 64)
}

// clearing returns an entry that stores blocks and clears the rank, many times.
func clearing(times int, stored ...uint64) *kvcastv1.Entry {
	e := of("w")
	for range times {
		if len(stored) > 0 {
			e.Events = append(e.Events, chainOf(0, device, nil, stored...))
		}
		e.Events = append(e.Events, &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Cleared{
			Cleared: &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_CLEARED},
		}})
	}
	return e
}

// TestViewWithoutAStreamIsStale ends the stream, after which the state may differ from that of the servers more and more.
func TestViewWithoutAStreamIsStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := client.NewView()
		first, second := earliest(two()), resumed(2)
		first[0].Accepted.NewestSeq, second.Accepted.NewestSeq = 2, 2
		updates := play(t, script{first, status.Error(codes.Unavailable, "gone")}, script{messages: []*kvcastv1.SubscribeResponse{second}}).
			client.Subscribe(t.Context(), client.Config{Start: client.FromEarliest()})
		match := func() client.Match {
			t.Helper()
			all := v.Match(client.Prompt{Model: "m", TokensHashes: []uint64{7}, BlockSize: 16})
			if len(all) != 1 {
				t.Fatalf("got %d matches, want 1", len(all))
			}
			return all[0]
		}
		streams := 0
		for u, err := range updates {
			if err != nil {
				t.Fatal(err)
			}
			v.Apply(u)
			if u.Message.GetAccepted() != nil {
				streams++
			}
			if u.Interruption == nil && v.Status().Position.Seq == 2 {
				if m := match(); m.Age != 0 || m.Trust != kvcastv1.Trust_TRUST_EXACT {
					t.Errorf("in stream %d: age %v, %v", streams, m.Age, m.Trust)
				}
			}
			if streams == 2 {
				return
			}
			if u.Interruption == nil {
				continue
			}
			time.Sleep(client.StaleAfter)
			if m := match(); m.Age != client.StaleAfter || m.Trust != kvcastv1.Trust_TRUST_EXACT || len(m.Reasons) != 0 {
				t.Errorf("after %v: age %v, %v, %v", client.StaleAfter, m.Age, m.Trust, m.Reasons)
			}
			time.Sleep(time.Nanosecond)
			m := match()
			if m.Trust != kvcastv1.Trust_TRUST_DEGRADED || m.TierTrust[kvcastv1.Tier_TIER_DEVICE] != m.Trust ||
				!slices.Equal(m.Reasons, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_STALE}) {
				t.Errorf("later: %v, %v in the device, %v", m.Trust, m.TierTrust[kvcastv1.Tier_TIER_DEVICE], m.Reasons)
			}
		}
	})
}

// TestViewOfASilentStreamGrowsOlder has a stream without messages, which may be cut off, then one more, and its end.
func TestViewOfASilentStreamGrowsOlder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := client.NewView()
		position := client.Position{Epoch: "e", Seq: 2}
		v.Apply(client.Update{Position: position, Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
			Epoch: "e", NewestSeq: 2, Mode: kvcastv1.Accepted_MODE_RESUME, ProgressIntervalNano: uint64(time.Second),
		}}})
		message := func() {
			v.Apply(client.Update{Position: position, Message: entries(entryOf(3, "w", workerAdded(1), store(2, 7))).Message})
		}
		want := func(after, age time.Duration, reasons ...kvcastv1.DegradedReason) {
			t.Helper()
			time.Sleep(after) // simulated
			all := v.Match(client.Prompt{TokensHashes: []uint64{7}})
			if len(all) != 1 || all[0].Age != age || !slices.Equal(all[0].Reasons, reasons) {
				t.Errorf("got %+v, want age %v and %v", all, age, reasons)
			}
		}
		message()
		want(2*time.Second, 0)
		want(time.Nanosecond, 2*time.Second+1)
		want(time.Second, 3*time.Second+1, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
		message()
		want(0, 0)
		want(time.Second, 0)
		v.Apply(client.Update{Interruption: &client.Interruption{Err: client.ErrIdle}})
		want(0, time.Second)
		want(2*time.Second+1, 3*time.Second+1, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
	})
}

// TestViewThatFallsBehindGrowsOlder has messages that say what the newest entry was when they were sent. The View has all that there was at the message
// whose newest entry it has reached.
func TestViewThatFallsBehindGrowsOlder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, began := client.NewView(), time.Now()
		v.Apply(client.Update{Position: client.Position{Epoch: "e", Seq: 2}, Message: &kvcastv1.SubscribeResponse{Accepted: &kvcastv1.Accepted{
			Epoch: "e", NewestSeq: 2, Mode: kvcastv1.Accepted_MODE_RESUME, ProgressIntervalNano: uint64(time.Second),
		}}})
		v.Apply(entries(entryOf(3, "w", workerAdded(1), store(2, 7))))
		for _, step := range []struct {
			position, newest uint64
			age              time.Duration // a second after the step before
		}{
			{3, 3, 0},                 // at second 1
			{4, 10, time.Second},      // it had all that there was at second 1
			{8, 20, 2 * time.Second},  //
			{9, 30, 3 * time.Second},  //
			{10, 40, 3 * time.Second}, // and now what there was at second 2
			{20, 40, 4 * time.Second}, // it has not reached 40, which was the newest at second 5
			{40, 50, 2 * time.Second}, // second 5
			{50, 0, 0},
		} {
			time.Sleep(time.Second) // simulated
			v.Apply(client.Update{Position: client.Position{Epoch: "e", Seq: step.position}, Message: &kvcastv1.SubscribeResponse{
				Progress: &kvcastv1.Progress{}, NewestSeq: step.newest,
			}})
			all := v.Match(client.Prompt{TokensHashes: []uint64{7}})
			stale := step.age > client.StaleAfter
			if len(all) != 1 || all[0].Age != step.age || (all[0].Trust == kvcastv1.Trust_TRUST_DEGRADED) != stale {
				t.Errorf("second %v, position %d: got %+v, want age %v", time.Since(began).Seconds(), step.position, all, step.age)
			}
		}
	})
}

// TestViewIsStaleAfterItsSubscription ends the subscription of a view with an error.
func TestViewIsStaleAfterItsSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := startedView()
		ended := errors.New("as if refused")
		err := v.Follow(func(yield func(client.Update, error) bool) {
			_ = yield(entries(entryOf(1, "w", workerAdded(1), store(2, 7))), nil) && yield(client.Update{}, ended)
		})
		if !errors.Is(err, ended) || v.Status().Live {
			t.Fatalf("got error %v and %+v", err, v.Status())
		}
		time.Sleep(client.StaleAfter + 1) // simulated
		all := v.Match(client.Prompt{TokensHashes: []uint64{7}})
		if len(all) != 1 || !slices.Equal(all[0].Reasons, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_STALE}) {
			t.Errorf("got %+v, want a stale match", all)
		}
	})
}

// TestViewThatDiffersIsNotExact has a digest of the server that the View's blocks do not have.
func TestViewThatDiffersIsNotExact(t *testing.T) {
	v := startedView()
	at := client.Position{Epoch: "e", Seq: 1}
	v.Apply(client.Update{Message: entries(of("w", chainOf(0, device, nil, 1, 2))).Message, Position: at})
	v.Apply(client.Update{Position: at, Message: &kvcastv1.SubscribeResponse{
		Position: &kvcastv1.Position{Epoch: "e", Seq: 1},
		Progress: &kvcastv1.Progress{Workers: []*kvcastv1.WorkerDigest{{Worker: "w", Tier: device, Blocks: 1, Digest: digestOf(1)}}},
	}})
	if got := v.Status().Differed; got != 1 {
		t.Fatalf("%d differences", got)
	}
	if m := v.Match(client.Prompt{TokensHashes: []uint64{1, 2}})[0]; m.Trust != kvcastv1.Trust_TRUST_DEGRADED {
		t.Errorf("%d blocks, %v", m.Blocks, m.Trust)
	}
}

// TestWorkersOfAViewAreStale has a View whose stream has ended, and one that does not catch up.
func TestWorkersOfAViewAreStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := startedView()
		at := client.Position{Epoch: "e", Seq: 1}
		v.Apply(client.Update{Message: entries(of("w", chainOf(0, device, nil, 1))).Message, Position: at})
		want := func(want kvcastv1.Trust, reasons ...kvcastv1.DegradedReason) {
			t.Helper()
			w, _ := v.Worker("w")
			for _, w := range append(v.Workers(), w) {
				if r := w.Ranks[0]; r.Trust != want || !slices.Equal(r.Reasons, reasons) {
					t.Errorf("%v, %v; want %v, %v", r.Trust, r.Reasons, want, reasons)
				}
			}
			if m := v.Match(client.Prompt{TokensHashes: []uint64{1}})[0]; m.Trust != want {
				t.Errorf("match: %v, want %v", m.Trust, want)
			}
		}
		v.Apply(client.Update{Interruption: &client.Interruption{}})
		time.Sleep(client.StaleAfter)
		want(kvcastv1.Trust_TRUST_EXACT)
		time.Sleep(time.Second)
		want(kvcastv1.Trust_TRUST_DEGRADED, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
		accepted := &kvcastv1.Accepted{Epoch: "e", OldestSeq: 1, NewestSeq: 2, Mode: kvcastv1.Accepted_MODE_RESUME}
		v.Apply(client.Update{Message: &kvcastv1.SubscribeResponse{Accepted: accepted}, Position: at})
		want(kvcastv1.Trust_TRUST_DEGRADED, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
		at.Seq++
		v.Apply(client.Update{Message: entries(of("w", chainOf(0, device, nil, 1))).Message, Position: at})
		want(kvcastv1.Trust_TRUST_EXACT)
	})
}

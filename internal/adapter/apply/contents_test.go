package apply_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/adapter/apply"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestContents has a pool and a worker that loads from it, with blocks in several tiers, with adapters, and of unknown content.
func TestContents(t *testing.T) {
	w, now := newWorld(t), time.Now()
	stored := func(tier kvcastv1.Tier, s *kvcastv1.Stored) *kvcastv1.RouterEvent {
		s.BlockSize = 2
		return &kvcastv1.RouterEvent{Tier: tier, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: s}}
	}
	pool, member := added(), added()
	pool.GetWorkerAdded().Pool = true
	member.GetWorkerAdded().Pools = []string{"p"}
	const device, external = kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_EXTERNAL
	w.append("p", now, pool)
	w.append("a", now, member, stored(device, &kvcastv1.Stored{BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{11, 12}, LoraName: proto.String("lora")}))
	got, begun, read := make(chan feed.Content, 100), make(chan struct{}), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		read <- apply.Contents(w.follower, w.index, slog.New(slog.DiscardHandler))(ctx, "p", feed.Learner{
			Tier: kvblock.TierDevice,
			Stored: func(all []feed.Content, _ bool) {
				for _, c := range all {
					got <- c
				}
			},
			Begun: func() { close(begun) },
		})
	}()
	<-begun
	w.append("p", now, stored(external, &kvcastv1.Stored{BlockHashes: []uint64{3}, TokensHashes: []uint64{13}, ParentHash: proto.Uint64(2)}))
	w.append("a", now,
		stored(external, &kvcastv1.Stored{BlockHashes: []uint64{4}, TokensHashes: []uint64{14}}), // of a connector
		stored(device, &kvcastv1.Stored{BlockHashes: []uint64{5}}),                               // of unknown content
		remove(1),
		stored(device, &kvcastv1.Stored{BlockHashes: []uint64{6}, TokensHashes: []uint64{16}, ParentHash: proto.Uint64(0)}),
	)
	for _, want := range []feed.Content{
		{Hash: 1, TokensHash: 11, Tokens: 2, LoRA: "lora"},
		{Hash: 2, Parent: 1, HasParent: true, TokensHash: 12, Tokens: 2, LoRA: "lora"},
		{Hash: 3, Parent: 2, HasParent: true, TokensHash: 13, Tokens: 2},
		{Hash: 6, HasParent: true, TokensHash: 16, Tokens: 2},
	} {
		select {
		case c := <-got:
			if diff := cmp.Diff(want, c); diff != "" {
				t.Fatalf("(-want +got):\n%s", diff)
			}
		case <-time.After(patience):
			t.Fatalf("no content; want %+v", want)
		}
	}
	cancel()
	if err := <-read; err == nil {
		t.Error("the contents ended without an error")
	}
	if len(got) > 0 {
		t.Errorf("%+v follows", <-got)
	}
}

// TestContentsOfCopies has a pool that learns from files, of whose blocks device memory holds some, and a worker of another model. A connector does not tell adapters and images.
func TestContentsOfCopies(t *testing.T) {
	w, now := newWorld(t), time.Now()
	stored := func(tier kvcastv1.Tier, hash uint64, tokens []uint64, lora string) *kvcastv1.RouterEvent {
		s := &kvcastv1.Stored{BlockSize: 2, BlockHashes: []uint64{hash}, TokensHashes: tokens}
		if lora != "" {
			s.LoraName = &lora
		}
		return &kvcastv1.RouterEvent{Tier: tier, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: s}}
	}
	const device, disk = kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_DISK
	pool, member, other := added(), added(), added()
	pool.GetWorkerAdded().Pool = true
	member.GetWorkerAdded().Pools, other.GetWorkerAdded().Pools = []string{"p"}, []string{"p"}
	other.GetWorkerAdded().Model = "another"
	w.append("other", now, other, stored(disk, 9, []uint64{19}, ""))
	w.append("a", now, member, stored(device, 1, []uint64{11}, "lora"), stored(disk, 1, []uint64{91}, ""))
	got := make(chan feed.Content, 100)
	ctx, cancel := context.WithCancel(t.Context())
	begun, read := make(chan struct{}, 10), make(chan error, 1)
	go func() {
		read <- apply.Contents(w.follower, w.index, slog.New(slog.DiscardHandler))(ctx, "p", feed.Learner{
			Tier: kvblock.TierDisk, Begun: func() { begun <- struct{}{} },
			Stored: func(all []feed.Content, _ bool) {
				for _, c := range all {
					got <- c
				}
			},
		})
	}()
	<-begun // without the pool, of which the model is not known
	w.append("p", now, pool)
	want := func(want feed.Content) {
		t.Helper()
		select {
		case c := <-got:
			if diff := cmp.Diff(want, c); diff != "" {
				t.Fatalf("(-want +got):\n%s", diff)
			}
		case <-time.After(patience):
			t.Fatalf("no content; want %+v", want)
		}
	}
	want(feed.Content{Hash: 1, TokensHash: 11, Tokens: 2, LoRA: "lora"})
	w.append("other", now, stored(disk, 9, []uint64{19}, ""))
	w.append("a", now, stored(device, 2, nil, ""), stored(disk, 2, []uint64{12}, ""), stored(device, 3, []uint64{13}, ""), stored(disk, 3, []uint64{93}, ""))
	want(feed.Content{Hash: 3, TokensHash: 13, Tokens: 2})
	w.append("a", now, stored(disk, 4, []uint64{14}, ""))
	want(feed.Content{Hash: 4, TokensHash: 14, Tokens: 2})
	cancel()
	<-read
	if len(got) > 0 {
		t.Errorf("%+v follows", <-got)
	}
}

// TestContentsOfPools has the pools of two models, and a worker.
func TestContentsOfPools(t *testing.T) {
	w, now := newWorld(t), time.Now()
	stored := func(hash uint64) *kvcastv1.RouterEvent {
		return &kvcastv1.RouterEvent{Tier: kvcastv1.Tier_TIER_EXTERNAL, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{
			BlockSize: 2, BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash},
		}}}
	}
	pool := func(model string) *kvcastv1.RouterEvent {
		event := added()
		event.GetWorkerAdded().Pool, event.GetWorkerAdded().Model = true, model
		return event
	}
	w.append("p", now, pool("m"), stored(1))
	w.append("q", now, pool("m"), stored(2), remove(3))
	w.append("r", now, pool("n"), stored(4))
	w.append("s", now, added(), stored(5))
	type content struct {
		hash   uint64
		ofPool bool
	}
	got, begun, read := make(chan content, 100), make(chan struct{}), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		read <- apply.Contents(w.follower, w.index, slog.New(slog.DiscardHandler))(ctx, "p", feed.Learner{
			Tier: kvblock.TierExternal, PoolsOf: "m", Begun: func() { close(begun) }, Removed: func([]uint64) {},
			Stored: func(all []feed.Content, ofPool bool) {
				for _, c := range all {
					got <- content{c.Hash, ofPool}
				}
			},
		})
	}()
	<-begun
	w.append("q", now, stored(6))
	all := make(map[content]bool)
	for range 3 {
		select {
		case c := <-got:
			all[c] = true
		case <-time.After(patience):
			t.Fatalf("no more than %v", all)
		}
	}
	cancel()
	<-read
	if diff := cmp.Diff(map[content]bool{{1, true}: true, {2, false}: true, {6, false}: true}, all, cmp.AllowUnexported(content{})); diff != "" || len(got) > 0 {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

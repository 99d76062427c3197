package demo

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// received returns a router that has received a worker and some blocks.
func received(blocks int) *router {
	r := newRouter(nil)
	seq := uint64(0)
	r.next = func() (client.Update, error) {
		seq++
		ev := stored(seq, 0, kvcastv1.Tier_TIER_DEVICE)
		if seq == 1 {
			ev = &kvcastv1.RouterEvent{EventId: seq, Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{}}}
		}
		return update("engine-0", ev), nil
	}
	if err := r.receiveUntil(func() bool { return len(r.entries) > blocks }, nil); err != nil {
		panic(err) // all updates are valid
	}
	return r
}

// stored returns a store of one block, whose hash is the event id.
func stored(id uint64, rank uint32, tier kvcastv1.Tier) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{
		EventId: id, DpRank: proto.Uint32(rank), Tier: tier,
		Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{id}, BlockSize: 16}},
	}
}

// update returns an update with an entry of one event. Its seq is the event id.
func update(worker string, ev *kvcastv1.RouterEvent) client.Update {
	e := &kvcastv1.Entry{Seq: ev.GetEventId(), Worker: worker, Events: []*kvcastv1.RouterEvent{ev}}
	return client.Update{
		Message: &kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{e}}, Position: client.Position{Epoch: "e", Seq: e.GetSeq()},
	}
}

// A router that is interrupted does not report a timeout.
func TestReceiveReportsWhyItEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	conn, err := grpc.NewClient("passthrough:///unused", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	r := newRouter(client.FromConn(conn))
	r.connect(ctx, client.FromEarliest())
	defer r.disconnect()
	if err := r.receiveUntil(func() bool { return false }, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

// TestCheckFails breaks each check.
func TestCheckFails(t *testing.T) {
	const blocks = 5
	digest := received(blocks).blocks("engine-0").XOR
	engines := func() []simulator.Summary { return []simulator.Summary{{Blocks: blocks, Digest: digest}} }
	for _, tt := range []struct {
		name  string
		spoil func(router, other *router, engines []simulator.Summary)
		fails int
	}{
		{"nothing is wrong", func(_, _ *router, _ []simulator.Summary) {}, 0},
		{"an entry is missing", func(router, _ *router, _ []simulator.Summary) {
			router.entries = append(router.entries[:2:2], router.entries[3:]...)
		}, 2},
		{"an entry came twice", func(router, _ *router, _ []simulator.Summary) {
			router.entries = append(router.entries, router.entries[5])
		}, 2},
		{"the last entry is missing", func(router, _ *router, _ []simulator.Summary) {
			router.entries = router.entries[:5]
		}, 1},
		{"the other router received another entry", func(_, other *router, _ []simulator.Summary) {
			other.entries[3].Worker = "engine-1"
		}, 1},
		{"the engine has another number of blocks", func(_, _ *router, engines []simulator.Summary) { engines[0].Blocks++ }, 2},
		{"the engine has other blocks", func(_, _ *router, engines []simulator.Summary) { engines[0].Digest++ }, 2},
		{"the view has a block in another tier", func(router, _ *router, _ []simulator.Summary) {
			router.view.Apply(update("engine-0", stored(blocks+2, 0, kvcastv1.Tier_TIER_DISK)))
		}, 1},
		{"the view has a block of another rank", func(router, _ *router, _ []simulator.Summary) {
			router.view.Apply(update("engine-0", stored(blocks+2, 1, kvcastv1.Tier_TIER_DEVICE)))
		}, 1},
		{"the view has another worker", func(router, _ *router, _ []simulator.Summary) {
			router.view.Apply(update("engine-1", stored(blocks+2, 0, kvcastv1.Tier_TIER_DEVICE)))
		}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			router, other, engines := received(blocks), received(blocks), engines()
			tt.spoil(router, other, engines)
			var out bytes.Buffer
			err := (&demo{out: &out}).check(router, other, received(blocks), 3, engines)
			if got := strings.Count(out.String(), "FAILED  "); got != tt.fails {
				t.Errorf("%d checks failed, want %d:\n%s", got, tt.fails, &out)
			}
			if wrong := tt.fails > 0; errors.Is(err, cli.ErrSilent) != wrong || (err != nil) != wrong {
				t.Errorf("error: got %v", err)
			}
		})
	}
}

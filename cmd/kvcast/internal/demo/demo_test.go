package demo

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// received returns a router that has received a worker and some blocks.
func received(t *testing.T, blocks int) *router {
	t.Helper()
	f := &router{checker: checker.New(checker.Options{})}
	req := &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
	if err := f.checker.Begin(req); err != nil {
		t.Fatal(err)
	}
	receive := func(m *kvcastv1.SubscribeResponse) {
		t.Helper()
		if err := f.checker.Receive(m); err != nil {
			t.Fatal(err)
		}
		f.entries = append(f.entries, m.GetEntries()...)
	}
	receive(&kvcastv1.SubscribeResponse{
		Accepted: &kvcastv1.Accepted{Epoch: "e", OldestSeq: 1, Mode: kvcastv1.Accepted_MODE_EARLIEST},
		Position: &kvcastv1.Position{Epoch: "e"},
	})
	for seq := uint64(1); seq <= uint64(blocks)+1; seq++ {
		e := &kvcastv1.Entry{Seq: seq, Worker: "engine-0"}
		ev := &kvcastv1.RouterEvent{EventId: seq, Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{}}}
		if seq > 1 {
			e.EngineTimeUnixNano, e.IngestTimeUnixNano = int64(seq), int64(seq)
			ev = &kvcastv1.RouterEvent{
				EventId: seq, DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE,
				Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{seq}, BlockSize: 16}},
			}
		}
		e.Events = []*kvcastv1.RouterEvent{ev}
		receive(&kvcastv1.SubscribeResponse{
			Entries: []*kvcastv1.Entry{e}, Position: &kvcastv1.Position{Epoch: "e", Seq: seq}, PrevSeq: seq - 1,
		})
	}
	return f
}

// TestCheckFails breaks each check.
func TestCheckFails(t *testing.T) {
	const blocks = 5
	digest := received(t, blocks).checker.View().Digest("engine-0", 0, kvcastv1.Tier_TIER_DEVICE)
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
		{"the engine has another number of blocks", func(_, _ *router, engines []simulator.Summary) { engines[0].Blocks++ }, 1},
		{"the engine has other blocks", func(_, _ *router, engines []simulator.Summary) { engines[0].Digest++ }, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			router, other, engines := received(t, blocks), received(t, blocks), engines()
			tt.spoil(router, other, engines)
			var out bytes.Buffer
			err := (&demo{out: &out}).check(router, other, received(t, blocks).checker, 3, engines)
			if got := strings.Count(out.String(), "FAILED  "); got != tt.fails {
				t.Errorf("%d checks failed, want %d:\n%s", got, tt.fails, &out)
			}
			if wrong := tt.fails > 0; errors.Is(err, cli.ErrSilent) != wrong || (err != nil) != wrong {
				t.Errorf("error: got %v", err)
			}
		})
	}
}

package demo

import (
	"bytes"
	"errors"
	"strings"
	"testing"

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
	r.next = func() (client.Update, error, bool) {
		seq++
		e := &kvcastv1.Entry{Seq: seq, Worker: "engine-0"}
		ev := &kvcastv1.RouterEvent{EventId: seq, Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{}}}
		if seq > 1 {
			ev = &kvcastv1.RouterEvent{
				EventId: seq, DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE,
				Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{seq}, BlockSize: 16}},
			}
		}
		e.Events = []*kvcastv1.RouterEvent{ev}
		return client.Update{
			Message: &kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{e}}, Position: client.Position{Epoch: "e", Seq: seq},
		}, nil, true
	}
	if err := r.receiveUntil(func() bool { return len(r.entries) > blocks }, nil); err != nil {
		panic(err) // all updates are valid
	}
	return r
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

package index_test

import (
	"fmt"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// chunkWorld has a rank with blocks of 4 tokens: 1 to 3 on the device, 1 to 8 in host memory, of which a connector keeps chunks of 16 tokens, and 1 to 2 on
// disk.
func chunkWorld() *index.Index {
	x := index.New()
	hashes := []uint64{1, 2, 3, 4, 5, 6, 7, 8}
	stored := func(tier kvcastv1.Tier, n int) *kvcastv1.RouterEvent {
		e := event(0, &kvcastv1.Stored{BlockHashes: hashes[:n], BlockSize: 4, TokensHashes: hashes[:n]})
		e.Tier = tier
		return e
	}
	x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{
		event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 4, Ranks: []uint32{0}}),
		stored(kvcastv1.Tier_TIER_DEVICE, 3), stored(kvcastv1.Tier_TIER_HOST_PINNED, 8), stored(kvcastv1.Tier_TIER_DISK, 2),
		event(0, &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_CONNECTOR_TIER, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_HOST_PINNED}, ChunkTokens: 16}),
	}})
	return x
}

// matchChunks returns the blocks of the match of a prompt, those of its tiers, and its walk.
func matchChunks(x *index.Index, limit int, hashes ...uint64) string {
	var found index.Matches
	x.Match(&index.Query{Model: "m", Limit: limit, Walk: limit == 0, Prompts: []index.Prompt{{TokensHashes: hashes}}}, &found)
	text := ""
	for _, m := range found.Prompts[0] {
		text += fmt.Sprintf("%d %v", m.Blocks, m.TierBlocks)
		if limit == 0 {
			text += fmt.Sprintf(" %v", m.Walk)
		}
	}
	return text
}

func TestWholeChunksMatch(t *testing.T) {
	for _, tt := range []struct {
		hashes []uint64
		want   string
		walk   string
	}{
		{[]uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}, "8 [3 8 2 0]", " [3 8 8 8]"},
		{[]uint64{1, 2, 3, 4, 5, 6, 7}, "4 [3 4 2 0]", " [3 4 4 4]"},
		{[]uint64{1, 2, 3, 4, 99}, "4 [3 4 2 0]", " [3 4 4 4]"},
		{[]uint64{1, 2, 3}, "3 [3 0 2 0]", " [3 3 3 3]"},
		{[]uint64{1, 99}, "1 [1 0 1 0]", " [1 1 1 1]"},
	} {
		x := chunkWorld()
		if got := matchChunks(x, 0, tt.hashes...); got != tt.want+tt.walk {
			t.Errorf("%v: got %s, want %s", tt.hashes, got, tt.want+tt.walk)
		}
		if got := matchChunks(x, 3, tt.hashes...); got != tt.want {
			t.Errorf("%v, with a limit: got %s, want %s", tt.hashes, got, tt.want)
		}
	}
}

// TestChunkOfOnlyAPartOfAPromptIsNoMatch has many ranks, which are matched as a group, and one that has nothing but a chunk.
func TestChunkOfOnlyAPartOfAPromptIsNoMatch(t *testing.T) {
	x := index.New()
	for i := range 100 {
		e := event(0, &kvcastv1.Stored{BlockHashes: []uint64{1, 2}, BlockSize: 4, TokensHashes: []uint64{1, 2}})
		e.Tier = kvcastv1.Tier_TIER_HOST_PINNED
		events := []*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 4, Ranks: []uint32{0}}), e}
		if i != 50 {
			events = append(events, event(0, &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_CONNECTOR_TIER, Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_HOST_PINNED}, ChunkTokens: 16}))
		}
		x.ApplyEntry(&kvcastv1.Entry{Seq: uint64(i + 1), Worker: fmt.Sprint("w", i), Model: "m", Events: events})
	}
	for _, limit := range []int{1, 64, 1000} {
		if got := matchChunks(x, limit, 1, 2); got != "2 [0 2 0 0]" {
			t.Errorf("limit %d: got %s, want the rank without chunks alone", limit, got)
		}
	}
}

// TestChunksLastUntilTheirTierIsCleared also has them in a snapshot, and in the state of the rank.
func TestChunksLastUntilTheirTierIsCleared(t *testing.T) {
	x := chunkWorld()
	w, _ := x.Worker("w")
	const host = kvcastv1.Tier_TIER_HOST_PINNED
	want := []*kvcastv1.TierReasons{{Tier: host, Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER}, ChunkTokens: 16}}
	if d := gocmp.Diff(fmt.Sprint(want), fmt.Sprint(w.Ranks[0].ListTierReasons())); d != "" {
		t.Errorf("reasons (-want +got):\n%s", d)
	}
	s, ok := x.Snapshot("w")
	if !ok {
		t.Fatal("there is no worker")
	}
	other := index.New()
	other.ApplySnapshotWorker(s.Worker)
	copied, _ := other.Worker("w")
	if copied.Ranks[0].Chunks != w.Ranks[0].Chunks {
		t.Errorf("a snapshot has the chunks %v, want %v", copied.Ranks[0].Chunks, w.Ranks[0].Chunks)
	}
	apply := func(kind any) {
		e := event(0, kind)
		if stored, ok := kind.(*kvcastv1.Stored); ok && stored != nil {
			e.Tier = host
		}
		x.ApplyEntry(&kvcastv1.Entry{Seq: x.Seq() + 1, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{e}})
	}
	apply(&kvcastv1.Cleared{Tiers: []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE}})
	if got := matchChunks(x, 3, 1, 2, 3, 4, 5); got != "4 [0 4 2 0]" {
		t.Errorf("after a clear of the device: got %s", got)
	}
	apply(&kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_CONNECTOR_TIER, Tiers: []kvcastv1.Tier{host}, ChunkTokens: 8})
	if got := matchChunks(x, 3, 1, 2, 3, 4, 5, 6, 7); got != "6 [0 6 2 0]" {
		t.Errorf("with another size: got %s", got)
	}
	apply(&kvcastv1.Cleared{Tiers: []kvcastv1.Tier{host}})
	apply(&kvcastv1.Stored{BlockHashes: []uint64{1, 2, 3}, BlockSize: 4, TokensHashes: []uint64{1, 2, 3}})
	if got := matchChunks(x, 3, 1, 2, 3, 4); got != "3 [0 3 2 0]" {
		t.Errorf("after a clear of the tier: got %s", got)
	}
}

package checker_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

const disk = kvcastv1.Tier_TIER_DISK

func TestViewAppliesEvents(t *testing.T) {
	onDisk := store(0, 0, 1, 5)
	onDisk.Tier = disk
	v := checker.NewView()
	v.Apply(added(1, "a", 1))
	v.Apply(entry(2, "a", store(2, 0, 1, 2, 3), onDisk, store(3, 1, 4)))
	v.Apply(entry(3, "a", remove(4, 0, 2, 77), store(5, 0, 3)))
	v.ApplyEvent("b", store(1, 0, 9))
	v.ApplyEvent("b", &kvcastv1.RouterEvent{EventId: 2, DpRank: proto.Uint32(0)}) // a kind of event of a later contract

	want := func(worker string, rank uint32, tier kvcastv1.Tier, blocks map[uint64]struct{}) {
		t.Helper()
		if diff := cmp.Diff(blocks, v.Blocks(worker, rank, tier)); diff != "" {
			t.Errorf("Blocks(%s, %d, %v) (-want +got):\n%s", worker, rank, tier, diff)
		}
		if got := v.Count(worker, rank, tier); got != len(blocks) {
			t.Errorf("Count(%s, %d, %v) = %d, want %d", worker, rank, tier, got, len(blocks))
		}
		if got, want := v.Digest(worker, rank, tier), checker.Digest(blocks); got != want {
			t.Errorf("Digest(%s, %d, %v) = %x, want %x", worker, rank, tier, got, want)
		}
	}
	want("a", 0, device, set(1, 3))
	want("a", 0, disk, set(1, 5))
	want("a", 1, device, set(4))
	want("b", 0, device, set(9))
	want("b", 7, device, set())
	if diff := cmp.Diff([]string{"a", "b"}, v.Workers()); diff != "" {
		t.Errorf("Workers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]uint32{0, 1}, v.Ranks("a")); diff != "" {
		t.Errorf("Ranks (-want +got):\n%s", diff)
	}

	v.ApplyEvent("a", clearAll(6, 0, kvcastv1.Cleared_REASON_SOURCE_CLEARED, disk))
	want("a", 0, device, set(1, 3))
	want("a", 0, disk, set())
	v.ApplyEvent("a", clearAll(7, 0, kvcastv1.Cleared_REASON_ENGINE_CLEARED))
	want("a", 0, device, set())
	want("a", 1, device, set(4))
	want("b", 0, device, set(9))

	v.Apply(removed(8, "a", 8))
	want("a", 1, device, set())
	if diff := cmp.Diff([]string{"b"}, v.Workers()); diff != "" {
		t.Errorf("Workers (-want +got):\n%s", diff)
	}
	v.Apply(added(9, "b", 9))
	want("b", 0, device, set())
}

func TestViewKeepsGapsUntilCleared(t *testing.T) {
	v := checker.NewView()
	v.ApplyEvent("a", gap(1, 2))
	if !v.Incomplete("a", 2) || v.Incomplete("a", 0) {
		t.Errorf("incomplete: rank 2 %t, rank 0 %t, want rank 2 alone", v.Incomplete("a", 2), v.Incomplete("a", 0))
	}
	if diff := cmp.Diff([]*kvcastv1.Gap{gap(1, 2).GetGap()}, v.Gaps("a", 2), protocmp.Transform()); diff != "" {
		t.Errorf("Gaps (-want +got):\n%s", diff)
	}
	v.ApplyEvent("a", clearAll(2, 2, kvcastv1.Cleared_REASON_ENGINE_RESTARTED))
	if v.Incomplete("a", 2) {
		t.Error("incomplete after all blocks were cleared")
	}
	if len(v.Gaps("a", 2)) != 1 || len(v.Gaps("a", 0)) != 0 {
		t.Errorf("gaps of ranks 2 and 0: %d and %d, want 1 and 0", len(v.Gaps("a", 2)), len(v.Gaps("a", 0)))
	}
}

func TestDigestIsXorOfSplitmix64(t *testing.T) {
	// The first output of splitmix64.c seeded with 0, and with 1234567.
	const of0, of1234567 = 0xe220a8397b1dcdaf, 6457827717110365317
	for _, tt := range []struct {
		blocks map[uint64]struct{}
		want   uint64
	}{
		{nil, 0},
		{set(0), of0},
		{set(1234567), of1234567},
		{set(0, 1234567), of0 ^ of1234567},
	} {
		if got := checker.Digest(tt.blocks); got != tt.want {
			t.Errorf("Digest(%v) = %x, want %x", tt.blocks, got, tt.want)
		}
	}
}

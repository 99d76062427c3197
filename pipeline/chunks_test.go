package pipeline_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestRemovesOfChunksRemoveTheirBlocks stores the blocks of two chunks below device memory, and removes chunks by their hashes.
func TestRemovesOfChunksRemoveTheirBlocks(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	first, second := []uint64{wire.PartBefore(wire.PartBefore(7)), wire.PartBefore(7), 7}, []uint64{wire.PartBefore(8), 8}
	both := slices.Concat(first, second)
	last := remove(7, 8)
	last.Rare = &wire.Rare{RemainingCopies: []uint32{0, 0}}
	one := remove(7, 8)
	one.Rare = &wire.Rare{RemainingCopies: []uint32{1, 0}}
	stored := batch(host(store(both...)))
	for name, c := range map[string]struct {
		calls []call
		left  []uint64 // in host memory
	}{
		"the first":            {[]call{stored, batch(host(remove(7)))}, second},
		"both":                 {[]call{stored, batch(host(remove(7, 8)))}, nil},
		"in the same batch":    {[]call{batch(host(store(both...)), host(remove(8)))}, first},
		"of the last copy":     {[]call{stored, batch(host(last))}, nil},
		"of one of two copies": {[]call{stored, batch(host(one))}, first},
		"named again":          {[]call{stored, batch(host(remove(7, 8, 7, 7)))}, nil},
		"with its blocks":      {[]call{stored, batch(host(remove(both...)))}, nil},
		"a part of it is gone": {[]call{stored, batch(host(remove(first[1]))), batch(host(remove(7)))}, second},
		"on the device":        {[]call{stored, batch(store(both...)), batch(remove(7, 8))}, both},
		"an unknown block":     {[]call{stored, batch(host(remove(9)))}, both},
	} {
		check := func(tier kvcastv1.Tier) func(*testing.T, *subject) {
			return func(t *testing.T, s *subject) {
				s.play(t, c.calls...)
				want := make(map[uint64]bool)
				for _, hash := range c.left {
					want[hash] = true
				}
				got := s.tables()[place{testWorker, 0, tier}]
				if got == nil {
					got = make(map[uint64]bool)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("blocks (-want +got):\n%s", diff)
				}
				all := 0
				for _, blocks := range s.tables() {
					all += len(blocks)
				}
				if n := s.blocks(testWorker); n != uint64(all) {
					t.Errorf("routers have %d blocks, want %d", n, all)
				}
			}
		}
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, check(kvcastv1.Tier_TIER_HOST_PINNED))
			withSharing(t, pipeline.Config{}, feed.ConsolidatePassthrough, check(kvcastv1.Tier_TIER_HOST_PINNED))
			if name != "on the device" { // all blocks are in one tier
				withSharing(t, pipeline.Config{}, feed.ConsolidateDedup, check(kvcastv1.Tier_TIER_DEVICE))
			}
		})
	}
}

// TestRemovesOfAChunkAreBounded removes a chunk of many blocks by a hash that the event names very often.
func TestRemovesOfAChunkAreBounded(t *testing.T) {
	var blocks []uint64
	for hash := uint64(5); len(blocks) < 4096; hash = wire.PartBefore(hash) {
		blocks = append(blocks, hash)
	}
	slices.Reverse(blocks)
	often := make([]uint64, 100_000)
	for i := range often {
		often[i] = 5
	}
	check := func(t *testing.T, s *subject) {
		s.play(t, batch(inTier(kvblock.TierHostPinned, store(blocks...))))
		s.play(t, batch(inTier(kvblock.TierHostPinned, remove(often...))))
		if n := s.blocks(testWorker); n != 0 {
			t.Errorf("%d blocks are left", n)
		}
	}
	withWorker(t, pipeline.Config{}, check)
	withSharing(t, pipeline.Config{}, feed.ConsolidateDedup, check)
}

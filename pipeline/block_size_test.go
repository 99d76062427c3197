package pipeline_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

func replacing(e wire.Event) wire.Event {
	e.ReplacesBlockSize = true
	return e
}

// TestPartialBlocksAreRemovedWithTheirBlockSize sends a store which reveals that the blocks
// so far were partial.
func TestPartialBlocksAreRemovedWithTheirBlockSize(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	calls := []call{
		batch(withBlockSize(4, store(3, 1)), withBlockSize(4, store(2)), withBlockSize(4, store(2))),
		batch(withBlockSize(4, host(store(5)))),
		rankBatch(1, withBlockSize(4, store(7))),
		batch(withBlockSize(0, hashOnly(store(8)))),
	}
	next := batch(withBlockSize(4, store(9)), replacing(withBlockSize(16, store(10))), withBlockSize(16, after(10, store(11))))
	withWorker(t, pipeline.Config{MaxBlocks: 2}, func(t *testing.T, s *subject) {
		s.play(t, calls...)
		want := [][]string{{
			"store [9] block size 4", "remove [1 2]", "remove [3 9]", "HOST_PINNED remove [5]", "rank 1 remove [7]", "store [10 11]",
		}}
		if diff := cmp.Diff(want, describe(s.play(t, next))); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([][]string{{"remove [2]"}}, describe(s.play(t, batch(remove(2))))); diff != "" {
			t.Errorf("entries of a remove of a partial block (-want +got):\n%s", diff)
		}
	})
	for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
		t.Run(string(mode), func(t *testing.T) {
			withSharing(t, pipeline.Config{}, mode, func(t *testing.T, s *subject) {
				s.play(t, slices.Concat(calls, []call{by2(batch(withBlockSize(4, store(1, 12)))), next})...)
				r := &router{blocks: make(blockSets), applied: make(map[string]int)}
				r.apply(s.journal.all())
				if diff := cmp.Diff([]uint64{8, 10, 11}, slices.Sorted(maps.Keys(r.blocksIn(kvblock.TierDevice)))); diff != "" {
					t.Errorf("blocks (-want +got):\n%s", diff)
				}
				again := describe(s.play(t, batch(withBlockSize(16, store(1)), remove(1))))
				if diff := cmp.Diff([][]string{{"store [1]", "remove [1]"}}, again); diff != "" {
					t.Errorf("entries of a block that is stored again (-want +got):\n%s", diff)
				}
			})
		})
	}
}

package pipeline_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
)

func TestDedup(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	tests := map[string]struct {
		calls []call
		want  [][]string
	}{
		"a store always passes": {
			calls: []call{batch(store(1)), batch(store(1)), batch(store(1))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {"store [1]"}},
		},
		"a remove passes when the last copy goes": {
			calls: []call{batch(store(1)), batch(store(1)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {"remove [1]"}},
		},
		"a remove of an unknown block passes": {
			calls: []call{batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"remove [1]"}, {"remove [1]"}},
		},
		"a remove of a block that is gone passes": {
			calls: []call{batch(store(1)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]"}, {"remove [1]"}, {"remove [1]"}},
		},
		"a remove is emitted without the blocks that have copies left": {
			calls: []call{batch(store(1, 2, 3)), batch(store(2)), batch(remove(1, 2, 9, 3))},
			want:  [][]string{{"store [1 2 3]"}, {"store [2]"}, {"remove [1 9 3]"}},
		},
		"both copies of a block leave at once": {
			calls: []call{batch(store(1)), batch(store(1)), batch(remove(1, 1))},
			want:  [][]string{{"store [1]"}, {"store [1]"}, {"remove [1]"}},
		},
		"both copies of a block come at once": {
			calls: []call{batch(store(1), store(1)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {"remove [1]"}},
		},
		"a block that was removed and stored again starts with one copy": {
			calls: []call{batch(store(1), store(1), remove(1, 1), store(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]", "remove [1]", "store [1]"}, {"remove [1]"}},
		},
		"a third copy suppresses two removes": {
			calls: []call{batch(store(1), store(1), store(1)), batch(remove(1)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]", "store [1]"}, {"remove [1]"}},
		},
		"ranks are counted apart": {
			calls: []call{batch(store(1)), rankBatch(1, store(1)), batch(remove(1)), rankBatch(1, remove(1))},
			want:  [][]string{{"store [1]"}, {"rank 1 store [1]"}, {"remove [1]"}, {"rank 1 remove [1]"}},
		},
		"tiers are counted apart": {
			calls: []call{batch(store(1)), batch(host(store(1))), batch(remove(1)), batch(host(remove(1)))},
			want:  [][]string{{"store [1]"}, {"HOST_PINNED store [1]"}, {"remove [1]"}, {"HOST_PINNED remove [1]"}},
		},
		"after a gap each block counts once": {
			calls: []call{batch(store(1), store(1), store(1)), gap(0), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]", "store [1]"}, {textGap}, {"remove [1]"}},
		},
		"after a gap each tier's blocks count once": {
			calls: []call{batch(host(store(1)), host(store(1))), gap(0), batch(host(remove(1)))},
			want:  [][]string{{"HOST_PINNED store [1]", "HOST_PINNED store [1]"}, {textGap}, {"HOST_PINNED remove [1]"}},
		},
		"a store after a gap adds a copy": {
			calls: []call{batch(store(1), store(1)), gap(0), batch(store(1)), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {textGap}, {"store [1]"}, {"remove [1]"}},
		},
		"a gap of another rank changes nothing": {
			calls: []call{batch(store(1), store(1)), gap(1), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {"rank 1 " + textGap}, {"remove [1]"}},
		},
		"a clear empties all tiers": {
			calls: []call{
				batch(store(1), store(1), host(store(1)), host(store(1)), cleared()),
				batch(store(1), host(store(1))), batch(remove(1)), batch(host(remove(1))),
			},
			want: [][]string{
				{"store [1]", "store [1]", "HOST_PINNED store [1]", "HOST_PINNED store [1]", textCleared},
				{"store [1]", "HOST_PINNED store [1]"}, {"remove [1]"}, {"HOST_PINNED remove [1]"},
			},
		},
		"a clear of another rank changes nothing": {
			calls: []call{batch(store(1), store(1)), rankBatch(1, cleared()), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {"rank 1 " + textCleared}, {"remove [1]"}},
		},
		"a clear of an empty rank passes": {
			calls: []call{batch(cleared()), batch(cleared())},
			want:  [][]string{{textCleared}, {textCleared}},
		},
		"a restart empties the rank": {
			calls: []call{batch(store(1), store(1)), restarted(0), batch(store(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {textRestarted}, {"store [1]"}, {"remove [1]"}},
		},
		"a restart of another rank changes nothing": {
			calls: []call{batch(store(1), store(1)), restarted(1), batch(remove(1)), batch(remove(1))},
			want:  [][]string{{"store [1]", "store [1]"}, {"rank 1 " + textRestarted}, {"remove [1]"}},
		},
		"a worker that returns has no blocks": {
			calls: []call{batch(store(1), store(1)), removed(), added(), batch(store(1)), batch(remove(1))},
			want: [][]string{
				{"store [1]", "store [1]"}, {"removed DISCOVERY"}, {"added"}, {"store [1]"}, {"remove [1]"},
			},
		},
		"suppressed blocks count for the cap": {
			// The cap bounds the work of a flush before it starts.
			calls: []call{batch(store(1), store(1)), batch(remove(1, 2, 3, 4, 5))},
			want:  [][]string{{"store [1]", "store [1]"}, {"remove [2 3 4]", "remove [5]"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{MaxBlocks: 4}, func(t *testing.T, s *subject) {
				if diff := cmp.Diff(test.want, describe(s.play(t, test.calls...))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestFlushWithoutBlocksUsesNoEventID(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		got := s.play(t,
			batch(store(1), store(1)),
			batch(remove(1)),
			batch(store(2), store(2), remove(2), store(3)),
		)
		want := [][]string{{"store [1]", "store [1]"}, {"store [2]", "store [2]", "store [3]"}}
		if diff := cmp.Diff(want, describe(got)); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]uint64{2, 3, 4, 5, 6}, eventIDs(got)); diff != "" {
			t.Errorf("event ids (-want +got):\n%s", diff)
		}
	})
}

func TestWorkersAreCountedApart(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		other := func(c call) call {
			c.Worker = "other"
			return c
		}
		call{Worker: "other", Add: &feed.Worker{Name: "other"}}.on(s)
		got := s.play(t, batch(store(1)), other(batch(store(1))), other(batch(store(1))), batch(remove(1)), other(batch(remove(1))))
		if diff := cmp.Diff([][]string{{"store [1]"}, {"remove [1]"}}, describe(got)); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([][]string{{"added"}, {"store [1]"}, {"store [1]"}}, describe(s.journal.all()["other"])); diff != "" {
			t.Errorf("entries of the other worker (-want +got):\n%s", diff)
		}
	})
}

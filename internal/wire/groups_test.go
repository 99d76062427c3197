package wire_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/wire"
)

// TestGroupsOmittedByBatch passes batches to the same Rules, and checks which of them report
// that events of other groups were removed.
func TestGroupsOmittedByBatch(t *testing.T) {
	type batch struct {
		events  []any
		omitted bool
	}
	for _, c := range []struct {
		name    string
		batches []batch
	}{
		{"no group", []batch{
			{[]any{stored(nil, 1), removed(nil, 1), obj{"type": "AllBlocksCleared"}}, false},
			{nil, false},
		}},
		{"main group", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "mla_attention", "group_idx": 1}, 1)}, false},
			{[]any{removed(obj{"group_idx": 1}, 1)}, false},
			{[]any{removed(obj{"group_idx": 0}, 1)}, true},
		}},
		{"every batch with an omitted event", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 0}, 1)}, false},
			{[]any{stored(obj{"kv_cache_spec_kind": "mamba", "group_idx": 1}, 1)}, true},
			{[]any{removed(obj{"group_idx": 0}, 1)}, false},
			{[]any{removed(obj{"group_idx": 0}, 1), removed(obj{"group_idx": 1}, 1)}, true},
			{nil, false},
		}},
		{"group never seen", []batch{
			{[]any{removed(obj{"group_idx": 2}, 1)}, true},
		}},
		{"store without blocks", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "sliding_window", "group_idx": 1})}, true},
		}},
		{"host memory", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "sliding_window", "medium": "CPU"}, 1)}, true},
		}},
		{"disk and external tiers do not count", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "mamba", "group_idx": 1, "medium": "DISK"}, 1)}, false},
			{[]any{removed(obj{"group_idx": 1, "medium": "EXTERNAL"}, 1)}, false},
		}},
		{"partial blocks of the main group: the engine reuses them, too", []batch{
			{[]any{stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 0, "block_size": 2, "token_ids": []any{1, 2}}, 1)}, false},
			{[]any{stored(obj{"kv_cache_spec_kind": "full_attention", "group_idx": 0}, 2)}, true},
		}},
		{"events ignored for other reasons do not count", []batch{
			{[]any{
				stored(obj{"kv_cache_spec_kind": "mamba", "locality": "REMOTE"}, 1),
				stored(obj{"kv_cache_spec_kind": "mamba", "medium": "TAPE"}, 1),
				stored(obj{"kv_cache_spec_kind": "mamba", "ownership": "theirs"}, 1),
				obj{"type": "New"}, []any{},
			}, false},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				size   wire.BlockSize
				counts wire.Counts
			)
			r := wire.NewRules(&size)
			for i, b := range c.batches {
				decoded := decodeOf(t, b.events...)
				r.Admit(decoded, 0, &counts)
				if decoded.GroupsOmitted != b.omitted {
					t.Errorf("batch %d: GroupsOmitted %v, want %v", i, decoded.GroupsOmitted, b.omitted)
				}
			}
		})
	}
}

// TestGroupsOmittedOfAnyEvents compares GroupsOmitted with a plain implementation of the rules,
// for random batches of two ranks.
func TestGroupsOmittedOfAnyEvents(t *testing.T) {
	type group struct {
		rank uint32
		idx  int
	}
	mainKinds := []any{"full_attention", "mla_attention", "sink_full_attention"}
	rapid.Check(t, func(rt *rapid.T) {
		var (
			size   wire.BlockSize
			counts wire.Counts
		)
		r := wire.NewRules(&size)
		isMain := make(map[group]bool) // learned
		for range rapid.IntRange(1, 8).Draw(rt, "batches") {
			rank := rapid.Uint32Range(0, 1).Draw(rt, "rank")
			if rapid.IntRange(0, 9).Draw(rt, "restart") == 0 {
				r.Reset(rank)
				for g := range isMain {
					if g.rank == rank {
						delete(isMain, g)
					}
				}
			}
			var events []any
			want := false
			for range rapid.IntRange(0, 4).Draw(rt, "events") {
				kind := rapid.SampledFrom(append([]any{nil, nil, "mamba", "sliding_window", "new"}, mainKinds...)).Draw(rt, "kind")
				idx := rapid.SampledFrom([]any{nil, 0, 1, 2}).Draw(rt, "group")
				medium := rapid.SampledFrom([]any{nil, nil, "GPU", "cpu", "disk", "EXTERNAL", "TAPE"}).Draw(rt, "medium")
				locality := rapid.SampledFrom([]any{nil, nil, "LOCAL", "REMOTE"}).Draw(rt, "locality")
				fields := obj{"kv_cache_spec_kind": kind, "group_idx": idx, "medium": medium, "locality": locality}
				n, hasGroup := idx.(int)
				if rapid.Bool().Draw(rt, "store") {
					events = append(events, stored(fields, 1))
					if kind != nil && hasGroup {
						isMain[group{rank, n}] = slices.Contains(mainKinds, kind)
					}
				} else {
					events = append(events, removed(fields, 1))
				}
				if medium == "TAPE" || medium == "disk" || medium == "EXTERNAL" || locality == "REMOTE" {
					continue
				}
				learned, ok := isMain[group{rank, n}]
				switch {
				case kind != nil:
					want = want || !slices.Contains(mainKinds, kind)
				case hasGroup && ok:
					want = want || !learned
				case hasGroup:
					other := false
					for g, main := range isMain {
						other = other || main && g.rank == rank
					}
					want = want || n != 0 || other
				}
			}
			b := decodeOf(t, events...)
			r.Admit(b, rank, &counts)
			if b.GroupsOmitted != want {
				rt.Fatalf("GroupsOmitted %v, want %v", b.GroupsOmitted, want)
			}
		}
	})
}

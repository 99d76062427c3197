package groups_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	"github.com/kvcast/kvcast/pipeline/internal/groups"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

var windowKey = groups.Key{Group: 2, Tier: kvblock.TierDevice}

// TestBlocksCountCopies compares with a plain count of copies, also after a checkpoint.
func TestBlocksCountCopies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, model := new(groups.Rank), make(map[uint64]int)
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			hash := rapid.Uint64Range(0, 5).Draw(t, "block")
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				r.Gap()
				for hash := range model {
					model[hash] = 1
				}
			case 1:
				restored := new(groups.Rank)
				if err := restored.Restore(windowKey, r.Blocks(windowKey).State(1, windowKey)); err != nil {
					t.Fatal(err)
				}
				r = restored
			case 2, 3, 4, 5:
				r.Blocks(windowKey).Store(hash, copies.Add)
				model[hash]++
			default:
				gone := r.Blocks(windowKey).Remove(hash, copies.RemoveCopy)
				if model[hash]--; model[hash] <= 0 {
					delete(model, hash)
				}
				if gone != (model[hash] == 0) {
					t.Fatalf("block %d is gone: %t, want %d copies", hash, gone, model[hash])
				}
			}
		}
		got := make(map[uint64]int)
		for hash, c := range r.Blocks(windowKey).All() {
			got[hash] = 1 + int(c.Further)
		}
		if diff := cmp.Diff(model, got); diff != "" {
			t.Fatalf("copies (-want +got):\n%s", diff)
		}
	})
}

func TestBlocksOfTiersAndGroups(t *testing.T) {
	var r groups.Rank
	host := groups.Key{Group: 2, Tier: kvblock.TierHostPinned}
	other := groups.Key{Group: 1, Tier: kvblock.TierDevice}
	for _, key := range []groups.Key{host, other, windowKey} {
		r.Blocks(key).Store(1, copies.Add)
		r.Suspect(key, 1)
	}
	if diff := cmp.Diff([]groups.Key{other, windowKey, host}, r.Keys()); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if n := r.Drop(kvblock.TierDevice); n != 2 || r.Len() != 1 || r.HasTier(kvblock.TierDevice) || !r.HasTier(kvblock.TierHostPinned) {
		t.Errorf("%d blocks were dropped, %d are left", n, r.Len())
	}
	if diff := cmp.Diff([]groups.Suspect{{Key: host, Hash: 1}}, r.TakeSuspects()); diff != "" || r.HasSuspects() {
		t.Errorf("suspects (-want +got):\n%s", diff)
	}
	if r.Find(groups.Key{Group: 9}).Has(1) || r.Find(groups.Key{Group: 9}).Len() != 0 {
		t.Error("a group without blocks has some")
	}
	state := r.Blocks(host).State(0, host)
	state.BlockHashes = append(state.BlockHashes, 1)
	if err := new(groups.Rank).Restore(host, state); err == nil {
		t.Error("a block that is there twice was restored")
	}
	if err := r.Restore(host, state); err == nil {
		t.Error("a group that is there twice was restored")
	}
	if _, err := groups.KeyOf(0, kvblock.TierDevice); err == nil {
		t.Error("the main group has a key")
	}
}

// TestJudge has stores of a window group of two blocks, which may be announcements.
func TestJudge(t *testing.T) {
	full := &kvcastv1.AttentionGroup{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 4, Main: true}
	window := &kvcastv1.AttentionGroup{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW, BlockSize: 4, Window: 9}
	both := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{full, window}}
	store := func(group uint8, tokens int, hashes ...uint64) *wire.Event {
		return &wire.Event{Kind: wire.KindStored, Group: group, Tier: kvblock.TierDevice, BlockSize: 4, Tokens: make([]uint32, tokens), BlockHashes: hashes}
	}
	six := store(2, 24, 1, 2, 3, 4, 5, 6)
	for name, tt := range map[string]struct {
		held   []uint64
		sparse bool // a store has left out blocks before
		root   groups.Root
		knows  bool // that the engine announces
		event  *wire.Event
		want   groups.Judgement
	}{
		"no block is held":                        {nil, false, groups.RootOf(six, true), false, six, groups.Judgement{Op: copies.Add}},
		"a store that leaves out blocks":          {[]uint64{5, 6}, false, groups.RootOf(six, true), true, store(2, 24, 5, 6), groups.Judgement{Op: copies.Add}},
		"the window is held":                      {[]uint64{5, 6}, false, groups.RootOf(six, true), false, six, groups.Judgement{Op: copies.AddUnsure, SuspectsNew: true}},
		"an engine that announces":                {[]uint64{5, 6}, false, groups.RootOf(six, true), true, six, groups.Judgement{Op: copies.AddUnsure, IgnoresNew: true}},
		"more blocks than the group keeps":        {[]uint64{5, 6}, true, groups.RootOf(six, true), false, six, groups.Judgement{Op: copies.AddUnsure, IgnoresNew: true}},
		"no store of the main group before":       {[]uint64{5, 6}, false, groups.Root{}, false, six, groups.Judgement{Op: copies.Add}},
		"a main group that did not hold all":      {[]uint64{5, 6}, false, groups.RootOf(six, false), false, six, groups.Judgement{Op: copies.Add}},
		"all are held, without a store before it": {[]uint64{1, 2, 3, 4, 5, 6}, false, groups.Root{}, false, six, groups.Judgement{Op: copies.AddUnsure}},
	} {
		t.Run(name, func(t *testing.T) {
			var r groups.Rank
			for _, hash := range tt.held {
				r.Blocks(windowKey).Store(hash, copies.Add)
			}
			b := &feed.Batch{Groups: both, CopyRule: feed.CopyRuleDetected}
			if tt.sparse {
				r.Judge(b, store(2, 24, 6), groups.Root{}, false)
			}
			if diff := cmp.Diff(tt.want, r.Judge(b, tt.event, tt.root, tt.knows)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	var r groups.Rank
	main := store(0, 24, 1, 2, 3, 4, 5, 6)
	for name, tt := range map[string]struct {
		next []wire.Event
		want groups.Siblings
	}{
		"nothing follows":         {nil, groups.SiblingsOfCopies},
		"a store for as many":     {[]wire.Event{*six}, groups.SiblingsUnsure},
		"a store that is shorter": {[]wire.Event{*store(2, 8, 1, 2)}, groups.SiblingsOfCopies},
		"a store with holes":      {[]wire.Event{*store(2, 24, 6)}, groups.SiblingsOfCopies},
		"a remove":                {[]wire.Event{{Kind: wire.KindRemoved, Group: 2}}, groups.SiblingsOfCopies},
	} {
		if got := r.SiblingsOf(main, tt.next, both); got != tt.want {
			t.Errorf("%s: got %d, want %d", name, got, tt.want)
		}
	}
	r.Judge(&feed.Batch{Groups: both, CopyRule: feed.CopyRuleDetected}, store(2, 24, 6), groups.Root{}, false)
	if got := r.SiblingsOf(main, []wire.Event{*six}, both); got != groups.SiblingsAnnounce {
		t.Errorf("of a group that has left out blocks: got %d", got)
	}
}

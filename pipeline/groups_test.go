package pipeline_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

// groupPlace is where blocks of an attention group are.
type groupPlace struct {
	worker string
	rank   uint32
	tier   kvcastv1.Tier
	group  uint32
}

// groupCopies is a plain model of engines: how many copies of a block each group of a rank has.
type groupCopies map[groupPlace]map[uint64]int

func (m groupCopies) play(cfg pipeline.Config, c call) {
	forget := func(worker string, rank *uint32, tier kvcastv1.Tier) {
		for p := range m {
			if p.worker == worker && (rank == nil || p.rank == *rank) && (tier == 0 || p.tier == tier) {
				delete(m, p)
			}
		}
	}
	switch {
	case c.Remove != 0:
		forget(c.Worker, nil, 0)
	case c.Restarted != nil:
		forget(c.Worker, &c.Restarted.Rank, 0)
	case c.Gap != nil && cfg.OnGap == pipeline.OnGapClear && c.Gap.Reason != feed.GapJoinedLate:
		forget(c.Worker, &c.Gap.Rank, 0)
	case c.Gap != nil: // the removes of further copies may be lost
		for p, blocks := range m {
			for hash := range blocks {
				if p.worker == c.Worker && p.rank == c.Gap.Rank {
					blocks[hash] = 1
				}
			}
		}
	case c.Batch != nil:
		for i := range c.Batch.Events {
			e := &c.Batch.Events[i]
			p := groupPlace{c.Worker, c.Batch.Rank, kvcastv1.Tier(e.Tier), uint32(e.Group) - 1}
			switch {
			case e.Kind == wire.KindCleared:
				forget(c.Worker, &c.Batch.Rank, kvcastv1.Tier(e.Tier))
			case e.Group == 0:
			case e.Kind == wire.KindStored:
				if m[p] == nil {
					m[p] = make(map[uint64]int)
				}
				for _, hash := range e.BlockHashes {
					m[p][hash]++
				}
			default:
				for _, hash := range e.BlockHashes {
					if m[p][hash] > 1 {
						m[p][hash]--
					} else {
						delete(m[p], hash)
					}
				}
			}
		}
	}
}

// compare compares the model with what a router has that has applied the entries.
func (m groupCopies) compare(entries map[string][]*kvcastv1.Entry) string {
	v := checker.NewView()
	for _, all := range entries {
		for _, e := range all {
			v.Apply(e)
		}
	}
	for _, name := range v.Workers() {
		for _, rank := range v.Ranks(name) {
			for _, tier := range []kvcastv1.Tier{kvcastv1.Tier_TIER_DEVICE, kvcastv1.Tier_TIER_HOST_PINNED} {
				for _, group := range []uint32{0, 2} {
					want := make(map[uint64]struct{})
					for hash := range m[groupPlace{name, rank, tier, group}] {
						want[hash] = struct{}{}
					}
					if diff := cmp.Diff(want, v.GroupBlocks(name, rank, tier, group)); diff != "" {
						return fmt.Sprintf("worker %s, rank %d, %v, group %d (-want +got):\n%s", name, rank, tier, group, diff)
					}
				}
			}
		}
	}
	return ""
}

// TestGroupsHaveTheBlocksOfTheirEngines compares entries with a model that counts copies, and with those of a pipeline that crashes.
func TestGroupsHaveTheBlocksOfTheirEngines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := drawConfig(t)
		cfg.MaxBlocksPerRank = 0
		calls := (&generator{t: t, groups: true}).calls(false)
		s, err := newSubject(cfg)
		if err != nil {
			t.Fatal(err)
		}
		model := make(groupCopies)
		for _, c := range calls {
			c.on(s)
			model.play(cfg, c)
			if diff := model.compare(s.journal.all()); diff != "" {
				t.Fatal(diff)
			}
		}
		if err := s.journal.err(); err != nil {
			t.Fatal(err)
		}
		w := newDurableWorld(t, cfg)
		w.run(calls)
		if diff := cmp.Diff(s.journal.all(), w.log.entriesByWorker(), protocmp.Transform()); diff != "" {
			t.Fatalf("entries of a pipeline that crashed (-want +got):\n%s", diff)
		}
	})
}

// TestGroupsAreDescribedOnce emits Groups when they change, and again after a restart of the engine.
func TestGroupsAreDescribedOnce(t *testing.T) {
	one := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 16, Main: true}}, Unit: 16}
	two := &kvcastv1.Groups{Groups: append([]*kvcastv1.AttentionGroup{{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_MAMBA, BlockSize: 32}}, one.GetGroups()...)}
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		described := func(g *kvcastv1.Groups) call { return call{Worker: testWorker, Batch: &feed.Batch{Groups: g}} }
		s.play(t, described(one), described(one), described(nil), described(two), described(two),
			call{Worker: testWorker, Restarted: &feed.Restart{}}, described(two))
		var got []string
		for _, e := range s.journal.all()[testWorker] {
			for _, ev := range e.GetEvents() {
				switch {
				case ev.GetGroups() != nil:
					got = append(got, fmt.Sprintf("groups %d", len(ev.GetGroups().GetGroups())))
				case ev.GetGroupsOmitted() != nil:
					got = append(got, "omitted")
				case ev.GetCleared() != nil:
					got = append(got, "cleared")
				}
			}
		}
		if diff := cmp.Diff([]string{"omitted", "groups 1", "groups 2", "cleared", "omitted", "groups 2"}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestRemovesOfPartsOfBlocks removes a part of a block of the main group, whose hash is that of no whole block, beside whole blocks, also
// with the numbers of copies that the engine still has.
func TestRemovesOfPartsOfBlocks(t *testing.T) {
	groups := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 16, Main: true}}, Unit: 4}
	for name, rare := range map[string]*wire.Rare{
		"no other fields": nil, "a session": {Note: "s"}, "copies that are left": {RemainingCopies: []uint32{0, 0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
				s.play(t,
					call{Worker: testWorker, Batch: &feed.Batch{Groups: groups, Events: []wire.Event{
						{Kind: wire.KindStored, BlockHashes: []uint64{1, 3}, Tokens: make([]uint32, 32), BlockSize: 16, Tier: kvblock.TierDevice},
						{Kind: wire.KindStored, BlockHashes: []uint64{2}, HashesOnly: true, Group: 1, HasGroupIdx: true, Tier: kvblock.TierDevice},
					}}},
					call{Worker: testWorker, Batch: &feed.Batch{Groups: groups, Events: []wire.Event{
						{Kind: wire.KindRemoved, BlockHashes: []uint64{1, 2, 3}, HasGroupIdx: true, Tier: kvblock.TierDevice, Rare: rare},
					}}})
				v := checker.NewView()
				for _, e := range s.journal.all()[testWorker] {
					v.Apply(e)
				}
				if left := v.GroupBlocks(testWorker, 0, kvcastv1.Tier_TIER_DEVICE, 0); len(left) > 0 {
					t.Errorf("parts %v are left", left)
				}
				want := map[uint64]struct{}{}
				if rare != nil && rare.RemainingCopies != nil {
					want[3] = struct{}{}
				}
				if diff := cmp.Diff(want, v.Blocks(testWorker, 0, kvcastv1.Tier_TIER_DEVICE), cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("blocks of the main group (-want +got):\n%s", diff)
				}
			})
		})
	}
}

package pipeline_test

import (
	"context"
	"fmt"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// compareIndex returns how the index, which has applied the entries, differs from the pipeline's tables; "" if it does
// not: in its workers, in the blocks that Holders and a snapshot find, and in their numbers and digests.
func (s *subject) compareIndex(t harness.Fataler) string { return s.compareTables(t, s.tables()) }

// compareTables is compareIndex with the tables.
func (s *subject) compareTables(t harness.Fataler, want blockSets) string {
	x := s.journal.index
	if diff := cmp.Diff(want, blocksByHash(t, x)); diff != "" {
		return "holders (-tables +got):\n" + diff
	}
	all, _ := x.Workers(nil)
	if len(all) != len(s.lanes) {
		return fmt.Sprintf("%d workers, want %d", len(all), len(s.lanes))
	}
	total := uint64(0)
	for i := range all {
		w := &all[i]
		if s.lanes[w.Name] == nil {
			return "removed worker " + w.Name
		}
		for _, rank := range w.Ranks {
			for tier, got := range rank.Blocks {
				var digest index.Digest
				at := place{w.Name, rank.Rank, kvcastv1.Tier(tier + 1)}
				for h := range want[at] {
					digest.Blocks++
					digest.XOR ^= kvblock.Digest(h)
				}
				if got != digest || digest.Blocks > 0 && rank.UsedTiers&(1<<tier) == 0 {
					return fmt.Sprintf("%+v: digest %+v, used tiers %b, want %+v", at, got, rank.UsedTiers, digest)
				}
				total += digest.Blocks
			}
		}
		if diff := cmp.Diff(want.of(w.Name), blocksOfSnapshot(t, x, w.Name)); diff != "" {
			return "snapshot of " + w.Name + " (-tables +got):\n" + diff
		}
	}
	if workers, blocks := x.Len(); workers != len(all) || blocks != total {
		return fmt.Sprintf("length: %d workers, %d blocks, want %d, %d", workers, blocks, len(all), total)
	}
	return ""
}

// of returns the blocks of a worker.
func (h blockSets) of(worker string) blockSets {
	some := make(blockSets)
	for p, blocks := range h {
		if p.worker == worker {
			some[p] = blocks
		}
	}
	return some
}

func (h blockSets) add(p place, hash uint64) {
	if h[p] == nil {
		h[p] = make(map[uint64]bool)
	}
	h[p][hash] = true
}

// blocksByHash looks up all blocks that a generator draws.
func blocksByHash(t harness.Fataler, x *index.Index) blockSets {
	q := index.Lookup{Tiers: ^kvblock.Tiers(0), Limit: 1 << 20, BlockHashes: []uint64{1<<64 - 1}}
	for h := range uint64(16) {
		q.BlockHashes = append(q.BlockHashes, h)
	}
	found, err := x.Holders(context.Background(), &q)
	if err != nil {
		t.Fatal(err)
	}
	all := make(blockSets)
	for _, b := range found {
		all.add(place{b.GetWorker(), b.GetDpRank(), b.GetTier()}, b.GetBlockHash())
	}
	return all
}

func blocksOfSnapshot(t harness.Fataler, x *index.Index, worker string) blockSets {
	s, ok := x.Snapshot(worker)
	if !ok {
		t.Fatal("no snapshot of ", worker)
	}
	all := make(blockSets)
	for piece := range s.Blocks(context.Background(), ^kvblock.Tiers(0)) {
		var m kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &m); err != nil {
			t.Fatal(err)
		}
		for _, e := range m.GetEvents() {
			for _, h := range e.GetStored().GetBlockHashes() {
				all.add(place{m.GetWorker(), e.GetDpRank(), e.GetTier()}, h)
			}
		}
	}
	return all
}

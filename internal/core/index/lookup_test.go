package index_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func holders(t fataler, x *index.Index, q index.Lookup) []*kvcastv1.BlockHolder {
	t.Helper()
	found, err := x.Holders(context.Background(), &q)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestHolders(t *testing.T) {
	t.Parallel()
	x := index.New()
	withLoRA := stored(1, 2)
	withLoRA.LoraName = proto.String("adapter")
	unhashed := &kvcastv1.Stored{BlockHashes: []uint64{1, 7}}
	x.ApplyEntry(entryOf(1, event(1, withLoRA), inTier(disk, event(1, stored(2))), event(4, unhashed)))
	another := entryOf(2, inTier(pinned, event(0, stored(2, 8))))
	another.Worker, another.Model = "a", "n"
	x.ApplyEntry(another)
	held := func(worker, model string, rank uint32, tier kvcastv1.Tier, hash uint64) *kvcastv1.BlockHolder {
		return &kvcastv1.BlockHolder{
			Worker: worker, Model: model, DpRank: rank, Tier: tier, BlockHash: hash, TokensHash: proto.Uint64(hash + 1000),
		}
	}
	one, two, onDisk := held("w", "m", 1, device, 1), held("w", "m", 1, device, 2), held("w", "m", 1, disk, 2)
	for _, h := range []*kvcastv1.BlockHolder{one, two, onDisk} { // also the copy, of which the store on disk says nothing
		h.LoraName = proto.String("adapter")
	}
	hashOnly, elsewhere := held("w", "m", 4, device, 1), held("a", "n", 0, pinned, 2)
	hashOnly.TokensHash = nil
	type (
		lookup = index.Lookup
		hashes = []uint64
		list   = []*kvcastv1.BlockHolder
	)
	ofA := func(worker, _ string) bool { return worker == "a" }
	ofN := func(_, model string) bool { return model == "n" }
	for name, test := range map[string]struct {
		lookup lookup
		want   list
	}{
		"a block hash":                  {lookup{BlockHashes: hashes{1}}, list{one, hashOnly}},
		"a block in several tiers":      {lookup{BlockHashes: hashes{2}}, list{elsewhere, two, onDisk}},
		"a block hash given twice":      {lookup{BlockHashes: hashes{1, 9, 1}}, list{one, hashOnly}},
		"a tokens hash":                 {lookup{TokensHashes: hashes{1001, 9}}, list{one}},
		"both hashes of a block":        {lookup{BlockHashes: hashes{1}, TokensHashes: hashes{1001}}, list{one, hashOnly}},
		"a block with unknown contents": {lookup{TokensHashes: hashes{0}}, nil},
		"one tier":                      {lookup{BlockHashes: hashes{2}, TokensHashes: hashes{1001}, Tiers: tierBit(disk)}, list{onDisk}},
		"one worker":                    {lookup{BlockHashes: hashes{2}, Match: ofA}, list{elsewhere}},
		"one model":                     {lookup{BlockHashes: hashes{2}, Match: ofN}, list{elsewhere}},
		"a block that nobody holds":     {lookup{BlockHashes: hashes{3}, TokensHashes: hashes{1}}, nil},
		"nothing":                       {lookup{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if test.lookup.Tiers == 0 {
				test.lookup.Tiers = allTiers
			}
			test.lookup.Limit = 3
			got := holders(t, x, test.lookup)
			byHash := cmpopts.SortSlices(func(a, b *kvcastv1.BlockHolder) bool { return a.String() < b.String() })
			if diff := cmp.Diff(test.want, got, protocmp.Transform(), byHash); diff != "" {
				t.Errorf("holders (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHoldersEqualTheBlocks compares the answers with all blocks of the index.
func TestHoldersEqualTheBlocks(t *testing.T) {
	t.Parallel()
	type holder struct {
		worker string
		rank   uint32
		tier   kvcastv1.Tier
		hash   uint64
	}
	rapid.Check(t, func(t *rapid.T) {
		x := index.New()
		for seq := range uint64(rapid.IntRange(0, 40).Draw(t, "entries")) {
			x.ApplyEntry(drawEntry(t, seq+1, false))
		}
		hashes := rapid.SliceOfN(rapid.Uint64Range(0, 90), 0, 20)
		q := index.Lookup{Tiers: allTiers, Limit: 1 << 20, BlockHashes: hashes.Draw(t, "block hashes")}
		for _, h := range hashes.Draw(t, "contents") {
			q.TokensHashes = append(q.TokensHashes, h+1000)
		}
		want, got := make(map[holder]bool), make(map[holder]bool)
		all, _ := x.Workers(nil)
		for _, w := range all {
			for _, r := range w.Ranks {
				for hash, b := range x.Blocks(w.Name, r.Rank) {
					if wanted := slices.Contains(q.BlockHashes, hash) || b.HasTokens && slices.Contains(q.TokensHashes, b.Tokens); !wanted {
						continue
					}
					tiers := x.Tiers(w.Name, r.Rank, hash)
					for _, tier := range tiers {
						want[holder{w.Name, r.Rank, tier, hash}] = true
					}
				}
			}
		}
		for _, h := range holders(t, x, q) {
			at := holder{h.GetWorker(), h.GetDpRank(), h.GetTier(), h.GetBlockHash()}
			if got[at] {
				t.Fatalf("the holder %+v is found twice", at)
			}
			got[at] = true
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("holders of %v and contents %v (-want +got):\n%s", q.BlockHashes, q.TokensHashes, diff)
		}
		q.Limit = len(want) - 1
		if _, err := x.Holders(context.Background(), &q); len(want) > 0 && !errors.Is(err, index.ErrTooManyHolders) {
			t.Fatalf("%d holders with the limit %d: got error %v", len(want), q.Limit, err)
		}
	})
}

// TestHoldersHaveAliases looks blocks up by a source's block hashes.
func TestHoldersHaveAliases(t *testing.T) {
	t.Parallel()
	x := index.New()
	x.ApplyEntry(entryOf(1, event(3, stored(1, 2, 5))))
	names := map[uint64]map[uint64][]string{ // by requested block hash
		1: {1: {"vllm"}}, 11: {1: {"vllm", "kvbm"}}, 12: {2: {"kvbm"}}, 2: {2: {"kvbm"}}, 13: {99: {"kvbm"}},
	}
	alias := func(worker string, rank uint32, hashes []uint64) map[uint64][]string {
		if worker != "w" || rank != 3 {
			t.Errorf("aliases of %s, rank %d", worker, rank)
		}
		all := make(map[uint64][]string)
		for _, h := range hashes {
			for hash, sources := range names[h] {
				all[hash] = sources
			}
		}
		return all
	}
	for name, test := range map[string]struct {
		lookup index.Lookup
		want   map[uint64]string
	}{
		"by a source's block hash":         {index.Lookup{BlockHashes: []uint64{12}}, map[uint64]string{2: "kvbm"}},
		"by the block hash of the entries": {index.Lookup{BlockHashes: []uint64{1}}, map[uint64]string{1: "vllm"}},
		"by a tokens hash":                 {index.Lookup{TokensHashes: []uint64{1002}}, map[uint64]string{2: "kvbm"}},
		"a block without an alias":         {index.Lookup{BlockHashes: []uint64{12, 5}}, map[uint64]string{2: "kvbm", 5: ""}},
		"by both": {
			index.Lookup{BlockHashes: []uint64{12}, TokensHashes: []uint64{1002, 1001}}, map[uint64]string{1: "vllm", 2: "kvbm"},
		},
		"of a block that is not in the index yet": {index.Lookup{BlockHashes: []uint64{13}}, map[uint64]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			test.lookup.Tiers, test.lookup.Limit, test.lookup.Alias = allTiers, 2, alias
			got := make(map[uint64]string)
			for _, h := range holders(t, x, test.lookup) {
				if got[h.GetBlockHash()] != "" {
					t.Errorf("block %d is found twice", h.GetBlockHash())
				}
				got[h.GetBlockHash()] = strings.Join(h.GetSources(), " ")
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("sources (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHoldersDoNotBlockTheWriter applies entries in each call that a lookup makes: of its context, between two parts of
// a scan, and of Alias.
func TestHoldersDoNotBlockTheWriter(t *testing.T) {
	t.Parallel()
	const blocks = 100_000
	x := filled(blocks)
	parts, aliases, seq := 0, 0, uint64(0)
	write := func() {
		seq++
		x.ApplyEntry(entryOf(seq, event(0, stored(seq)), event(1, stored(seq))))
	}
	q := index.Lookup{Tiers: allTiers, Limit: 10, TokensHashes: []uint64{1}}
	q.Alias = func(string, uint32, []uint64) map[uint64][]string {
		aliases++
		write()
		return nil
	}
	found, err := x.Holders(steppedContext{t.Context(), func() {
		parts++
		write()
	}}, &q)
	if err != nil || len(found) != 1 {
		t.Errorf("got %v, %v, want one block", found, err)
	}
	if parts < blocks/4096 || aliases != 2 { // for the rank, and for the block found
		t.Errorf("%d blocks were read in %d parts, with %d calls of Alias", blocks, parts, aliases)
	}
}

// TestHoldersEndWithTheContext cancels a scan.
func TestHoldersEndWithTheContext(t *testing.T) {
	t.Parallel()
	x := filled(100_000)
	ctx, cancel := context.WithCancel(t.Context())
	parts := 0
	_, err := x.Holders(steppedContext{ctx, func() {
		if parts++; parts == 3 {
			cancel()
		}
	}}, &index.Lookup{Tiers: allTiers, Limit: 10, TokensHashes: []uint64{2}})
	if !errors.Is(err, context.Canceled) || parts != 3 {
		t.Errorf("got error %v after %d parts, want the context's error after 3", err, parts)
	}
	_, err = x.Holders(ctx, &index.Lookup{Tiers: allTiers, Limit: 10, BlockHashes: []uint64{0}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("block hashes: got error %v, want the context's", err)
	}
}

// TestHoldersOfWorkersRemovedMeanwhile removes the worker during a scan.
func TestHoldersOfWorkersRemovedMeanwhile(t *testing.T) {
	t.Parallel()
	x := filled(100_000)
	parts := 0
	_, err := x.Holders(steppedContext{t.Context(), func() {
		if parts++; parts == 2 {
			x.ApplyEntry(entryOf(1, event(0, &kvcastv1.WorkerRemoved{})))
		}
	}}, &index.Lookup{Tiers: allTiers, Limit: 10, TokensHashes: []uint64{2}})
	if err != nil || parts > 3 {
		t.Errorf("got error %v after %d parts, want none after the removal", err, parts)
	}
}

func TestTiersOfABlock(t *testing.T) {
	t.Parallel()
	x := index.New()
	x.ApplyEntry(entryOf(1, event(0, stored(1)), inTier(disk, event(0, stored(1))), inTier(pinned, event(2, stored(1)))))
	for _, test := range []struct {
		worker string
		rank   uint32
		hash   uint64
		want   []kvcastv1.Tier
	}{
		{"w", 0, 1, []kvcastv1.Tier{device, disk}},
		{"w", 2, 1, []kvcastv1.Tier{pinned}},
		{"w", 0, 2, nil},
		{"w", 1, 1, nil},
		{"v", 0, 1, nil},
	} {
		if diff := cmp.Diff(test.want, x.Tiers(test.worker, test.rank, test.hash)); diff != "" {
			t.Errorf("tiers of block %d of %s, rank %d (-want +got):\n%s", test.hash, test.worker, test.rank, diff)
		}
	}
}

// TestWriterIsNotBlockedByASnapshotsConsumer applies entries while the consumer of a piece does not return.
func TestWriterIsNotBlockedByASnapshotsConsumer(t *testing.T) {
	t.Parallel()
	x := filled(20_000)
	s, _ := x.Snapshot("w")
	pieces := 0
	for range s.Blocks(t.Context(), allTiers) {
		pieces++
		written := make(chan struct{})
		go func() {
			defer close(written)
			x.ApplyEntry(entryOf(uint64(pieces), event(0, removed(0)), event(0, cleared(kvcastv1.Cleared_REASON_ENGINE_CLEARED))))
		}()
		<-written
		if got := x.Seq(); got != uint64(pieces) {
			t.Errorf("seq: got %d, want %d", got, pieces)
		}
	}
	if pieces < 2 {
		t.Errorf("got %d pieces, want several", pieces)
	}
}

package pipeline

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/hashtable"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// checkStale compares the stale blocks with a set, and checks that none precedes the search
// position.
func checkStale(t interface{ Fatalf(string, ...any) }, got *blocks, want map[uint64]bool) {
	stale := 0
	got.all(func(b *slot) {
		if got.isStale(b) {
			stale++
			if b.Cursor() < got.staleFrom {
				t.Fatalf("block at %x is stale, and the search continues at %x", b.Cursor(), got.staleFrom)
			}
		}
		if got.isStale(b) != want[b.Key()] {
			t.Fatalf("block %d: got stale %v, want %v", b.Key(), got.isStale(b), want[b.Key()])
		}
	})
	if stale != len(want) || got.stale != len(want) {
		t.Fatalf("stale blocks: got %d, counted %d, want %d", stale, got.stale, len(want))
	}
}

// TestStaleBlocksAreThoseNotStoredSinceTheGap draws stores, removes, gaps and evictions of
// stale blocks, in tables of one segment and of many.
func TestStaleBlocksAreThoseNotStoredSinceTheGap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		got := newTable(nil)
		blocks, stale := make(map[uint64]uint64), make(map[uint64]bool)
		hash := rapid.Uint64Range(0, rapid.SampledFrom([]uint64{10, 300, 9000}).Draw(t, "hashes"))
		for range rapid.IntRange(0, 30).Draw(t, "steps") {
			first, n := hash.Draw(t, "hash"), rapid.Uint64Range(1, 3000).Draw(t, "run")
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0:
				got.gap()
				for h := range blocks {
					stale[h] = true
				}
			case 1:
				expire(t, got, blocks, stale, rapid.SampledFrom([]int{1, 20, 400, 3000}).Draw(t, "too many"))
			case 2:
				for h := first; h < first+n; h++ {
					got.remove(h, copies.Remove)
					delete(blocks, h)
					delete(stale, h)
				}
			default:
				r := &run{key: runKey{kind: wire.KindStored}}
				for h := first; h < first+n; h++ {
					if _, ok := blocks[h]; !ok || stale[h] {
						r.hashes = append(r.hashes, h)
					}
					blocks[h] = 0
					delete(stale, h)
				}
				storeRun(got, r)
				for h := range got.copies { // absent in this test
					delete(got.copies, h)
				}
			}
			got.blocks.all(func(b *slot) { b.Value.parent = 0 })
			checkBlocks(t, &got.blocks, blocks)
			checkStale(t, &got.blocks, stale)
			checkAttributes(t, got)
		}
	})
}

// expire evicts n stale blocks from the table and the maps.
func expire(t *rapid.T, got *table, blocks map[uint64]uint64, stale map[uint64]bool, n int) {
	want := min(n, len(stale))
	gone := got.expire(n, nil)
	if len(gone) != want {
		t.Fatalf("blocks that left: got %d, want %d", len(gone), want)
	}
	for _, h := range gone {
		if !stale[h] {
			t.Fatalf("block %d left, and is not stale", h)
		}
		delete(blocks, h)
		delete(stale, h)
	}
}

// TestRankHasTooManyGaps exhausts a rank's gap numbers: the next gap removes all blocks, and
// numbering restarts.
func TestRankHasTooManyGaps(t *testing.T) {
	p, err := New(Config{MaxBlocksPerRank: 2}, journal.NewMemory(journal.Config{MaxBytes: 1 << 20}))
	if err != nil {
		t.Fatal(err)
	}
	l := p.AddWorker(feed.Worker{Name: "w"}).(*Lane)
	store := func(hashes ...uint64) {
		l.Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes}}})
	}
	store(1)
	l.ranks[0].tables[kvblock.TierDevice].blocks.generation = maxGeneration - 1
	store(1)
	l.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
	table := l.ranks[0].tables[kvblock.TierDevice]
	if all, stale := l.ranks[0].blocks(), l.ranks[0].stale(); all != 1 || stale != 1 || table.blocks.generation != maxGeneration {
		t.Fatalf("blocks after the last gap but one: got %d, %d of them stale, in generation %d", all, stale, table.blocks.generation)
	}
	store(1)
	if b := plain(table)[1]; b.HasParent || b.Copies != 2 {
		t.Errorf("block in the last generation: got %+v, want its flags as they were", b)
	}
	l.Gap(feed.Gap{Reason: feed.GapReplayForgotten, Missed: 3})
	if all, stale := l.ranks[0].blocks(), l.ranks[0].stale(); all != 0 || stale != 0 {
		t.Errorf("blocks after a gap too many: got %d, %d of them stale, want none", all, stale)
	}
	if l.counts.gaps != 2 || l.counts.missedBatches != 3 || l.counts.events[kvcastv1.RouterEventClearedField] != 1 || l.counts.events[kvcastv1.RouterEventGapField] != 1 {
		t.Errorf("after a gap too many: got %+v", l.counts)
	}
	store(2)
	l.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
	if all, stale := l.ranks[0].blocks(), l.ranks[0].stale(); all != 1 || stale != 1 {
		t.Errorf("blocks after one more gap: got %d, %d of them stale, want 1 and 1", all, stale)
	}
}

// TestStaleBlocksAreFoundFromAnySlotOn starts the search of a segment behind stale blocks,
// as happens after they have moved.
func TestStaleBlocksAreFoundFromAnySlotOn(t *testing.T) {
	const blocks = 5000
	for _, slot := range []int{0, 7, hashtable.MaxSegment - 1, hashtable.MaxSegment, 2 * hashtable.MaxSegment} {
		got := newTable(nil)
		stale := make(map[uint64]bool)
		r := &run{key: runKey{kind: wire.KindStored}}
		for h := range uint64(blocks) {
			r.hashes = append(r.hashes, h)
			stale[h] = true
		}
		storeRun(got, r)
		got.gap()
		for n := blocks; n > 0; n -= 500 {
			got.blocks.staleSlot = slot
			for _, h := range got.expire(500, nil) {
				delete(stale, h)
			}
			checkStale(t, &got.blocks, stale)
		}
		if len(stale) > 0 || got.blocks.table.Len() > 0 {
			t.Errorf("from slot %d on: %d blocks are left, %d of them in the table", slot, len(stale), got.blocks.table.Len())
		}
	}
}

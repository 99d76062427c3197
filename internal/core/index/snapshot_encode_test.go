package index_test

import (
	"context"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestSnapshotHasParentsBeforeChildren stores a forest with cycles in a random order, in several tiers and partly
// without content. Each block comes once in each tier, as it was stored, and after its parent unless they are in a
// cycle.
func TestSnapshotHasParentsBeforeChildren(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		x := index.New()
		n := rapid.SampledFrom([]uint64{1, 3, 20, 300}).Draw(t, "blocks")
		parents := make(map[uint64]uint64)
		cycles := rapid.Bool().Draw(t, "cycles")
		order := rapid.Permutation(slices.Collect(func(yield func(uint64) bool) {
			for h := uint64(1); h <= n && yield(h); h++ {
			}
		})).Draw(t, "order")
		type place struct {
			tier kvcastv1.Tier
			hash uint64
		}
		want := make(map[place]bool)
		for i, h := range order {
			s := stored(h)
			if rapid.IntRange(0, 3).Draw(t, "hash only") == 0 {
				s.TokensHashes = nil
			}
			s.BlockSize = rapid.SampledFrom([]uint32{0, 16, 16, 16}).Draw(t, "block size")
			s.LoraName = rapid.SampledFrom([]*string{nil, nil, nil, proto.String("a")}).Draw(t, "lora")
			if last := n; rapid.IntRange(0, 9).Draw(t, "root") > 0 {
				if !cycles {
					last = h - 1
				}
				parents[h] = rapid.Uint64Range(0, last).Draw(t, "parent")
				s.ParentHash = proto.Uint64(parents[h])
			}
			for _, tier := range rapid.SampledFrom([][]kvcastv1.Tier{{device}, {device}, {device, disk}, {pinned}}).Draw(t, "tiers") {
				x.ApplyEntry(entryOf(uint64(i+1), inTier(tier, event(0, s))))
				want[place{tier, h}] = true
			}
		}
		some := rapid.SampledFrom([]kvblock.Tiers{
			allTiers, tierBit(device), tierBit(disk) | tierBit(pinned), 1,
		}).Draw(t, "wanted tiers")
		maps.DeleteFunc(want, func(p place, _ bool) bool { return some&tierBit(p.tier) == 0 })
		present := make(map[uint64]bool)
		for p := range want {
			present[p.hash] = true
		}
		s, _ := x.Snapshot("w")
		got, earlier := make(map[place]bool), make(map[uint64]bool)
		blocks := x.Blocks("w", 0)
		for piece := range s.Blocks(context.Background(), some) {
			for _, e := range decodeBlocks(t, piece).GetEvents() {
				parent, hasParent := e.GetStored().GetParentHash(), e.GetStored().ParentHash != nil
				for i, h := range e.GetStored().GetBlockHashes() {
					if got[place{e.GetTier(), h}] {
						t.Fatalf("block %d comes twice in %v", h, e.GetTier())
					}
					b := blocks[h]
					if hasParent != b.HasParent || parent != b.Parent || b.HasTokens != (len(e.GetStored().GetTokensHashes()) > 0) {
						t.Fatalf("block %d has parent %d, %v in %v, want %+v", h, parent, hasParent, e, b)
					}
					if e.GetStored().GetLoraName() != b.LoRA || e.GetStored().GetBlockSize() != b.BlockSize {
						t.Fatalf("block %d is in %v, want %+v", h, e, b)
					}
					if b.HasTokens && e.GetStored().GetTokensHashes()[i] != b.Tokens {
						t.Fatalf("block %d has another content in %v", h, e)
					}
					if hasParent && present[parent] && !earlier[parent] && !inCycle(parents, h) {
						t.Fatalf("block %d comes before its parent %d", h, parent)
					}
					got[place{e.GetTier(), h}], earlier[h] = true, true
					parent, hasParent = h, true
				}
			}
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("blocks (-want +got):\n%s", diff)
		}
	})
}

// inCycle reports whether a block is its own ancestor.
func inCycle(parents map[uint64]uint64, hash uint64) bool {
	h := hash
	for range len(parents) {
		if h = parents[h]; h == hash {
			return true
		}
	}
	return false
}

// TestSnapshotHasChainsInLongEvents checks that few bytes are used for a block, and the size of pieces.
func TestSnapshotHasChainsInLongEvents(t *testing.T) {
	t.Parallel()
	const blocks = 64_000
	x := filled(blocks)
	s, _ := x.Snapshot("w")
	total, pieces := 0, 0
	var last int
	for piece := range s.Blocks(t.Context(), allTiers) {
		if pieces > 0 && last < 60_000 {
			t.Errorf("piece %d has %d bytes, and is not the last", pieces, last)
		}
		last, pieces, total = len(piece), pieces+1, total+len(piece)
		if len(piece) > index.PieceBytes {
			t.Errorf("a piece has %d bytes, want at most %d", len(piece), index.PieceBytes)
		}
	}
	if got := float64(total) / blocks; got > 20 {
		t.Errorf("%.1f bytes for a block of a chain of 64 blocks, want at most 20", got)
	}
}

// TestPiecesAreBounded has chains that are in all tiers, and long names.
func TestPiecesAreBounded(t *testing.T) {
	t.Parallel()
	x := index.New()
	const blocks = 10_000
	s := stored()
	for h := range uint64(blocks) {
		s.BlockHashes, s.TokensHashes = append(s.BlockHashes, h), append(s.TokensHashes, h)
	}
	s.LoraName = proto.String("an adapter")
	for tier := range kvcastv1.Tier(kvblock.NumTiers) {
		x.ApplyEntry(entryOf(uint64(tier), inTier(tier+1, event(0, s))))
	}
	snapshot, _ := x.Snapshot("w")
	got := 0
	for piece := range snapshot.Blocks(t.Context(), allTiers) {
		if len(piece) > index.PieceBytes || cap(piece) != index.PieceBytes {
			t.Errorf("a piece has %d bytes in memory for %d, want at most %d", len(piece), cap(piece), index.PieceBytes)
		}
		for _, e := range decodeBlocks(t, piece).GetEvents() {
			got += len(e.GetStored().GetBlockHashes())
			if n := len(e.GetStored().GetBlockHashes()); n > 1024 {
				t.Errorf("an event has %d blocks", n)
			}
		}
	}
	if got != blocks*kvblock.NumTiers {
		t.Errorf("got %d blocks, want %d", got, blocks*kvblock.NumTiers)
	}
}

// TestPiecesWithoutReuseStayUnchanged keeps all pieces of a snapshot, and reads them after another snapshot.
func TestPiecesWithoutReuseStayUnchanged(t *testing.T) {
	t.Parallel()
	x := filled(40_000)
	want := index.New()
	copyWorker(t, x, want, "w", allTiers)
	s, _ := x.Snapshot("w")
	pieces := slices.Collect(s.Blocks(t.Context(), allTiers))
	for range 2 {
		copyWorker(t, x, index.New(), "w", allTiers) // returns its pieces
	}
	s.Reuse(nil)
	s.Reuse(make([]byte, 10))
	got := index.New()
	got.ApplySnapshotWorker(s.Worker)
	for _, piece := range pieces {
		got.ApplySnapshotBlocks(decodeBlocks(t, piece))
	}
	if diff := compare(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestMemoryOfSnapshotIsBounded counts the bytes that a snapshot of a rank allocates, with pieces that are reused.
func TestMemoryOfSnapshotIsBounded(t *testing.T) {
	testclass.WithoutRace(t)
	const blocks = 100_000
	x := filled(blocks)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection frees pieces that wait for reuse
	allocated := func() uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		s, _ := x.Snapshot("w")
		for piece := range s.Blocks(t.Context(), allTiers) {
			s.Reuse(piece)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	allocated()
	if got := float64(allocated()) / blocks; got > 130 { // some 126, most of them to sort the blocks
		t.Errorf("a snapshot allocates %.1f bytes for a block, want at most 130", got)
	}
}

package index_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// tokenIDs returns the token ids in a snapshot of the worker w, by block hash, of those that are not empty.
func tokenIDs(t *testing.T, x *index.Index, wanted bool) map[uint64][]uint32 {
	t.Helper()
	s, ok := x.Snapshot("w")
	if !ok {
		t.Fatal("no worker")
	}
	s.TokenIDs = wanted
	all := make(map[uint64][]uint32)
	for piece := range s.Blocks(t.Context(), allTiers) {
		var blocks kvcastv1.SnapshotBlocks
		if err := proto.Unmarshal(piece, &blocks); err != nil {
			t.Fatal(err)
		}
		for _, e := range blocks.GetEvents() {
			size := int(e.GetStored().GetBlockSize())
			for ids, i := e.GetStored().GetTokenIds(), 0; len(ids) > 0; ids, i = ids[size:], i+1 {
				all[e.GetStored().GetBlockHashes()[i]] = slices.Clone(ids[:size])
			}
		}
	}
	return all
}

// TestTokenIDsAreRetainedOnPurposeOnly stores blocks with and without token ids, and reads them from snapshots and checkpoints.
func TestTokenIDsAreRetainedOnPurposeOnly(t *testing.T) {
	t.Parallel()
	withIDs := stored(1, 2)
	withIDs.BlockSize, withIDs.TokenIds = 2, []uint32{10, 11, 20, 21}
	without := stored(3)
	without.BlockSize, without.ParentHash = 2, proto.Uint64(2)
	short := stored(4) // one of two tokens
	short.BlockSize, short.TokenIds = 2, []uint32{40}
	entry := entryOf(1, event(0, withIDs), event(0, without), event(0, short), inTier(disk, event(0, withIDs)))
	want := map[uint64][]uint32{1: {10, 11}, 2: {20, 21}}
	for _, retained := range []bool{false, true} {
		x, restored := index.New(), index.New()
		if retained {
			x.RetainTokenIDs(1 << 20)
			restored.RetainTokenIDs(1 << 20)
		}
		x.Reset() // keeps the setting
		x.ApplyEntry(entry)
		if got := tokenIDs(t, x, false); len(got) > 0 {
			t.Errorf("retained %t: a snapshot has the token ids %v", retained, got)
		}
		got := tokenIDs(t, x, true)
		if !retained {
			if len(got) > 0 || x.TokenIDBytes() > 0 {
				t.Errorf("token ids are retained without purpose: %v, %d bytes", got, x.TokenIDBytes())
			}
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" || x.TokenIDBytes() == 0 {
			t.Errorf("token ids of %d bytes (-want +got):\n%s", x.TokenIDBytes(), diff)
		}
		state, _, ok := x.Checkpoint(t.Context(), "w")
		if !ok {
			t.Fatal("no checkpoint")
		}
		if err := restored.Restore(state); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, tokenIDs(t, restored, true)); diff != "" {
			t.Errorf("token ids after a checkpoint (-want +got):\n%s", diff)
		}
	}
}

package index_test

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestBriefTellsWhetherBlocksWereRemovedSince applies entries, decoded and encoded.
func TestBriefTellsWhetherBlocksWereRemovedSince(t *testing.T) {
	for _, encoded := range []bool{false, true} {
		x, positions := index.New(), []uint64{0}
		apply := func(seq uint64, events ...*kvcastv1.RouterEvent) {
			e := entryOf(seq, events...)
			positions = append(positions, seq)
			if !encoded {
				x.ApplyEntry(e)
				return
			}
			b, err := proto.Marshal(&kvcastv1.SubscribeResponse{Entries: []*kvcastv1.Entry{e}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := x.ApplyEncoded(b, nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		// want checks that of the positions at which the index was, those before created are not of rank 0, and that blocks were removed
		// since those before removed.
		want := func(created, removed uint64, trust kvcastv1.Trust) {
			t.Helper()
			got, ok := x.Brief("w", 0)
			if !ok || got.BlockSize != 16 || got.Trust != trust {
				t.Errorf("got %+v, %v, want the trust %v", got, ok, trust)
			}
			for _, seq := range positions {
				if (seq < got.Created) != (seq < created) || (seq < got.Removed) != (seq < removed) {
					t.Errorf("at %d: got %+v, want %d and %d", seq, got, created, removed)
				}
			}
		}
		if _, ok := x.Brief("w", 0); ok {
			t.Error("there is a rank before the first entry")
		}
		store := &kvcastv1.Stored{BlockHashes: []uint64{1, 2, 3}, TokensHashes: []uint64{4, 5, 6}, BlockSize: 16}
		remove := &kvcastv1.Removed{BlockHashes: []uint64{3}}
		apply(1, event(1, store))
		apply(3, event(0, store))
		want(3, 0, kvcastv1.Trust_TRUST_EXACT)
		apply(4, event(1, remove)) // of another rank
		want(3, 0, kvcastv1.Trust_TRUST_EXACT)
		apply(6, event(0, store), event(0, remove))
		want(3, 6, kvcastv1.Trust_TRUST_EXACT)
		apply(7, event(0, store))
		want(3, 6, kvcastv1.Trust_TRUST_EXACT)
		apply(8, event(0, &kvcastv1.Cleared{}))
		want(3, 8, kvcastv1.Trust_TRUST_EXACT)
		apply(9, event(0, &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_INCOMPLETE}))
		want(3, 8, kvcastv1.Trust_TRUST_DEGRADED)
		apply(10, event(0, &kvcastv1.WorkerRemoved{}), event(0, store))
		want(10, 0, kvcastv1.Trust_TRUST_EXACT)
	}
}

package index_test

import (
	"context"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const allTiers = ^kvblock.Tiers(0)

// afterSnapshot ignores what a snapshot does not have, or has in another form.
var afterSnapshot = cmp.Options{
	cmpopts.IgnoreFields(index.Rank{}, "UsedTiers", "LastGap"), cmpopts.IgnoreFields(index.Worker{}, "LastSeq", "Added"),
}

// decodeBlocks decodes a piece of a snapshot, and checks its form.
func decodeBlocks(t fataler, piece []byte) *kvcastv1.SnapshotBlocks {
	t.Helper()
	m := new(kvcastv1.SnapshotBlocks)
	if err := proto.Unmarshal(piece, m); err != nil {
		t.Fatal(err)
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil || string(again) != string(piece) {
		t.Fatalf("a piece is not what proto.Marshal gives (-want +got):\n%s", cmp.Diff(again, piece))
	}
	for _, e := range m.GetEvents() {
		if s := e.GetStored(); len(s.GetBlockHashes())+len(e.GetGroupStored().GetBlockHashes()) == 0 || len(s.GetTokenIds()) > 0 || e.GetEventId() != 0 || e.DpRank == nil {
			t.Fatalf("a snapshot has the event %v", e)
		}
	}
	return m
}

// copyWorker applies a snapshot of a worker to another index, and returns its seq.
func copyWorker(t fataler, from, to *index.Index, name string, tiers kvblock.Tiers) (seq uint64) {
	t.Helper()
	s, ok := from.Snapshot(name)
	if !ok {
		t.Fatalf("no snapshot of %s", name)
	}
	applySnapshot(t, &s, to, tiers, func() {})
	return s.Seq
}

// applySnapshot applies a snapshot to an index. It calls step between the pieces and the parts of the scans.
func applySnapshot(t fataler, s *index.Snapshot, to *index.Index, tiers kvblock.Tiers, step func()) {
	t.Helper()
	to.ApplySnapshotWorker(s.Worker)
	for piece := range s.Blocks(steppedContext{context.Background(), step}, tiers) {
		to.ApplySnapshotBlocks(decodeBlocks(t, piece))
		s.Reuse(piece)
		step()
	}
}

// steppedContext calls step whenever a long operation looks whether it must end.
type steppedContext struct {
	context.Context
	step func()
}

func (c steppedContext) Err() error {
	c.step()
	return c.Context.Err()
}

// TestSnapshotAndLaterEntriesEqualTheState begins snapshots of all workers at a random position, and reads them while
// further entries are applied.
func TestSnapshotAndLaterEntriesEqualTheState(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		anyParent := rapid.Bool().Draw(t, "any parent")
		var entries []*kvcastv1.Entry
		for seq := range uint64(rapid.IntRange(0, 60).Draw(t, "entries")) {
			entries = append(entries, drawEntry(t, seq+1, anyParent))
		}
		x, n := index.New(), 0
		step := func() {
			if n < len(entries) {
				x.ApplyEntry(entries[n])
				n++
			}
		}
		for range rapid.IntRange(0, len(entries)).Draw(t, "entries before the snapshots") {
			step()
		}
		copied, seqs := index.New(), make(map[string]uint64)
		for _, name := range []string{"a", "b", "c"} {
			if s, ok := x.Snapshot(name); ok {
				if s.Seq != uint64(n) {
					t.Fatalf("seq: got %d, want %d", s.Seq, n)
				}
				applySnapshot(t, &s, copied, allTiers, step)
				seqs[name] = s.Seq
			} else {
				seqs[name] = uint64(n)
			}
		}
		for n < len(entries) {
			step()
		}
		for _, e := range entries {
			if e.GetSeq() > seqs[e.GetWorker()] {
				copied.ApplyEntry(e)
			}
		}
		if anyParent { // contents depend on the order of contradicting stores
			sameHashes(t, x, copied)
		} else if diff := compare(x, copied, afterSnapshot); diff != "" {
			t.Fatal(diff)
		}
	})
}

// sameHashes compares the block hashes of each rank and tier.
func sameHashes(t fataler, want, got *index.Index) {
	t.Helper()
	all, _ := want.Workers(nil)
	others, _ := got.Workers(nil)
	if diff := cmp.Diff(all, others, afterSnapshot, protocmp.Transform()); diff != "" {
		t.Fatalf("workers (-want +got):\n%s", diff)
	}
}

// TestSnapshotUnderLoad reads snapshots of ranks with many segments while a writer stores, removes and clears: each of
// them, and the entries after it, equal the state at the end.
func TestSnapshotUnderLoad(t *testing.T) {
	t.Parallel()
	const chain = 64
	pool := uint64(testclass.Size(10_000, 30_000))
	x := index.New()
	var entries []*kvcastv1.Entry
	next := uint64(1)
	write := func() {
		s, r := stored(), removed()
		for range chain {
			s.BlockHashes, s.TokensHashes = append(s.BlockHashes, next), append(s.TokensHashes, next)
			if next > pool {
				r.BlockHashes = append(r.BlockHashes, next-pool)
			}
			next++
		}
		last := stored(next - 1)
		e := entryOf(uint64(len(entries)+1), event(0, s), inTier(disk, event(0, last)), event(0, r), event(1, last))
		if len(entries)%1500 == 1499 {
			e.Events = append(e.Events, event(0, &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_RESTARTED}))
		}
		entries = append(entries, e)
		x.ApplyEntry(e)
	}
	for range 2 * pool / chain {
		write()
	}
	snapshots, seqs := make(chan *index.Index, 3), make(chan uint64, 3)
	var reader sync.WaitGroup
	reader.Go(func() {
		for range cap(snapshots) {
			s, _ := x.Snapshot("w")
			copied := index.New()
			applySnapshot(t, &s, copied, allTiers, func() {})
			snapshots <- copied
			seqs <- s.Seq
		}
		close(snapshots)
	})
	for len(snapshots) < cap(snapshots) && len(entries) < 20_000 {
		write()
	}
	reader.Wait()
	for copied := range snapshots {
		for _, e := range entries[<-seqs:] {
			copied.ApplyEntry(e)
		}
		if diff := compare(x, copied, afterSnapshot); diff != "" {
			t.Fatal(diff)
		}
	}
}

// TestSnapshotScansInParts checks that a scan releases the index after a bounded number of blocks.
func TestSnapshotScansInParts(t *testing.T) {
	t.Parallel()
	const blocks = 100_000
	x := filled(blocks)
	s, _ := x.Snapshot("w")
	parts, seq := 0, uint64(0)
	copied := index.New()
	applySnapshot(t, &s, copied, allTiers, func() {
		parts++
		seq++
		x.ApplyEntry(entryOf(seq, event(0, stored(seq)))) // the index is not locked
	})
	if got := len(copied.Blocks("w", 0)); got < blocks {
		t.Errorf("blocks: got %d, want at least %d", got, blocks)
	}
	if parts < blocks/4096 {
		t.Errorf("%d blocks were read in %d parts", blocks, parts)
	}
}

func TestSnapshotEndsEarly(t *testing.T) {
	t.Parallel()
	x := filled(100_000)
	s, _ := x.Snapshot("w")
	ctx, cancel := context.WithCancel(t.Context())
	pieces := 0
	for range s.Blocks(ctx, allTiers) {
		pieces++
		break
	}
	cancel()
	for range s.Blocks(ctx, allTiers) {
		pieces++
	}
	if pieces != 1 {
		t.Errorf("got %d pieces, want the one before the reader stopped", pieces)
	}
}

func TestSnapshotOfAnUnknownWorker(t *testing.T) {
	t.Parallel()
	x := index.New()
	if _, ok := x.Snapshot("w"); ok {
		t.Error("got a snapshot of an unknown worker")
	}
	x.ApplyEntry(entryOf(1, event(0, stored(1))))
	s, _ := x.Snapshot("w")
	x.ApplyEntry(entryOf(2, event(0, &kvcastv1.WorkerRemoved{})))
	if _, ok := x.Snapshot("w"); ok {
		t.Error("got a snapshot of a removed worker")
	}
	for piece := range s.Blocks(t.Context(), allTiers) {
		t.Errorf("a worker that was removed after the snapshot began has %v", decodeBlocks(t, piece))
	}
}

// TestSnapshotRecordsTheWorker covers a worker that was added, and one of which only later entries are known.
func TestSnapshotRecordsTheWorker(t *testing.T) {
	t.Parallel()
	added := &kvcastv1.WorkerAdded{
		Model: "m", Endpoint: "10.0.0.5:8000", Labels: map[string]string{"zone": "a"}, BlockSize: 16, Ranks: []uint32{0, 3},
	}
	withSize := func(s *kvcastv1.Stored, size uint32) *kvcastv1.Stored {
		s.BlockSize = size
		return s
	}
	withID := func(id uint64, e *kvcastv1.RouterEvent) *kvcastv1.RouterEvent {
		e.EventId = id
		return e
	}
	for name, test := range map[string]struct {
		events []*kvcastv1.RouterEvent
		want   *kvcastv1.SnapshotWorker
	}{
		"added": {
			[]*kvcastv1.RouterEvent{withID(7, event(0, added))},
			&kvcastv1.SnapshotWorker{Worker: "w", LastEventId: 7, Added: added},
		},
		"a rank that is not configured, another block size, and a gap": {
			[]*kvcastv1.RouterEvent{
				event(0, added), event(2, withSize(stored(1), 32)), event(3, gap(kvcastv1.Gap_REASON_JOINED_LATE, 2)),
				event(2, withSize(stored(2), 0)),
			},
			&kvcastv1.SnapshotWorker{
				Worker: "w", IncompleteRanks: []uint32{3},
				Added: &kvcastv1.WorkerAdded{
					Model: "m", Endpoint: "10.0.0.5:8000", Labels: map[string]string{"zone": "a"}, BlockSize: 32, Ranks: []uint32{0, 2, 3},
				},
				Ranks: []*kvcastv1.SnapshotRank{{
					DpRank: 3, Gaps: 1, MissedBatches: 2,
					Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE},
				}},
			},
		},
		"not added": {
			[]*kvcastv1.RouterEvent{withID(8, event(1, stored(1)))},
			&kvcastv1.SnapshotWorker{
				Worker: "w", LastEventId: 8, Added: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 16, Ranks: []uint32{1}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := index.New()
			before := proto.CloneOf(added)
			x.ApplyEntry(entryOf(1, test.events...))
			s, _ := x.Snapshot("w")
			if diff := cmp.Diff(test.want, s.Worker, protocmp.Transform()); diff != "" {
				t.Errorf("record (-want +got):\n%s", diff)
			}
			if !proto.Equal(before, added) {
				t.Error("the event was changed")
			}
			copied := index.New()
			copyWorker(t, x, copied, "w", allTiers)
			if again, _ := copied.Snapshot("w"); !proto.Equal(again.Worker, s.Worker) {
				t.Errorf("snapshot of a snapshot: got %v, want %v", again.Worker, s.Worker)
			}
		})
	}
}

// TestBlocksOfASnapshotKeepTheBlockSize applies blocks that are older than the worker's newest block size.
func TestBlocksOfASnapshotKeepTheBlockSize(t *testing.T) {
	t.Parallel()
	x := index.New()
	for i, size := range []uint32{16, 64, 16, 32} {
		s := stored(uint64(i + 1))
		s.BlockSize = size
		x.ApplyEntry(entryOf(uint64(i+1), event(0, s)))
	}
	copied := index.New()
	copyWorker(t, x, copied, "w", allTiers)
	if w, _ := copied.Worker("w"); w.BlockSize != 32 {
		t.Errorf("block size: got %d, want 32", w.BlockSize)
	}
	if diff := compare(x, copied, afterSnapshot); diff != "" {
		t.Error(diff)
	}
	for h, size := range map[uint64]uint32{1: 16, 2: 64, 3: 16, 4: 32} {
		if got := copied.Blocks("w", 0)[h].BlockSize; got != size {
			t.Errorf("block size of block %d: got %d, want %d", h, got, size)
		}
	}
	if copied.Models() != 1 {
		t.Errorf("models: got %d, want 1", copied.Models())
	}
}

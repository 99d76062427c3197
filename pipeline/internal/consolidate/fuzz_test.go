package consolidate

import (
	"bytes"
	"testing"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
)

// FuzzRestore restores a tracker from any bytes. If they are valid, the tracker must have the state, and all calls
// must be possible.
func FuzzRestore(f *testing.F) {
	f.Add(manifold().AppendState(nil))
	f.Add(New(2, 1, nil, nil, new(Counts)).AppendState(nil))
	f.Fuzz(func(t *testing.T, state []byte) {
		blocks, attributes := budget.New("blocks", 10), budget.New("attribute_bytes", 1000)
		tr, err := Restore(state, 2, 10, blocks, attributes, new(Counts))
		if err != nil {
			if blocks.Used() != 0 || attributes.Used() != 0 {
				t.Fatalf("an error, and %d units and %d bytes reserved: %v", blocks.Used(), attributes.Used(), err)
			}
			return
		}
		checkTracker(t, tr)
		canonical := tr.AppendState(nil)
		again, err := Restore(canonical, 2, 10, nil, nil, new(Counts))
		if err != nil || !bytes.Equal(again.AppendState(nil), canonical) {
			t.Fatalf("the state %x is not restored from itself: %v", canonical, err)
		}
		for source := range 2 {
			tr.CountChildren(source)
			tr.play(
				stores(source, ofSalt("salt", storeOf(contents(1, 2), 1, 9))), func(t *Tracker) { t.Remove(source, 2, copies.RemoveAnnounced) },
				losesBatches(source), stores(source, continuing(2, storeOf(contents(1), 3))), removes(source, 1, 2, 3), clears(source),
			)
			checkTracker(t, tr)
		}
		if tr.Reset(); blocks.Used() != 0 || attributes.Used() != 0 {
			t.Fatalf("after a reset, %d units and %d bytes are reserved", blocks.Used(), attributes.Used())
		}
	})
}

// FuzzReplay replays any bytes. The tracker must be valid afterwards.
func FuzzReplay(f *testing.F) {
	tr := New(2, 3, nil, nil, new(Counts))
	var r Recorder
	tr.RecordTo(&r, 0)
	tr.play(
		stores(engine, ofSalt("salt", storeOf(contents(1, 2), 1, 2))), stores(offload, ofLoRA("adapter", continuing(1, storeOf(contents(2, 3), 3, 4)))),
		stores(offload, storeOf(nil, 5, 6)), removes(engine, 1, 2), losesBatches(offload), clears(engine), resetAll,
		func(tr *Tracker) { tr.RemoveBlocks([]uint64{3, 4}) }, func(tr *Tracker) { tr.CountChildren(engine) },
	)
	f.Add(r.Calls())
	f.Fuzz(func(t *testing.T, calls []byte) {
		blocks, attributes := budget.New("blocks", 10), budget.New("attribute_bytes", 1000)
		tr := New(2, 3, blocks, attributes, new(Counts))
		// An error may leave some calls replayed.
		_ = Replay(calls, func(rank uint32) *Tracker {
			if rank > 0 {
				return nil
			}
			return tr
		})
		checkTracker(t, tr)
		if blocks.Used() != tr.units() {
			t.Fatalf("%d units are reserved, want %d", blocks.Used(), tr.units())
		}
		if _, err := Restore(tr.AppendState(nil), 2, 3, nil, nil, new(Counts)); err != nil {
			t.Fatal(err)
		}
		if tr.Reset(); blocks.Used() != 0 || attributes.Used() != 0 {
			t.Fatalf("after a reset, %d units and %d bytes are reserved", blocks.Used(), attributes.Used())
		}
	})
}

package index_test

import (
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// FuzzRestore restores a worker from arbitrary state, beside another worker with the same blocks, which must not change. A
// worker that is restored is the same after another checkpoint. Of one that is refused, Forget leaves nothing.
func FuzzRestore(f *testing.F) {
	const other = "other"
	entries := func(worker string) []*kvcastv1.Entry {
		all := []*kvcastv1.Entry{
			entryOf(1, event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 16, Ranks: []uint32{0, 1},
				Labels: map[string]string{"zone": "a"}, Endpoint: "h:1"})),
			entryOf(2, event(0, stored(1, 2, 3)), inTier(disk, event(1, stored(1))), event(1, stored(9)), event(0, removed(3))),
			entryOf(3, event(0, &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_JOINED_LATE, MissedBatches: 2}),
				event(1, &kvcastv1.GroupsOmitted{})),
		}
		for _, e := range all {
			e.Worker = worker
		}
		return all
	}
	apply := func(x *index.Index, all ...*kvcastv1.Entry) *index.Index {
		for _, e := range all {
			x.ApplyEntry(e)
		}
		return x
	}
	add := func(x *index.Index, change func(*statev1.IndexWorker)) {
		state, _, ok := x.Checkpoint(f.Context(), "w")
		if !ok {
			f.Fatal("there is no checkpoint")
		}
		if change != nil {
			change(state)
		}
		b, err := proto.Marshal(state)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	x := apply(index.New(), entries("w")...)
	add(x, nil)
	add(filled(100), nil)
	add(apply(index.New(), entryOf(1, event(0, stored(1)))), nil) // whose addition is not known
	events := func(worker string, all ...*kvcastv1.RouterEvent) func(*statev1.IndexWorker) {
		b, err := proto.Marshal(&kvcastv1.SnapshotBlocks{Worker: worker, Events: all})
		if err != nil {
			f.Fatal(err)
		}
		return func(s *statev1.IndexWorker) { s.Blocks = append(s.Blocks, b) }
	}
	add(x, events(other, event(0, removed(1))))
	add(x, events("w", event(0, &kvcastv1.WorkerRemoved{}), event(7, stored(1)), event(7, &kvcastv1.Cleared{})))
	add(x, events("w", inTier(9, event(0, stored(5))),
		event(0, &kvcastv1.WorkerAdded{Model: "n", BlockSize: 8, Ranks: []uint32{5}})))
	add(x, func(s *statev1.IndexWorker) { s.Ranks[0].UsedTiers, s.Ranks[1].DpRank = 1<<32-1, 7 })
	add(x, func(s *statev1.IndexWorker) { s.Worker.Worker = "v" })
	add(x, func(s *statev1.IndexWorker) { s.Worker = nil })
	add(x, func(s *statev1.IndexWorker) { s.Blocks[0] = s.Blocks[0][:len(s.Blocks[0])-1] })
	f.Fuzz(func(t *testing.T, data []byte) {
		var state statev1.IndexWorker
		invalid := proto.Unmarshal(data, &state)
		name := state.GetWorker().GetWorker()
		if invalid != nil || name == other {
			return
		}
		without, got := apply(index.New(), entries(other)...), apply(index.New(), entries(other)...)
		err := got.Restore(&state)
		if err != nil {
			got.Forget(name)
			if diff := compare(without, got); diff != "" {
				t.Errorf("after a refused checkpoint of %q, %v: %s", name, err, diff)
			}
			return
		}
		again, _, ok := got.Checkpoint(t.Context(), name)
		if !ok {
			t.Fatalf("there is no checkpoint of %q", name)
		}
		restored := apply(index.New(), entries(other)...)
		if err := restored.Restore(again); err != nil {
			t.Fatal(err)
		}
		// No checkpoint has another model among its blocks, nor missed batches without a gap.
		if diff := compare(got, restored, cmpopts.IgnoreFields(index.Worker{}, "Model"),
			cmpopts.IgnoreFields(index.Rank{}, "MissedBatches")); diff != "" {
			t.Errorf("restored again: %s", diff)
		}
		var m index.Matches
		got.Match(&index.Query{Prompts: []index.Prompt{{TokensHashes: []uint64{1001, 1002}}}, Walk: true}, &m)
		got.Forget(name)
		if diff := compare(without, got); diff != "" {
			t.Errorf("without %q: %s", name, diff)
		}
	})
}

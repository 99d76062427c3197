package checker_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/checker"
)

func TestDiff(t *testing.T) {
	hashOnly := func(id uint64, hashes ...uint64) *kvcastv1.RouterEvent {
		ev := store(id, 0, hashes...)
		ev.GetStored().TokensHashes, ev.GetStored().BlockSize = nil, 0
		return ev
	}
	lora := func(ev *kvcastv1.RouterEvent) *kvcastv1.RouterEvent {
		name := "l"
		ev.GetStored().LoraName = &name
		return ev
	}
	type events = []*kvcastv1.RouterEvent
	tests := []struct {
		name      string
		one, more events
		same      bool
	}{
		{"empty", nil, nil, true},
		{"in another order", events{store(0, 0, 1), store(0, 0, 3)}, events{store(0, 0, 3), store(0, 0, 1)}, true},
		{"in one chain or two", events{store(0, 0, 1, 2)}, events{store(0, 0, 1), child(0, 0, 1, 2)}, true},
		{"stored twice", events{store(0, 0, 1, 2)}, events{store(0, 0, 1, 2), store(0, 0, 1, 2)}, true},
		{"hashes after contents", events{store(0, 0, 1)}, events{store(0, 0, 1), hashOnly(0, 1)}, true},
		{"contents after hashes", events{child(0, 0, 7, 1)}, events{hashOnly(0, 1), child(0, 0, 7, 1)}, true},
		{"a rank without blocks", events{store(0, 1, 1), remove(0, 1, 1)}, nil, true},
		{"incomplete", events{gap(0, 1)}, nil, false},
		{"incomplete no longer", events{gap(0, 1), clearAll(0, 1, kvcastv1.Cleared_REASON_ENGINE_CLEARED)}, nil, true},
		{"groups omitted", events{omitGroups(0, 1)}, nil, false},
		{"groups omitted until a restart", events{omitGroups(0, 1), clearAll(0, 1, kvcastv1.Cleared_REASON_ENGINE_RESTARTED)}, nil, true},
		{"groups omitted after a clear", events{omitGroups(0, 1), clearAll(0, 1, kvcastv1.Cleared_REASON_ENGINE_CLEARED)}, nil, false},
		{"a set emptied", events{store(0, 1, 1), remove(0, 1, 1)}, nil, true},
		{"a block too many", events{store(0, 0, 1)}, events{store(0, 0, 1), store(0, 0, 2)}, false},
		{"another tier", events{store(0, 0, 1)}, events{onDisk(store(0, 0, 1))}, false},
		{"another rank", events{store(0, 0, 1)}, events{store(0, 1, 1)}, false},
		{"another parent", events{child(0, 0, 8, 1)}, events{child(0, 0, 9, 1)}, false},
		{"parent 0 and none", events{child(0, 0, 0, 1)}, events{store(0, 0, 1)}, false},
		{"no contents", events{store(0, 0, 1)}, events{hashOnly(0, 1)}, false},
		{"another LoRA", events{store(0, 0, 1)}, events{lora(store(0, 0, 1))}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			view := func(list events) *checker.View {
				v := checker.NewView()
				v.Apply(added(1, "a", 1))
				for _, ev := range list {
					v.ApplyEvent("a", ev)
				}
				return v
			}
			one, more := view(tt.one), view(tt.more)
			if got := one.Diff(more); (got == "") != tt.same {
				t.Errorf("Diff = %q, want same %t", got, tt.same)
			}
			if got := more.Diff(one); (got == "") != tt.same {
				t.Errorf("Diff the other way = %q, want same %t", got, tt.same)
			}
		})
	}
}

func TestDiffNamesEachDifference(t *testing.T) {
	one, two := checker.NewView(), checker.NewView()
	one.Apply(added(1, "a", 1))
	two.Apply(added(1, "b", 1))
	one.ApplyEvent("c", store(0, 0, 1, 2))
	two.ApplyEvent("c", store(0, 0, 1))
	want := "- worker \"a\"\n+ worker \"b\"\n" +
		"- worker \"c\", rank 0, TIER_DEVICE: block 0000000000000002 " +
		"{Parent:1 HasParent:true TokensHash:2 Hashed:true BlockSize:16 LoRA:}\n"
	if diff := cmp.Diff(want, one.Diff(two)); diff != "" {
		t.Errorf("Diff (-want +got):\n%s", diff)
	}

	// An unannounced worker may have been added with any attributes.
	one, two = checker.NewView(), checker.NewView()
	one.Apply(added(1, "a", 1))
	two.ApplyEvent("a", gap(1, 0))
	if got := one.Diff(two); got != "" {
		t.Errorf("Diff with a worker not announced = %q, want none", got)
	}
	w := snapshotWorker("a", 1).SnapshotWorker
	w.Added.Model = "m"
	two.ApplyWorker(w)
	if one.Diff(two) == "" {
		t.Error("Diff with a worker of another model: none")
	}
}

func TestViewAppliesASnapshot(t *testing.T) {
	v := checker.NewView()
	v.ApplyEvent("z", store(1, 0, 1))
	v.Reset()
	v.ApplyWorker(snapshotWorker("a", 4, 1).SnapshotWorker)
	v.ApplyBlocks(snapshotBlocks("a", child(0, 0, 9, 1, 2)).SnapshotBlocks[0])
	if diff := cmp.Diff([]string{"a"}, v.Workers()); diff != "" {
		t.Errorf("Workers (-want +got):\n%s", diff)
	}
	want := map[uint64]checker.Block{
		1: {Parent: 9, HasParent: true, TokensHash: 1, Hashed: true, BlockSize: 16},
		2: {Parent: 1, HasParent: true, TokensHash: 2, Hashed: true, BlockSize: 16},
	}
	if diff := cmp.Diff(want, v.Contents("a", 0, device)); diff != "" {
		t.Errorf("Contents (-want +got):\n%s", diff)
	}
	if v.Incomplete("a", 0) || !v.Incomplete("a", 1) {
		t.Errorf("incomplete: rank 0 %t, rank 1 %t, want rank 1 alone", v.Incomplete("a", 0), v.Incomplete("a", 1))
	}
}

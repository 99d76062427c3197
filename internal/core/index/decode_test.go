package index_test

import (
	"math"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// encodeEntries encodes entries as a journal does.
func encodeEntries(t fataler, entries ...*kvcastv1.Entry) []byte {
	t.Helper()
	b, err := proto.Marshal(&kvcastv1.SubscribeResponse{Entries: entries})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEncodedEntriesApplyLikeMessages(t *testing.T) {
	testclass.WithoutRace(t)
	rapid.Check(t, func(t *rapid.T) {
		want, got := index.New(), index.New()
		anyParent := rapid.Bool().Draw(t, "any parent")
		for seq := uint64(1); seq <= 20; {
			var batch []*kvcastv1.Entry
			var times []index.EntryTimes
			entries := rapid.IntRange(0, 3).Draw(t, "entries")
			if rapid.IntRange(0, 9).Draw(t, "many") == 9 {
				entries = 60 // more operations than are applied together
			}
			for range entries {
				e := drawEntry(t, seq, anyParent)
				batch = append(batch, e)
				want.ApplyEntry(e)
				times = append(times, index.EntryTimes{Engine: e.GetEngineTimeUnixNano(), Ingest: e.GetIngestTimeUnixNano()})
				seq++
			}
			if len(batch) == 0 {
				seq++
			}
			gotTimes, err := got.ApplyEncoded(encodeEntries(t, batch...), nil, nil)
			if err != nil || !slices.Equal(gotTimes, times) {
				t.Fatalf("apply: got times %v, %v, want %v", gotTimes, err, times)
			}
			if want.Seq() != got.Seq() || want.Models() != got.Models() {
				t.Fatalf("got seq %d and %d models, want %d and %d", got.Seq(), got.Models(), want.Seq(), want.Models())
			}
			if diff := compare(want, got); diff != "" {
				t.Fatal(diff)
			}
		}
	})
}

// TestInvalidEntriesAreErrors checks that an index which must be abandoned reports that.
func TestInvalidEntriesAreErrors(t *testing.T) {
	t.Parallel()
	valid := encodeEntries(t,
		entryOf(1, event(0, stored(1))), entryOf(2, event(0, removed(1))), entryOf(3, event(0, &kvcastv1.Gap{})),
	)
	for n := range valid {
		all := index.New()
		_, err := all.ApplyEncoded(valid[:n], nil, nil)
		var m kvcastv1.SubscribeResponse
		if want := proto.Unmarshal(valid[:n], &m); (err == nil) != (want == nil) {
			t.Errorf("the first %d bytes: got error %v, want %v", n, err, want)
		}
	}
	another, err := proto.Marshal(&kvcastv1.SubscribeResponse{SnapshotBlocks: []*kvcastv1.SnapshotBlocks{{Worker: "w"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := index.New().ApplyEncoded(another, nil, nil); err == nil {
		t.Error("a field that is no entry: got no error")
	}
}

// TestEventsOfAllSizesApply applies an event that is larger than what the decoder keeps memory for, and small ones
// before and after it.
func TestEventsOfAllSizesApply(t *testing.T) {
	testclass.WithoutRace(t)
	want, got := index.New(), index.New()
	var all []uint64
	for h := range uint64(70_000) {
		all = append(all, h+1)
	}
	for i, ev := range []*kvcastv1.RouterEvent{
		event(0, stored(1, 2)), event(1, stored(all...)), event(0, stored(5)), event(0, removed(2)),
		event(1, removed(all[10:]...)), event(math.MaxUint32, stored(7)),
	} {
		e := entryOf(uint64(i+1), ev)
		want.ApplyEntry(e)
		if _, err := got.ApplyEncoded(encodeEntries(t, e), nil, nil); err != nil {
			t.Fatal(err)
		}
		if diff := compare(want, got); diff != "" {
			t.Fatalf("after %d events: %s", i+1, diff)
		}
	}
}

// TestEncodedStoresOfKnownBlocksAllocateNothing covers the path of almost all entries.
func TestEncodedStoresOfKnownBlocksAllocateNothing(t *testing.T) {
	testclass.WithoutRace(t)
	x := index.New()
	s := stored(1, 2, 3)
	s.LoraName = proto.String("an-adapter")
	entries := encodeEntries(t, entryOf(1, event(0, s), event(0, removed(9))))
	var times []index.EntryTimes
	if allocs := testing.AllocsPerRun(100, func() {
		var err error
		if times, err = x.ApplyEncoded(entries, times[:0], nil); err != nil {
			panic(err)
		}
	}); allocs != 0 {
		t.Errorf("got %v allocations, want none", allocs)
	}
}

// FuzzEncodedEntries applies arbitrary bytes: entries are applied, or an error is returned.
func FuzzEncodedEntries(f *testing.F) {
	f.Add(encodeEntries(f, entryOf(1, event(0, stored(1, 2)), event(1, &kvcastv1.WorkerAdded{Model: "m"})), entryOf(2)))
	f.Add(encodeEntries(f, entryOf(1, event(0, &kvcastv1.WorkerRemoved{}), event(0, removed(1)), event(0, &kvcastv1.Cleared{}))))
	f.Add(encodeEntries(f, entryOf(1, inTier(7, event(0, stored(1))), event(0, nil), event(0, &kvcastv1.GroupsOmitted{}))))
	f.Fuzz(func(t *testing.T, entries []byte) {
		x := index.New()
		x.ApplyEntry(entryOf(1, event(0, stored(1, 2, 3))))
		_, err := x.ApplyEncoded(entries, nil, nil)
		var m kvcastv1.SubscribeResponse
		if invalid := proto.Unmarshal(entries, &m); invalid != nil || err != nil {
			return
		}
		// Whatever was applied, the index stays usable.
		x.ApplyEntry(entryOf(2, event(0, &kvcastv1.Cleared{}), event(0, stored(4))))
		if got := x.Tiers("w", 0, 4); len(got) != 1 {
			t.Errorf("tiers of a block stored later: got %v", got)
		}
	})
}

// TestRunsAreForgottenBetweenEntries has an entry that removes a block and stores it again, in so many operations that they are applied in parts, while
// the index has nearly as many runs without holders as it keeps: it may forget one only after the entry, at which the block is held.
func TestRunsAreForgottenBetweenEntries(t *testing.T) {
	testclass.WithoutRace(t)
	store := func(hash, parent uint64) *kvcastv1.RouterEvent {
		s := &kvcastv1.Stored{BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash}, BlockSize: 16}
		if parent != 0 {
			s.ParentHash = proto.Uint64(parent)
		}
		return event(0, s)
	}
	const leaf, unknown = 1 << 40, 1 << 41
	for unheld := uint64(16_384); unheld < 16_392; unheld++ {
		x, seq := index.New(), uint64(0)
		apply := func(events ...*kvcastv1.RouterEvent) {
			seq++
			if _, err := x.ApplyEncoded(encodeEntries(t, entryOf(seq, events...)), nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		apply(store(1, 0))
		apply(store(leaf, 1), store(2, 1), store(3, 1))
		apply(event(0, removed(leaf)), event(0, removed(1)))
		apply(store(1, 0))
		for last := uint64(3); last < 3+unheld; last++ { // each leaves a run without holders
			apply(store(leaf, last), store(last+1, last), event(0, removed(leaf)), event(0, removed(last)))
		}
		var events []*kvcastv1.RouterEvent
		for range 31 {
			events = append(events, event(0, removed(unknown)))
		}
		apply(append(events, event(0, removed(1)), store(1, 0))...)
		if got, want := matchOne(x, index.Prompt{TokensHashes: []uint64{1, 2}}), []string{"w/0 2 [2 0 0 0] TRUST_EXACT"}; !slices.Equal(got, want) {
			t.Errorf("%d runs without holders: got %v, want %v", unheld, got, want)
		}
	}
}

package pipeline_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// largeStores returns n events of slightly more than 256 KiB each.
func largeStores(n int) []wire.Event {
	events := make([]wire.Event, n)
	for i := range events {
		e := store()
		for j := range pipeline.MaxMaxBlocks {
			e.BlockHashes = append(e.BlockHashes, uint64(i*pipeline.MaxMaxBlocks+j+1))
		}
		e.TokensHashes = e.BlockHashes
		events[i] = e
	}
	return events
}

func TestEntryAbove3MiBIsCutBetweenEvents(t *testing.T) {
	testclass.WithoutRace(t)
	cfg := pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks}
	withWorker(t, cfg, func(t *testing.T, s *subject) {
		got := s.play(t, timedBatch(10, 0, append(largeStores(30), remove(1), cleared())...), timedBatch(20, 0, store(1)))
		for _, e := range got {
			if n := size(e); n > maxEntryBytes {
				t.Errorf("entry: got %d bytes, want at most %d", n, maxEntryBytes)
			}
		}
		if diff := cmp.Diff([]int{11, 11, 10, 1}, lengths(got)); diff != "" {
			t.Errorf("events of each entry (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([][2]int64{{10, 11}, {10, 11}, {10, 11}, {20, 21}}, times(got)); diff != "" {
			t.Errorf("times (-want +got):\n%s", diff)
		}
		ids := eventIDs(got)
		for i, id := range ids {
			if want := uint64(i + 2); id != want {
				t.Fatalf("event id: got %d, want %d", id, want)
			}
		}
		if got, want := len(ids), 33; got != want {
			t.Errorf("events: got %d, want %d", got, want)
		}
	})
}

// TestEntryIsCutAtAByteMoreThan3MiB reaches the exact size through the length of the last
// event's LoRA name.
func TestEntryIsCutAtAByteMoreThan3MiB(t *testing.T) {
	testclass.WithoutRace(t)
	cfg := pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks}
	entries := func(t *testing.T, padding int) []*kvcastv1.Entry {
		var got []*kvcastv1.Entry
		withWorker(t, cfg, func(t *testing.T, s *subject) {
			got = s.play(t, batch(append(largeStores(11), withLoRA(strings.Repeat("a", padding), store(1)))...))
		})
		return got
	}
	// With this padding the length prefixes are as long as at the limit.
	const guess = 200_000
	first := entries(t, guess)
	if len(first) != 1 {
		t.Fatalf("entries at first: got %d, want 1", len(first))
	}
	edge := guess + maxEntryBytes - size(first[0])
	if got := entries(t, edge); len(got) != 1 || size(got[0]) != maxEntryBytes {
		t.Errorf("at the edge: got %d entries, the first of %d bytes, want 1 of %d", len(got), size(got[0]), maxEntryBytes)
	}
	if diff := cmp.Diff([]int{11, 1}, lengths(entries(t, edge+1))); diff != "" {
		t.Errorf("events of each entry past the edge (-want +got):\n%s", diff)
	}
}

func TestEventAbove3MiBIsAnEntryOfItsOwn(t *testing.T) {
	large := withLoRA(strings.Repeat("a", maxEntryBytes), store(2))
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		got := s.play(t, batch(store(1), large, remove(3)))
		if diff := cmp.Diff([]int{1, 1, 1}, lengths(got)); diff != "" {
			t.Fatalf("events of each entry (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]uint64{2, 3, 4}, eventIDs(got)); diff != "" {
			t.Errorf("event ids (-want +got):\n%s", diff)
		}
		for i, hashes := range [][]uint64{
			got[0].GetEvents()[0].GetStored().GetBlockHashes(),
			got[1].GetEvents()[0].GetStored().GetBlockHashes(),
			got[2].GetEvents()[0].GetRemoved().GetBlockHashes(),
		} {
			if want := []uint64{uint64(i + 1)}; !cmp.Equal(hashes, want) {
				t.Errorf("blocks of entry %d: got %v, want %v", i, hashes, want)
			}
		}
	})
}

func TestTokenIDs(t *testing.T) {
	const emit, keep = true, false
	tests := map[string]struct {
		emit  bool
		event wire.Event
		want  [][]string
	}{
		"are kept back by default":            {keep, withTokens(32, store(1, 2)), [][]string{{"store [1 2]"}}},
		"are emitted where that is asked for": {emit, withTokens(32, store(1, 2)), [][]string{{"store [1 2] 32 tokens"}}},
		"beyond the blocks are cut":           {emit, withTokens(40, store(1, 2)), [][]string{{"store [1 2] 32 tokens"}}},
		"that do not suffice are left out":    {emit, withTokens(31, store(1, 2)), [][]string{{"store [1 2]"}}},
		"need a block size":                   {emit, withBlockSize(0, withTokens(32, store(1, 2))), [][]string{{"store [1 2] block size 0"}}},
		"go with hash-only stores": {
			emit, hashOnly(withTokens(32, store(1, 2))), [][]string{{"store [1 2] hash only 32 tokens"}},
		},
		"end a run at the cap": {
			emit, withBlockSize(maxRunTokens/2, withTokens(maxRunTokens/2*5, store(1, 2, 3, 4, 5))),
			[][]string{{
				"store [1 2] block size 262144 524288 tokens",
				"store [3 4] after 2 block size 262144 524288 tokens",
				"store [5] after 4 block size 262144 262144 tokens",
			}},
		},
		"end a run before the cap where blocks do not fit": {
			emit, withBlockSize(200_000, withTokens(600_000, store(1, 2, 3))),
			[][]string{{
				"store [1 2] block size 200000 400000 tokens",
				"store [3] after 2 block size 200000 200000 tokens",
			}},
		},
		"of a block above the cap are omitted": {
			emit, withBlockSize(maxRunTokens+1, withTokens(maxRunTokens+1, store(1))),
			[][]string{{"store [1] block size 524289"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{EmitTokenIDs: test.emit}, func(t *testing.T, s *subject) {
				got := s.play(t, batch(test.event))
				if diff := cmp.Diff(test.want, describe(got)); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
				next := uint32(0)
				for _, e := range got[0].GetEvents() {
					for _, id := range e.GetStored().GetTokenIds() {
						if id != next {
							t.Fatalf("token id: got %d, want %d", id, next)
						}
						next = (next + 1) % 100
					}
				}
			})
		})
	}
}

func TestRunAtTheTokenCapIsFlushed(t *testing.T) {
	half := func(e wire.Event) wire.Event {
		return withBlockSize(maxRunTokens/2, withTokens(maxRunTokens/2, e))
	}
	cfg := pipeline.Config{EmitTokenIDs: true, Timeout: pipeline.MaxBatchTimeout}
	withWorker(t, cfg, func(t *testing.T, s *subject) {
		got := describe(s.play(t, batch(half(store(1)), half(after(1, store(2))))))
		if diff := cmp.Diff([][]string{{"store [1 2] block size 262144 524288 tokens"}}, got); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
	})
}

func TestEntryNamesWorkerAndModel(t *testing.T) {
	s, err := newSubject(pipeline.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	got := s.play(t, call{Worker: testWorker, Add: &feed.Worker{
		Name: testWorker, Model: "m", BlockSize: 16, Endpoint: "10.0.0.5:8000",
		Labels: map[string]string{"a": "b", "c": "d"}, Ranks: []uint32{0, 3},
	}}, batch(store(1)), gap(0), removed())
	for _, e := range got {
		if e.GetWorker() != testWorker || e.GetModel() != "m" {
			t.Errorf("entry: got worker %q and model %q, want %q and %q", e.GetWorker(), e.GetModel(), testWorker, "m")
		}
	}
	for _, i := range []int{0, len(got) - 1} {
		if e := got[i].GetEvents()[0]; e.DpRank != nil {
			t.Errorf("rank of an event about the worker: got %d, want none", e.GetDpRank())
		}
	}
	for _, e := range got[1 : len(got)-1] {
		if e.GetEvents()[0].DpRank == nil {
			t.Errorf("rank of %v: got none, want 0", e)
		}
	}
}

// TestNamesAreMadeUTF8 checks that invalid UTF-8, which protobuf rejects, is replaced.
func TestNamesAreMadeUTF8(t *testing.T) {
	s, err := newSubject(pipeline.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.add(feed.Worker{
		Name: "w\xff", Model: "m\xff", Endpoint: "e\xff", Labels: map[string]string{"k\xff": "v\xff"},
	})
	if err := s.journal.err(); err != nil {
		t.Fatal(err)
	}
	s.pipeline.RemoveWorker("w\xff", feed.RemovedDeregistered)
	if got, want := describe(s.journal.all()["w\uFFFD"]), [][]string{{"added"}, {"removed DEREGISTERED"}}; !cmp.Equal(got, want) {
		t.Errorf("entries: got %v, want %v", got, want)
	}
}

// sizes is a journal that keeps the largest size of a record.
type sizes struct {
	nowhere
	largest int
}

func (s *sizes) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	s.largest = max(s.largest, len(r.Body)+len(r.State))
	return s.nowhere.Append(ctx, r)
}

// TestRecordsFitIntoTheJournal makes large entries, large events and much waiting state.
func TestRecordsFitIntoTheJournal(t *testing.T) {
	testclass.WithoutRace(t)
	for _, limit := range []int{pipeline.MinRecordBytes, 8 << 20} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			j := &sizes{}
			cfg := pipeline.Config{Durable: true, MaxRecordBytes: limit, MaxBlocks: pipeline.MaxMaxBlocks, EmitTokenIDs: true}
			p, err := pipeline.New(cfg, j)
			if err != nil {
				t.Fatal(err)
			}
			lane := p.AddWorker(feed.Worker{Name: "w", Model: "m"})
			stores := largeStores(30)
			var removes []wire.Event
			for _, e := range stores {
				removes = append(removes, remove(e.BlockHashes...))
			}
			tokens := withBlockSize(4, withTokens(4*pipeline.MaxMaxBlocks, stores[0]))
			for range 2 {
				lane.Batch(batch(stores...).Batch)
				lane.Batch(batch(stores...).Batch)
				lane.Batch(batch(removes...).Batch) // suppressed: copies are left
				lane.Batch(batch(tokens, withBlockSize(1<<20, withTokens(1<<20, store(1)))).Batch)
			}
			if j.largest > limit || j.largest < limit/4 {
				t.Errorf("the largest record has %d bytes, want at most %d, and a quarter of it at least", j.largest, limit)
			}
		})
	}
	if err := (pipeline.Config{MaxRecordBytes: pipeline.MinRecordBytes - 1}).Validate(); err == nil {
		t.Error("a limit that is too small is allowed")
	}
}

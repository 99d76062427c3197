package journaltest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func testUnreadablePositionsAreErrors(t *testing.T, h Harness) {
	j := open(t, h, 16<<10)
	var records []journal.Record
	for n := 1; n <= 200; n++ {
		records = append(records, Record(n, 500))
	}
	appendAll(t, j, records...)
	b := j.Bounds()
	if b.Oldest < 3 || b.Newest != 200 {
		t.Fatalf("bounds: got %+v, want some entries evicted and newest 200", b)
	}
	for _, tt := range []struct {
		name  string
		after uint64
		want  error
		first uint64 // seq of the first entry; 0: none
	}{
		{"the newest entry", 200, nil, 0},
		{"one beyond the newest", 201, journal.ErrAhead, 0},
		{"one before the newest", 199, nil, 200},
		{"one before the oldest retained", b.Oldest - 1, nil, b.Oldest},
		{"two before the oldest retained", b.Oldest - 2, journal.ErrCompacted, 0},
		{"the first entry", 0, journal.ErrCompacted, 0},
		{"the largest seq", 1<<64 - 1, journal.ErrAhead, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := j.Read(t.Context(), journal.Query{After: tt.after, MaxBytes: 1 << 20})
			var first uint64
			if entries := Decode(t, c); len(entries) > 0 {
				first = entries[0].GetSeq()
			}
			if !errors.Is(err, tt.want) || first != tt.first {
				t.Errorf("read after %d: got first %d, error %v; want first %d, error %v", tt.after, first, err, tt.first, tt.want)
			}
			var pe *journal.PositionError
			if tt.want != nil && (!errors.As(err, &pe) || pe.Bounds != b || pe.After != tt.after) {
				t.Errorf("error: got %#v, want a PositionError with bounds %+v", err, b)
			}
		})
	}
}

// testReads compares filtered and unfiltered reads with a loop over a slice of all entries.
func testReads(t *testing.T, h Harness) {
	sources := []*journal.Source{{Worker: "a"}, {Worker: "b"}, {Worker: "c"}}
	opened := 0
	rapid.Check(t, func(rt *rapid.T) {
		if opened++; h.MaxOpen > 0 && opened > h.MaxOpen {
			return
		}
		j := open(t, h, rapid.SampledFrom([]int{1 << 10, 100 << 10, defaultBytes}).Draw(rt, "max bytes"))
		var records []journal.Record
		var entries []*kvcastv1.Entry
		for _, n := range rapid.SliceOfN(rapid.IntRange(0, 1<<10), 0, 60).Draw(rt, "entries") {
			// Many copies exceed the number of entries that one read examines.
			for range rapid.SampledFrom([]int{1, 1, 1, 1, 200}).Draw(rt, "copies") {
				r := Record(n, rapid.SampledFrom([]int{0, 500, 3000}).Draw(rt, "size"))
				r.Source, r.Tiers = sources[n%3], kvblock.Tiers(1+n%7)
				var e kvcastv1.Entry
				if err := proto.Unmarshal(r.Body, &e); err != nil {
					rt.Fatal(err)
				}
				records = append(records, r)
				e.Seq = uint64(len(records))
				entries = append(entries, &e)
			}
		}
		appendAll(rt, j, records...)
		b := j.Bounds()
		if b.Newest != uint64(len(records)) {
			rt.Fatalf("newest: got %d, want %d", b.Newest, len(records))
		}
		q := journal.Query{
			After:    rapid.Uint64Range(b.Oldest-1, b.Newest).Draw(rt, "after"),
			Until:    rapid.Uint64Range(0, b.Newest+2).Draw(rt, "until"),
			MaxBytes: rapid.IntRange(1, 20_000).Draw(rt, "max bytes of a read"),
		}
		match := func(uint64, *journal.Source, kvblock.Tiers) journal.Match { return journal.MatchAll }
		if rapid.Bool().Draw(rt, "filter") {
			wanted := kvblock.Tiers(rapid.IntRange(0, 7).Draw(rt, "wanted tiers"))
			match = func(seq uint64, s *journal.Source, tiers kvblock.Tiers) journal.Match {
				if r := records[seq-1]; r.Source != s || r.Tiers != tiers {
					rt.Fatalf("the filter is called for entry %d with %v and %b", seq, s, tiers)
				}
				switch {
				case s.Worker == "b" || tiers&wanted == 0:
					return journal.MatchNone
				case tiers&^wanted != 0:
					return journal.MatchSome
				}
				return journal.MatchAll
			}
			q.Filter = match
		}
		until := b.Newest
		if q.Until != 0 {
			until = min(until, q.Until)
		}
		for q.After < until {
			c, err := j.Read(context.Background(), q)
			if err != nil || c.Last <= q.After || c.Last > until {
				rt.Fatalf("read after %d to %d: got a chunk to %d, error %v", q.After, until, c.Last, err)
			}
			var want []*kvcastv1.Entry
			partial := false
			for seq := q.After + 1; seq <= c.Last; seq++ {
				m := match(seq, records[seq-1].Source, records[seq-1].Tiers)
				if m != journal.MatchNone {
					want = append(want, entries[seq-1])
				}
				partial = partial || m == journal.MatchSome
			}
			if diff := cmp.Diff(want, Decode(rt, c), protocmp.Transform()); diff != "" {
				rt.Fatalf("entries after %d (-want +got):\n%s", q.After, diff)
			}
			if q.Filter == nil && len(want) == 0 {
				rt.Fatalf("read after %d: got no entry", q.After)
			}
			if len(want) > 1 && c.Bytes > q.MaxBytes {
				rt.Fatalf("read after %d: %d bytes in %d entries, want at most %d", q.After, c.Bytes, len(want), q.MaxBytes)
			}
			if partial && !c.Partial {
				rt.Fatalf("read after %d: the chunk does not report that an entry matches partially", q.After)
			}
			q.After = c.Last
		}
	})
}

// testReadersFollowTheNewestEntry runs four readers while entries are appended.
func testReadersFollowTheNewestEntry(t *testing.T, h Harness) {
	const entries = 2000
	j := open(t, h, defaultBytes)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			all, err := readTo(t.Context(), j, entries)
			if err != nil {
				t.Errorf("read: %v", err)
			}
			for i, e := range all {
				if want := fmt.Sprintf("w%d", i); e.GetWorker() != want {
					t.Errorf("entry %d: got worker %s, want %s", e.GetSeq(), e.GetWorker(), want)
				}
			}
		})
	}
	for n := range entries {
		if _, err := j.Append(t.Context(), Record(n, n%100)); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

func testMemoryOfReadersIsNeverWritten(t *testing.T, h Harness) {
	j := open(t, h, 64<<10)
	appendAll(t, j, Record(1, 10))
	c, err := j.Read(t.Context(), journal.Query{MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	was := bytes.Join(c.Slices, nil)
	var records []journal.Record
	for n := range 1000 { // some 15 times the size of the journal
		records = append(records, Record(n, 1000))
	}
	appendAll(t, j, records...)
	if !bytes.Equal(was, bytes.Join(c.Slices, nil)) {
		t.Error("memory that a reader references was written again")
	}
}

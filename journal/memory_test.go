package journal_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// record makes an entry whose content tells which one it is.
func record(t interface{ Fatal(...any) }, n, padding int) journal.Record {
	body, err := proto.Marshal(&kvcastv1.Entry{
		Worker: fmt.Sprintf("w%d", n),
		Model:  strings.Repeat("m", padding),
	})
	if err != nil {
		t.Fatal(err)
	}
	return journal.Record{Body: body}
}

// decode reads a chunk as a subscriber would.
func decode(t interface{ Fatal(...any) }, c journal.Chunk) []*kvcastv1.Entry {
	var m kvcastv1.SubscribeResponse
	if err := proto.Unmarshal(bytes.Join(c.Slices, nil), &m); err != nil {
		t.Fatal(err)
	}
	return m.GetEntries()
}

func TestMemoryGivesBackWhatWasAppended(t *testing.T) {
	m := journal.NewMemory(journal.Config{})
	if got, want := m.Bounds(), (journal.Bounds{Epoch: m.Bounds().Epoch, Oldest: 1}); got != want {
		t.Errorf("bounds of an empty journal: got %+v, want %+v", got, want)
	}
	for n := 1; n <= 3; n++ {
		m.Append(record(t, n, 10))
	}
	c, err := m.Read(journal.Query{After: 1, MaxBytes: 1 << 20}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range decode(t, c) {
		got = append(got, fmt.Sprintf("%d:%s", e.GetSeq(), e.GetWorker()))
	}
	if diff := cmp.Diff([]string{"2:w2", "3:w3"}, got); diff != "" {
		t.Errorf("entries after 1 (-want +got):\n%s", diff)
	}
	if c.Entries != 2 || c.Last != 3 || c.Cut {
		t.Errorf("chunk: got %+v, want 2 entries, to 3", c)
	}
}

func TestMemoryRefusesPositionsItCannotReadFrom(t *testing.T) {
	m := journal.NewMemory(journal.Config{MaxBytes: 16 << 10})
	for n := 1; n <= 200; n++ {
		m.Append(record(t, n, 500))
	}
	b := m.Bounds()
	if b.Oldest < 2 || b.Newest != 200 {
		t.Fatalf("bounds: got %+v, want some evicted and newest 200", b)
	}
	for _, tt := range []struct {
		name  string
		after uint64
		want  error
		first uint64
	}{
		{"caught up", 200, nil, 0},
		{"one beyond the newest", 201, journal.ErrAhead, 0},
		{"the newest entry", 199, nil, 200},
		{"just before the oldest retained", b.Oldest - 1, nil, b.Oldest},
		{"one before that", b.Oldest - 2, journal.ErrCompacted, 0},
		{"the beginning", 0, journal.ErrCompacted, 0},
		{"the largest number", 1<<64 - 1, journal.ErrAhead, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := m.Read(journal.Query{After: tt.after, MaxBytes: 1 << 20}, nil)
			var first uint64
			if entries := decode(t, c); len(entries) > 0 {
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

func TestMemoryStaysWithinItsBytes(t *testing.T) {
	const limit = 256 << 10
	rapid.Check(t, func(t *rapid.T) {
		m := journal.NewMemory(journal.Config{MaxBytes: limit})
		for n, size := range rapid.SliceOfN(rapid.IntRange(0, 20_000), 1, 200).Draw(t, "sizes") {
			m.Append(record(t, n, size))
			if got := m.Bytes(); got > limit {
				t.Fatalf("after %d entries: %d bytes, want at most %d", n+1, got, limit)
			}
		}
	})
}

// TestMemoryStaysWithinItsBytesWithTheSmallestEntries has entries that take less than
// their places in the index.
func TestMemoryStaysWithinItsBytesWithTheSmallestEntries(t *testing.T) {
	const limit = 1 << 20
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	for n := range 500_000 {
		m.Append(journal.Record{})
		if got := m.Bytes(); got > limit {
			t.Fatalf("after %d entries: %d bytes, want at most %d", n+1, got, limit)
		}
	}
	if b := m.Bounds(); b.Newest-b.Oldest < 10_000 {
		t.Errorf("bounds: got %+v, want more to be kept", b)
	}
}

// TestMemoryThatAReaderHoldsIsCounted has a reader keep two of many segments.
func TestMemoryThatAReaderHoldsIsCounted(t *testing.T) {
	const limit, segment = 256 << 10, 4 << 10
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	m.Append(record(t, 1, 3000))
	m.Append(record(t, 2, 3000)) // in a segment of its own
	held, err := m.Read(journal.Query{MaxBytes: 1 << 20}, nil)
	if err != nil || len(held.Slices) != 2 {
		t.Fatalf("got %d slices, %v", len(held.Slices), err)
	}
	if got := m.Retained(); got != 0 {
		t.Errorf("before anything is evicted: %d bytes are retained", got)
	}
	for n := range 1000 {
		m.Append(record(t, n, 3000))
	}
	// Cleanups run some time after the collection that finds them.
	settles := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); m.Retained() != want; {
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes are retained, want %d", m.Retained(), want)
			}
			runtime.GC()
		}
	}
	settles(2 * segment)
	if !bytes.Contains(held.Slices[0], []byte("w1")) || !bytes.Contains(held.Slices[1], []byte("w2")) {
		t.Error("what the reader holds has changed")
	}
	clear(held.Slices)
	settles(0)
}

func TestMemoryKeepsAnEntryLargerThanItsBytes(t *testing.T) {
	m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
	m.Append(record(t, 1, 10))
	m.Append(record(t, 2, 1<<20))
	c, err := m.Read(journal.Query{After: 1, MaxBytes: 1}, nil)
	if err != nil || c.Last != 2 || len(decode(t, c)) != 1 {
		t.Fatalf("got %d entries to %d, error %v; want the large entry", c.Entries, c.Last, err)
	}
	m.Append(record(t, 3, 10))
	if got := m.Bounds().Oldest; got != 3 {
		t.Errorf("oldest: got %d, want 3: the large entry must make room", got)
	}
}

func TestMemoryLetsGoByAgeWhileNothingComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{MaxAge: time.Minute})
		m.Append(record(t, 1, 10))
		<-time.After(time.Minute)
		if got := m.Bounds(); got.Oldest != 1 {
			t.Errorf("at the age: oldest %d, want 1", got.Oldest)
		}
		<-time.After(time.Nanosecond)
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 1 {
			t.Errorf("beyond the age: got %+v, want oldest 2 and newest 1", got)
		}
		if _, err := m.Read(journal.Query{After: 1, MaxBytes: 1}, nil); err != nil {
			t.Errorf("a reader that is caught up: got error %v", err)
		}
		if _, err := m.Read(journal.Query{MaxBytes: 1}, nil); !errors.Is(err, journal.ErrCompacted) {
			t.Errorf("a reader that is behind: got error %v, want ErrCompacted", err)
		}
		m.Append(record(t, 2, 10))
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 2 {
			t.Errorf("after the next append: got %+v, want oldest and newest 2", got)
		}
	})
}

// TestMemoryReadsAreContiguousAndWithinTheLimit compares with a plain slice.
func TestMemoryReadsAreContiguousAndWithinTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := journal.NewMemory(journal.Config{MaxBytes: rapid.IntRange(1, 100<<10).Draw(t, "max bytes")})
		var all []*kvcastv1.Entry
		for n, size := range rapid.SliceOfN(rapid.IntRange(0, 3000), 0, 100).Draw(t, "sizes") {
			m.Append(record(t, n, size))
			all = append(all, &kvcastv1.Entry{Seq: uint64(n + 1), Worker: fmt.Sprintf("w%d", n), Model: strings.Repeat("m", size)})
		}
		b := m.Bounds()
		if b.Newest != uint64(len(all)) {
			t.Fatalf("newest: got %d, want %d", b.Newest, len(all))
		}
		after := rapid.Uint64Range(b.Oldest-1, b.Newest).Draw(t, "after")
		limit := rapid.IntRange(1, 20_000).Draw(t, "limit")
		for after < b.Newest {
			c, err := m.Read(journal.Query{After: after, MaxBytes: limit}, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := decode(t, c)
			if len(got) == 0 || c.Entries != len(got) || c.Last != after+uint64(len(got)) {
				t.Fatalf("read after %d: got %d entries, said to be %d, to %d", after, len(got), c.Entries, c.Last)
			}
			if len(got) > 1 && c.Bytes > limit {
				t.Fatalf("read after %d: %d bytes in %d entries, want at most %d", after, c.Bytes, len(got), limit)
			}
			for i, e := range got {
				if !proto.Equal(e, all[int(after)+i]) {
					t.Fatalf("entry %d differs from what was appended", e.GetSeq())
				}
			}
			after = c.Last
		}
	})
}

// TestMemoryReadersSeeEveryEntryWhileItGrows runs readers against an appender,
// each waking by Changed alone.
func TestMemoryReadersSeeEveryEntryWhileItGrows(t *testing.T) {
	const entries = 2000
	m := journal.NewMemory(journal.Config{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for after := uint64(0); after < entries; {
				changed := m.Changed()
				c, err := m.Read(journal.Query{After: after, MaxBytes: 4096}, nil)
				if err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if c.Last == after {
					<-changed
					continue
				}
				for _, e := range decode(t, c) {
					after++
					if e.GetSeq() != after || e.GetWorker() != fmt.Sprintf("w%d", after) {
						t.Errorf("got entry %d of %s, want %d", e.GetSeq(), e.GetWorker(), after)
						return
					}
				}
			}
		})
	}
	for n := 1; n <= entries; n++ {
		m.Append(record(t, n, n%100))
	}
	wg.Wait()
}

// TestMemoryEncodesAnEntryOnce checks that all readers are given the same
// memory, and that it stays as it was.
func TestMemoryEncodesAnEntryOnce(t *testing.T) {
	m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
	m.Append(record(t, 1, 10))
	first, err := m.Read(journal.Query{MaxBytes: 1 << 20}, nil)
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Read(journal.Query{MaxBytes: 1 << 20}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if &first.Slices[0][0] != &second.Slices[0][0] {
		t.Error("two readers were given two copies")
	}
	was := bytes.Clone(first.Slices[0])
	for n := range 1000 { // evicts the entry many times over
		m.Append(record(t, n, 1000))
	}
	if !bytes.Equal(was, first.Slices[0]) {
		t.Error("memory that a reader holds was written again")
	}
}

// TestMemoryFilters compares filtered reads with a plain loop.
func TestMemoryFilters(t *testing.T) {
	sources := []*journal.Source{{Worker: "a"}, {Worker: "b"}, {Worker: "c"}}
	rapid.Check(t, func(t *rapid.T) {
		m := journal.NewMemory(journal.Config{})
		type appended struct {
			source int
			tiers  journal.Tiers
		}
		all := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) appended {
			return appended{rapid.IntRange(0, 2).Draw(t, "source"), journal.Tiers(rapid.IntRange(1, 7).Draw(t, "tiers"))}
		}), 0, 60).Draw(t, "entries")
		// Sometimes more than one read may look at.
		copies := rapid.SampledFrom([]int{1, 1, 1, 200}).Draw(t, "copies")
		for n, a := range all {
			for range copies {
				r := record(t, n, rapid.SampledFrom([]int{0, 500}).Draw(t, "size"))
				r.Source, r.Tiers = sources[a.source], a.tiers
				m.Append(r)
			}
		}
		newest := uint64(len(all) * copies)
		wanted := journal.Tiers(rapid.IntRange(0, 7).Draw(t, "wanted"))
		q := journal.Query{
			After:    rapid.Uint64Range(0, newest).Draw(t, "after"),
			Until:    rapid.Uint64Range(0, newest+2).Draw(t, "until"),
			MaxBytes: rapid.IntRange(1, 3000).Draw(t, "max bytes"),
			Filter: func(seq uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
				if a := all[(seq-1)/uint64(copies)]; sources[a.source] != s || a.tiers != tiers {
					t.Fatalf("filter is asked of entry %d with %v and %b", seq, s, tiers)
				}
				switch {
				case s.Worker == "b" || tiers&wanted == 0:
					return journal.MatchNone
				case tiers&^wanted != 0:
					return journal.MatchSome
				}
				return journal.MatchAll
			},
		}
		until := newest
		if q.Until != 0 {
			until = min(until, q.Until)
		}
		var want []uint64
		for seq := q.After + 1; seq <= until; seq++ {
			if a := all[(seq-1)/uint64(copies)]; a.source != 1 && a.tiers&wanted != 0 {
				want = append(want, seq)
			}
		}
		var got []uint64
		for q.After < until {
			c, err := m.Read(q, nil)
			if err != nil {
				t.Fatal(err)
			}
			entries := decode(t, c)
			if c.Last <= q.After || c.Last > until || c.Entries != len(entries) {
				t.Fatalf("read after %d to %d: got %d entries, said to be %d, to %d", q.After, until, len(entries), c.Entries, c.Last)
			}
			if len(entries) > 1 && c.Bytes > q.MaxBytes {
				t.Fatalf("%d bytes in %d entries, want at most %d", c.Bytes, len(entries), q.MaxBytes)
			}
			some := false
			for _, e := range entries {
				got = append(got, e.GetSeq())
				some = some || all[(e.GetSeq()-1)/uint64(copies)].tiers&^wanted != 0
			}
			if some && !c.Cut {
				t.Fatal("an entry is wanted in part, and the chunk does not say so")
			}
			q.After = c.Last
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("entries (-want +got):\n%s", diff)
		}
	})
}

func TestReceiptTellsTheSeq(t *testing.T) {
	m := journal.NewMemory(journal.Config{})
	if seq, err := (journal.Receipt{}).Wait(t.Context()); seq != 0 || err != nil {
		t.Errorf("no append: got %d, %v, want 0", seq, err)
	}
	for want := uint64(1); want < 4; want++ {
		if seq, err := m.Append(record(t, 1, 10)).Wait(t.Context()); seq != want || err != nil {
			t.Errorf("got %d, %v, want %d", seq, err, want)
		}
	}
}

func BenchmarkMemoryAppend(b *testing.B) {
	m := journal.NewMemory(journal.Config{})
	r := journal.Record{Body: make([]byte, 330)}
	b.ReportAllocs()
	for b.Loop() {
		m.Append(r)
	}
}

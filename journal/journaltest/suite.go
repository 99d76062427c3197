// Package journaltest is the conformance suite of package journal: every implementation
// runs it. It also has a journal that acknowledges late and fails on request, to test
// those that append.
package journaltest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Harness opens the journals to test.
type Harness struct {
	// Open returns an empty journal that retains about maxBytes, and no entry of which
	// expires by age within the test. The suite closes it.
	Open func(t *testing.T, maxBytes int) journal.Journal
	// Fail makes the appends in flight of a source fail with err, and all later ones,
	// as a lost lease does; nil where appends cannot fail.
	Fail func(j journal.Journal, s *journal.Source, err error)
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	for _, tt := range []struct {
		name string
		run  func(*testing.T, Harness)
	}{
		{"AppendedEntriesCanBeRead", testAppendedEntriesCanBeRead},
		{"UnreadablePositionsAreErrors", testUnreadablePositionsAreErrors},
		{"ReadsAreContiguousAndBounded", testReadsAreContiguousAndBounded},
		{"FiltersSelectEntries", testFiltersSelectEntries},
		{"ReadersFollowTheNewestEntry", testReadersFollowTheNewestEntry},
		{"MemoryOfReadersIsNeverWritten", testMemoryOfReadersIsNeverWritten},
		{"AppendsOfASourceKeepTheirOrder", testAppendsOfASourceKeepTheirOrder},
		{"AcknowledgedEntriesAreVisible", testAcknowledgedEntriesAreVisible},
		{"CloseFlushes", testCloseFlushes},
		{"FailedAppendFailsItsSource", testFailedAppendFailsItsSource},
	} {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, h) })
	}
}

// fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// tester is a journal under test and what is appended to it.
type tester struct {
	journal.Journal
	t fataler
}

const defaultBytes = 64 << 20

func open(t *testing.T, h Harness) tester {
	t.Helper()
	return openWithin(t, t, h, defaultBytes)
}

// openWithin opens a journal that retains maxBytes. The test of it may be a part of t.
func openWithin(t *testing.T, part fataler, h Harness, maxBytes int) tester {
	t.Helper()
	j := h.Open(t, maxBytes)
	t.Cleanup(func() { _ = j.Close(context.Background()) })
	return tester{j, part}
}

// Record returns an entry of worker w followed by n, with a model of some bytes.
func Record(n, modelBytes int) journal.Record {
	return record(&journal.Source{Worker: fmt.Sprintf("w%d", n)}, &kvcastv1.Entry{
		Worker: fmt.Sprintf("w%d", n), Model: strings.Repeat("m", modelBytes),
	})
}

func record(s *journal.Source, e *kvcastv1.Entry) journal.Record {
	body, err := proto.Marshal(e)
	if err != nil {
		panic("journaltest: encode an entry: " + err.Error())
	}
	return journal.Record{Source: s, Body: body}
}

// Decode returns the entries of a chunk as a subscriber decodes them.
func Decode(t fataler, c journal.Chunk) []*kvcastv1.Entry {
	t.Helper()
	var m kvcastv1.SubscribeResponse
	if err := proto.Unmarshal(bytes.Join(c.Slices, nil), &m); err != nil {
		t.Fatal(err)
	}
	return m.GetEntries()
}

// append appends records and waits until all are acknowledged.
func (j tester) append(records ...journal.Record) {
	j.t.Helper()
	pending := make([]journal.Pending, len(records))
	for i, r := range records {
		var err error
		if pending[i], err = j.Append(context.Background(), r); err != nil {
			j.t.Fatalf("append %d of %d: %v", i+1, len(records), err)
		}
	}
	for i, p := range pending {
		if _, err := p.Wait(context.Background()); err != nil {
			j.t.Fatalf("wait for append %d of %d: %v", i+1, len(records), err)
		}
	}
}

// read reads a chunk and returns its entries.
func (j tester) read(q journal.Query) (journal.Chunk, []*kvcastv1.Entry) {
	j.t.Helper()
	c, err := j.Read(context.Background(), q)
	if err != nil {
		j.t.Fatal(err)
	}
	entries := Decode(j.t, c)
	if c.Entries != len(entries) {
		j.t.Fatalf("chunk has %d entries, and reports %d", len(entries), c.Entries)
	}
	if got := len(bytes.Join(c.Slices, nil)); c.Bytes != got {
		j.t.Fatalf("chunk has %d bytes, and reports %d", got, c.Bytes)
	}
	return c, entries
}

func testAppendedEntriesCanBeRead(t *testing.T, h Harness) {
	j := open(t, h)
	b := j.Bounds()
	if b.Epoch == "" || b.Oldest != 1 || b.Newest != 0 {
		t.Errorf("bounds of an empty journal: got %+v, want an epoch, oldest 1 and newest 0", b)
	}
	j.append(Record(1, 10), Record(2, 10), Record(3, 10))
	if got, want := j.Bounds(), (journal.Bounds{Epoch: b.Epoch, Oldest: 1, Newest: 3}); got != want {
		t.Errorf("bounds: got %+v, want %+v", got, want)
	}
	into := make([][]byte, 0, 4)
	c, entries := j.read(journal.Query{After: 1, MaxBytes: 1 << 20, Slices: into})
	var got []string
	for _, e := range entries {
		got = append(got, fmt.Sprintf("%d:%s", e.GetSeq(), e.GetWorker()))
	}
	if diff := cmp.Diff([]string{"2:w2", "3:w3"}, got); diff != "" {
		t.Errorf("entries after 1 (-want +got):\n%s", diff)
	}
	if c.Last != 3 || c.Partial {
		t.Errorf("chunk: got %+v, want it to end at 3", c)
	}
	if &c.Slices[:1][0] != &into[:1][0] {
		t.Error("the query's slices are not reused")
	}
	if c, entries := j.read(journal.Query{After: 3, MaxBytes: 1}); c.Last != 3 || len(entries) != 0 {
		t.Errorf("a reader that has everything: got %d entries, to %d", len(entries), c.Last)
	}
}

func testUnreadablePositionsAreErrors(t *testing.T, h Harness) {
	j := openWithin(t, t, h, 16<<10)
	var records []journal.Record
	for n := 1; n <= 200; n++ {
		records = append(records, Record(n, 500))
	}
	j.append(records...)
	b := j.Bounds()
	if b.Oldest < 3 || b.Newest != 200 {
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

// testReadsAreContiguousAndBounded compares with a plain slice.
func testReadsAreContiguousAndBounded(t *testing.T, h Harness) {
	rapid.Check(t, func(rt *rapid.T) {
		j := openWithin(t, rt, h, rapid.IntRange(1, 100<<10).Draw(rt, "max bytes"))
		var all []*kvcastv1.Entry
		for n, size := range rapid.SliceOfN(rapid.IntRange(0, 3000), 0, 100).Draw(rt, "sizes") {
			j.append(Record(n, size))
			all = append(all, &kvcastv1.Entry{Seq: uint64(n + 1), Worker: fmt.Sprintf("w%d", n), Model: strings.Repeat("m", size)})
		}
		b := j.Bounds()
		if b.Newest != uint64(len(all)) {
			rt.Fatalf("newest: got %d, want %d", b.Newest, len(all))
		}
		after := rapid.Uint64Range(b.Oldest-1, b.Newest).Draw(rt, "after")
		limit := rapid.IntRange(1, 20_000).Draw(rt, "limit")
		for after < b.Newest {
			c, got := j.read(journal.Query{After: after, MaxBytes: limit})
			if len(got) == 0 || c.Last != after+uint64(len(got)) {
				rt.Fatalf("read after %d: got %d entries, to %d", after, len(got), c.Last)
			}
			if len(got) > 1 && c.Bytes > limit {
				rt.Fatalf("read after %d: %d bytes in %d entries, want at most %d", after, c.Bytes, len(got), limit)
			}
			for i, e := range got {
				if !proto.Equal(e, all[int(after)+i]) {
					rt.Fatalf("entry %d differs from what was appended", e.GetSeq())
				}
			}
			after = c.Last
		}
	})
}

// testFiltersSelectEntries compares filtered reads with a plain loop.
func testFiltersSelectEntries(t *testing.T, h Harness) {
	sources := []*journal.Source{{Worker: "a"}, {Worker: "b"}, {Worker: "c"}}
	type appended struct {
		source int
		tiers  journal.Tiers
	}
	entry := rapid.Custom(func(t *rapid.T) appended {
		return appended{rapid.IntRange(0, 2).Draw(t, "source"), journal.Tiers(rapid.IntRange(1, 7).Draw(t, "tiers"))}
	})
	rapid.Check(t, func(rt *rapid.T) {
		j := openWithin(t, rt, h, defaultBytes)
		all := rapid.SliceOfN(entry, 0, 60).Draw(rt, "entries")
		// Sometimes more than one read examines.
		copies := rapid.SampledFrom([]int{1, 1, 1, 200}).Draw(rt, "copies")
		var records []journal.Record
		for n, a := range all {
			for range copies {
				r := Record(n, rapid.SampledFrom([]int{0, 500}).Draw(rt, "size"))
				r.Source, r.Tiers = sources[a.source], a.tiers
				records = append(records, r)
			}
		}
		j.append(records...)
		newest := uint64(len(all) * copies)
		wanted := journal.Tiers(rapid.IntRange(0, 7).Draw(rt, "wanted"))
		q := journal.Query{
			After:    rapid.Uint64Range(0, newest).Draw(rt, "after"),
			Until:    rapid.Uint64Range(0, newest+2).Draw(rt, "until"),
			MaxBytes: rapid.IntRange(1, 3000).Draw(rt, "max bytes"),
			Filter: func(seq uint64, s *journal.Source, tiers journal.Tiers) journal.Match {
				if a := all[(seq-1)/uint64(copies)]; sources[a.source] != s || a.tiers != tiers {
					rt.Fatalf("filter is called for entry %d with %v and %b", seq, s, tiers)
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
			c, entries := j.read(q)
			if c.Last <= q.After || c.Last > until {
				rt.Fatalf("read after %d to %d: got %d entries, to %d", q.After, until, len(entries), c.Last)
			}
			if len(entries) > 1 && c.Bytes > q.MaxBytes {
				rt.Fatalf("%d bytes in %d entries, want at most %d", c.Bytes, len(entries), q.MaxBytes)
			}
			some := false
			for _, e := range entries {
				got = append(got, e.GetSeq())
				some = some || all[(e.GetSeq()-1)/uint64(copies)].tiers&^wanted != 0
			}
			if some && !c.Partial {
				rt.Fatal("an entry matches in part, and the chunk does not report it")
			}
			q.After = c.Last
		}
		if diff := cmp.Diff(want, got); diff != "" {
			rt.Fatalf("entries (-want +got):\n%s", diff)
		}
	})
}

// testReadersFollowTheNewestEntry runs readers against an appender. Changed alone wakes
// them.
func testReadersFollowTheNewestEntry(t *testing.T, h Harness) {
	const entries = 2000
	j := open(t, h)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for after := uint64(0); after < entries; {
				changed := j.Changed()
				c, err := j.Read(t.Context(), journal.Query{After: after, MaxBytes: 4096})
				if err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if c.Last == after {
					<-changed
					continue
				}
				var m kvcastv1.SubscribeResponse
				if err := proto.Unmarshal(bytes.Join(c.Slices, nil), &m); err != nil {
					t.Error(err)
					return
				}
				for _, e := range m.GetEntries() {
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
		if _, err := j.Append(t.Context(), Record(n, n%100)); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

func testMemoryOfReadersIsNeverWritten(t *testing.T, h Harness) {
	j := openWithin(t, t, h, 64<<10)
	j.append(Record(1, 10))
	c, _ := j.read(journal.Query{MaxBytes: 1 << 20})
	was := bytes.Join(c.Slices, nil)
	var records []journal.Record
	for n := range 1000 { // evicts the entry many times over
		records = append(records, Record(n, 1000))
	}
	j.append(records...)
	if !bytes.Equal(was, bytes.Join(c.Slices, nil)) {
		t.Error("memory that a reader references was written again")
	}
}

// testAppendsOfASourceKeepTheirOrder appends for several sources at a time.
func testAppendsOfASourceKeepTheirOrder(t *testing.T, h Harness) {
	const sources, entries = 4, 200
	j := open(t, h)
	var wg sync.WaitGroup
	for i := range sources {
		wg.Go(func() {
			source := &journal.Source{Worker: fmt.Sprintf("w%d", i)}
			var last journal.Pending
			for n := range entries {
				r := record(source, &kvcastv1.Entry{Worker: source.Worker, EngineTimeUnixNano: int64(n)})
				var err error
				if last, err = j.Append(t.Context(), r); err != nil {
					t.Errorf("append: %v", err)
					return
				}
			}
			if _, err := last.Wait(t.Context()); err != nil {
				t.Errorf("wait: %v", err)
			}
		})
	}
	wg.Wait()
	next := make(map[string]int64)
	seq := uint64(0)
	for seq < sources*entries {
		_, got := j.read(journal.Query{After: seq, MaxBytes: 4096})
		for _, e := range got {
			seq++
			if e.GetSeq() != seq || e.GetEngineTimeUnixNano() != next[e.GetWorker()] {
				t.Fatalf("got entry %d, %d of %s; want %d, %d", e.GetSeq(), e.GetEngineTimeUnixNano(), e.GetWorker(), seq, next[e.GetWorker()])
			}
			next[e.GetWorker()]++
		}
	}
}

func testAcknowledgedEntriesAreVisible(t *testing.T, h Harness) {
	j := open(t, h)
	if seq, err := (journal.Pending{}).Wait(t.Context()); seq != 0 || err != nil {
		t.Errorf("wait for no append: got %d, %v, want 0", seq, err)
	}
	for want := uint64(1); want < 4; want++ {
		changed := j.Changed()
		p, err := j.Append(t.Context(), Record(int(want), 10))
		if err != nil {
			t.Fatal(err)
		}
		p.OnFailure(func(err error) { t.Errorf("append %d failed: %v", want, err) })
		if seq, err := p.Wait(t.Context()); seq != want || err != nil {
			t.Errorf("wait: got %d, %v, want %d", seq, err, want)
		}
		if got := j.Bounds().Newest; got != want {
			t.Errorf("newest of an acknowledged append: got %d, want %d", got, want)
		}
		<-changed
		if _, entries := j.read(journal.Query{After: want - 1, MaxBytes: 1}); len(entries) != 1 {
			t.Errorf("got %d entries, want the one acknowledged", len(entries))
		}
	}
}

func testCloseFlushes(t *testing.T, h Harness) {
	j := open(t, h)
	var pending []journal.Pending
	for n := range 10 {
		p, err := j.Append(t.Context(), Record(n, 10))
		if err != nil {
			t.Fatal(err)
		}
		pending = append(pending, p)
	}
	if err := j.Close(t.Context()); err != nil {
		t.Fatalf("close: %v", err)
	}
	for i, p := range pending {
		if seq, err := p.Wait(t.Context()); seq != uint64(i+1) || err != nil {
			t.Errorf("append %d: got %d, %v, want it to be flushed", i+1, seq, err)
		}
	}
	if _, err := j.Append(t.Context(), Record(1, 10)); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("append after close: got %v, want ErrClosed", err)
	}
	if _, err := j.Read(t.Context(), journal.Query{MaxBytes: 1}); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("read after close: got %v, want ErrClosed", err)
	}
	if err := j.Close(t.Context()); err != nil {
		t.Errorf("close again: %v", err)
	}
}

func testFailedAppendFailsItsSource(t *testing.T, h Harness) {
	if h.Fail == nil {
		t.Skip("appends of this journal cannot fail")
	}
	j := open(t, h)
	failing, other := Record(1, 10), Record(2, 10)
	j.append(failing, other)
	h.Fail(j.Journal, failing.Source, journal.ErrFenced)
	for i := range 3 {
		p, err := j.Append(t.Context(), failing)
		if err == nil {
			reported := make(chan error, 1)
			p.OnFailure(func(err error) { reported <- err })
			if _, err = p.Wait(t.Context()); err != nil {
				err = <-reported
			}
		}
		if !errors.Is(err, journal.ErrFenced) {
			t.Errorf("append %d of the failed source: got %v, want ErrFenced", i+1, err)
		}
		j.append(other)
	}
	failing.Source = &journal.Source{Worker: failing.Source.Worker}
	j.append(failing)
	var got []string
	for after := uint64(0); after < j.Bounds().Newest; {
		c, entries := j.read(journal.Query{After: after, MaxBytes: 1 << 20})
		for _, e := range entries {
			got = append(got, e.GetWorker())
		}
		after = c.Last
	}
	if diff := cmp.Diff([]string{"w1", "w2", "w2", "w2", "w2", "w1"}, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

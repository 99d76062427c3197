package journal_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/journal/journaltest"
)

func TestMemoryConforms(t *testing.T) {
	journaltest.Run(t, journaltest.Harness{Open: func(_ *testing.T, maxBytes int) journal.Journal {
		return journal.NewMemory(journal.Config{MaxBytes: maxBytes})
	}})
}

// add appends a record to a journal that is open.
func add(m *journal.Memory, r journal.Record) {
	if _, err := m.Append(context.Background(), r); err != nil {
		panic(err)
	}
}

func TestMemoryStaysWithinItsBytes(t *testing.T) {
	const limit = 256 << 10
	rapid.Check(t, func(t *rapid.T) {
		m := journal.NewMemory(journal.Config{MaxBytes: limit})
		for n, size := range rapid.SliceOfN(rapid.IntRange(0, 20_000), 1, 200).Draw(t, "sizes") {
			add(m, journaltest.Record(n, size))
			if got := m.Bytes(); got > limit {
				t.Fatalf("after %d entries: %d bytes, want at most %d", n+1, got, limit)
			}
		}
	})
}

// TestMemoryStaysWithinItsBytesWithTheSmallestEntries appends entries that are smaller
// than their index.
func TestMemoryStaysWithinItsBytesWithTheSmallestEntries(t *testing.T) {
	const limit = 1 << 20
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	for n := range 500_000 {
		add(m, journal.Record{})
		if got := m.Bytes(); got > limit {
			t.Fatalf("after %d entries: %d bytes, want at most %d", n+1, got, limit)
		}
	}
	if b := m.Bounds(); b.Newest-b.Oldest < 10_000 {
		t.Errorf("bounds: got %+v, want more to be kept", b)
	}
}

// TestMemoryCountsEvictedBytesThatAreReferenced has a reader keep two of many segments.
func TestMemoryCountsEvictedBytesThatAreReferenced(t *testing.T) {
	const limit, segment = 256 << 10, 4 << 10
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	add(m, journaltest.Record(1, 3000))
	add(m, journaltest.Record(2, 3000)) // in a segment of its own
	held, err := m.Read(context.Background(), journal.Query{MaxBytes: 1 << 20})
	if err != nil || len(held.Slices) != 2 {
		t.Fatalf("got %d slices, %v", len(held.Slices), err)
	}
	if got := m.EvictedBytes(); got != 0 {
		t.Errorf("before anything is evicted: %d bytes are retained", got)
	}
	for n := range 1000 {
		add(m, journaltest.Record(n, 3000))
	}
	// Cleanups run some time after the collection that finds them.
	settles := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); m.EvictedBytes() != want; {
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes are retained, want %d", m.EvictedBytes(), want)
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
	add(m, journaltest.Record(1, 10))
	add(m, journaltest.Record(2, 1<<20))
	c, err := m.Read(context.Background(), journal.Query{After: 1, MaxBytes: 1})
	if err != nil || c.Last != 2 || len(journaltest.Decode(t, c)) != 1 {
		t.Fatalf("got %d entries to %d, error %v; want the large entry", c.Entries, c.Last, err)
	}
	add(m, journaltest.Record(3, 10))
	if got := m.Bounds().Oldest; got != 3 {
		t.Errorf("oldest: got %d, want 3: the large entry must make room", got)
	}
}

func TestMemoryEvictsByAgeWithoutAppends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{MaxAge: time.Minute})
		add(m, journaltest.Record(1, 10))
		<-time.After(time.Minute)
		if got := m.Bounds(); got.Oldest != 1 {
			t.Errorf("at the age: oldest %d, want 1", got.Oldest)
		}
		<-time.After(time.Nanosecond)
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 1 {
			t.Errorf("beyond the age: got %+v, want oldest 2 and newest 1", got)
		}
		if _, err := m.Read(context.Background(), journal.Query{After: 1, MaxBytes: 1}); err != nil {
			t.Errorf("a reader that is caught up: got error %v", err)
		}
		if _, err := m.Read(context.Background(), journal.Query{MaxBytes: 1}); !errors.Is(err, journal.ErrCompacted) {
			t.Errorf("a reader that is behind: got error %v, want ErrCompacted", err)
		}
		add(m, journaltest.Record(2, 10))
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 2 {
			t.Errorf("after the next append: got %+v, want oldest and newest 2", got)
		}
	})
}

// TestMemoryEncodesAnEntryOnce checks that all readers are given the same
// memory, and that it stays as it was.
func TestMemoryEncodesAnEntryOnce(t *testing.T) {
	m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
	add(m, journaltest.Record(1, 10))
	first, err := m.Read(context.Background(), journal.Query{MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Read(context.Background(), journal.Query{MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if &first.Slices[0][0] != &second.Slices[0][0] {
		t.Error("two readers were given two copies")
	}
	was := bytes.Clone(first.Slices[0])
	for n := range 1000 { // evicts the entry many times over
		add(m, journaltest.Record(n, 1000))
	}
	if !bytes.Equal(was, first.Slices[0]) {
		t.Error("memory that a reader holds was written again")
	}
}

func BenchmarkMemoryAppend(b *testing.B) {
	m := journal.NewMemory(journal.Config{})
	r := journal.Record{Body: make([]byte, 330)}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = m.Append(context.Background(), r)
	}
}

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

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
)

func TestMemoryConforms(t *testing.T) {
	t.Parallel()
	journaltest.Run(t, journaltest.Harness{Open: func(_ *testing.T, maxBytes int) journal.Journal {
		return journal.NewMemory(journal.Config{MaxBytes: maxBytes})
	}})
}

// add appends a record. It panics if the journal is closed.
func add(m *journal.Memory, r journal.Record) {
	if _, err := m.Append(context.Background(), r); err != nil {
		panic(err)
	}
}

func TestMemoryStaysWithinItsBytes(t *testing.T) {
	t.Parallel()
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

// TestMemoryStaysWithinItsBytesWithEmptyEntries appends entries that are smaller than their index.
func TestMemoryStaysWithinItsBytesWithEmptyEntries(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	for n := range 500_000 {
		add(m, journal.Record{})
		if got := m.Bytes(); got > limit {
			t.Fatalf("after %d entries: %d bytes, want at most %d", n+1, got, limit)
		}
	}
	if b := m.Bounds(); b.Newest-b.Oldest < 10_000 {
		t.Errorf("bounds: got %+v, want at least 10,000 retained entries", b)
	}
}

// TestMemoryCountsEvictedBytesThatAreReferenced references two of many segments.
func TestMemoryCountsEvictedBytesThatAreReferenced(t *testing.T) {
	t.Parallel()
	const limit, segment = 256 << 10, 4 << 10
	m := journal.NewMemory(journal.Config{MaxBytes: limit})
	add(m, journaltest.Record(1, 3000))
	add(m, journaltest.Record(2, 3000)) // does not fit into the first segment
	referenced, err := m.Read(context.Background(), journal.Query{MaxBytes: 1 << 20})
	if err != nil || len(referenced.Slices) != 2 {
		t.Fatalf("got %d slices, %v", len(referenced.Slices), err)
	}
	if got := m.EvictedBytes(); got != 0 {
		t.Errorf("before an eviction: EvictedBytes is %d, want 0", got)
	}
	for n := range 1000 {
		add(m, journaltest.Record(n, 3000))
	}
	// A cleanup runs some time after the garbage collection.
	awaitEvictedBytes := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); m.EvictedBytes() != want; {
			if time.Now().After(deadline) {
				t.Fatalf("EvictedBytes is %d, want %d", m.EvictedBytes(), want)
			}
			runtime.GC()
		}
	}
	awaitEvictedBytes(2 * segment)
	if !bytes.Contains(referenced.Slices[0], []byte("w1")) || !bytes.Contains(referenced.Slices[1], []byte("w2")) {
		t.Error("referenced memory has changed")
	}
	clear(referenced.Slices)
	awaitEvictedBytes(0)
}

func TestMemoryKeepsAnEntryLargerThanItsBytes(t *testing.T) {
	t.Parallel()
	m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
	add(m, journaltest.Record(1, 10))
	add(m, journaltest.Record(2, 1<<20))
	c, err := m.Read(context.Background(), journal.Query{After: 1, MaxBytes: 1})
	if err != nil || c.Last != 2 || len(journaltest.Decode(t, c)) != 1 {
		t.Fatalf("got %d entries to %d, error %v; want the large entry", c.Entries, c.Last, err)
	}
	add(m, journaltest.Record(3, 10))
	if got := m.Bounds().Oldest; got != 3 {
		t.Errorf("oldest: got %d, want 3: the large entry must be evicted", got)
	}
}

func TestMemoryContinuesAnEpoch(t *testing.T) {
	t.Parallel()
	m := journal.NewMemory(journal.Config{Epoch: "e", After: 41})
	if got, want := m.Bounds(), (journal.Bounds{Epoch: "e", Oldest: 42, Newest: 41}); got != want {
		t.Errorf("bounds: got %+v, want %+v", got, want)
	}
	if _, err := m.Read(t.Context(), journal.Query{After: 40, MaxBytes: 1}); !errors.Is(err, journal.ErrCompacted) {
		t.Errorf("read after 40: got error %v, want ErrCompacted", err)
	}
	add(m, journaltest.Record(1, 10))
	c, err := m.Read(t.Context(), journal.Query{After: 41, MaxBytes: 1})
	if err != nil || c.Last != 42 || len(journaltest.Decode(t, c)) != 1 {
		t.Errorf("read after 41: got %d entries to %d, error %v; want entry 42", c.Entries, c.Last, err)
	}
}

func TestMemoryEvictsByAgeWithoutAppends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{MaxAge: time.Minute})
		add(m, journaltest.Record(1, 10))
		<-time.After(time.Minute)
		if got := m.Bounds(); got.Oldest != 1 {
			t.Errorf("at MaxAge: oldest %d, want 1", got.Oldest)
		}
		<-time.After(time.Nanosecond)
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 1 {
			t.Errorf("after MaxAge: got %+v, want oldest 2 and newest 1", got)
		}
		if _, err := m.Read(context.Background(), journal.Query{After: 1, MaxBytes: 1}); err != nil {
			t.Errorf("read after the newest entry: got error %v", err)
		}
		if _, err := m.Read(context.Background(), journal.Query{MaxBytes: 1}); !errors.Is(err, journal.ErrCompacted) {
			t.Errorf("read after 0: got error %v, want ErrCompacted", err)
		}
		add(m, journaltest.Record(2, 10))
		if got := m.Bounds(); got.Oldest != 2 || got.Newest != 2 {
			t.Errorf("after the next append: got %+v, want oldest and newest 2", got)
		}
	})
}

// TestMemoryRetainsPinnedEntries appends to a journal that is full of pinned entries: appends wait until a later entry is
// pinned, and no entry is lost.
func TestMemoryRetainsPinnedEntries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, entries = 64 << 10, 500
		m := journal.NewMemory(journal.Config{MaxBytes: limit, MaxAge: time.Minute})
		m.Pin(0)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for n := range entries {
				add(m, journaltest.Record(n, 500))
			}
		}()
		for after := uint64(0); after < entries; {
			<-time.After(time.Hour) // pinned entries do not expire
			synctest.Wait()         // the appends wait, or all are done
			b := m.Bounds()
			if b.Oldest > after+1 || b.Newest <= after || m.Bytes() > limit {
				t.Fatalf("pinned after %d: entries %d to %d in %d bytes", after, b.Oldest, b.Newest, m.Bytes())
			}
			c, err := m.Read(t.Context(), journal.Query{After: after, MaxBytes: 10_000})
			if err != nil {
				t.Fatalf("read after the pinned seq %d: %v", after, err)
			}
			for _, e := range journaltest.Decode(t, c) {
				if after++; e.GetSeq() != after || e.GetWorker() != journaltest.Record(int(after)-1, 0).Source.Worker {
					t.Fatalf("got entry %d of %s, want entry %d", e.GetSeq(), e.GetWorker(), after)
				}
			}
			m.Pin(after)
		}
		<-done
		if b := m.Bounds(); b.Newest != entries || b.Oldest == 1 {
			t.Errorf("all entries are read: got %+v, want the first evicted", b)
		}
	})
}

// fill appends to a journal whose entries are all pinned until an append waits, and returns that append's result.
func fill(ctx context.Context, m *journal.Memory) <-chan error {
	m.Pin(0)
	done := make(chan error, 1)
	go func() {
		for n := range 10_000 {
			if _, err := m.Append(ctx, journaltest.Record(n, 500)); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	synctest.Wait()
	return done
}

func TestMemoryAppendThatWaitsForAPinEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			end  func(*journal.Memory, context.CancelFunc)
			want error
		}{
			"with its context": {func(_ *journal.Memory, cancel context.CancelFunc) { cancel() }, context.Canceled},
			"when the journal is closed": {func(m *journal.Memory, _ context.CancelFunc) {
				if err := m.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}, journal.ErrClosed},
		} {
			m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
			ctx, cancel := context.WithCancel(t.Context())
			done := fill(ctx, m)
			select {
			case err := <-done:
				t.Fatalf("%s: an append has failed before: %v", name, err)
			default:
			}
			full := m.Bounds()
			test.end(m, cancel)
			if err := <-done; !errors.Is(err, test.want) {
				t.Errorf("%s: got error %v, want %v", name, err, test.want)
			}
			cancel()
			if got := m.Bounds(); got != full || got.Oldest != 1 {
				t.Errorf("%s: entries %d to %d, want 1 to %d", name, got.Oldest, got.Newest, full.Newest)
			}
		}
	})
}

// TestMemoryEncodesAnEntryOnce checks that two reads return the same memory.
func TestMemoryEncodesAnEntryOnce(t *testing.T) {
	t.Parallel()
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
		t.Error("two reads returned different memory")
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

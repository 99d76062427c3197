package follow_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/indextest"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Builders of entries.
var (
	entryOf = indextest.EntryOf
	event   = indextest.Event
	stored  = indextest.Stored
)

// appendEntry appends an entry without its seq.
func appendEntry(ctx context.Context, j interface {
	Append(context.Context, journal.Record) (journal.Pending, error)
}, e *kvcastv1.Entry) error {
	body, err := proto.Marshal(e)
	if err == nil {
		_, err = j.Append(ctx, journal.Record{Source: &journal.Source{Worker: e.GetWorker(), Model: e.GetModel()}, Body: body})
	}
	return err
}

// storeBlock appends an entry that stores a block.
func storeBlock(t testing.TB, j *journal.Memory, hash uint64) {
	t.Helper()
	if err := appendEntry(context.Background(), j, entryOf(0, event(0, stored(hash)))); err != nil {
		t.Fatal(err)
	}
}

// run runs a follower until the test ends or the returned function is called, which returns Run's error.
func run(t *testing.T, f *follow.Follower) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return stop
}

var noDelay follow.Delays

// followed is a journal whose readers read from a follower. Appends wait until the follower has applied them.
type followed struct {
	*follow.Follower
	memory *journal.Memory
	stop   func() error
}

func (f *followed) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	p, err := f.memory.Append(ctx, r)
	if err != nil {
		return p, err
	}
	seq, err := p.Wait(ctx)
	if err != nil {
		return p, err
	}
	return p, f.Wait(ctx, seq)
}

func (f *followed) Close(ctx context.Context) error {
	return errors.Join(f.stop(), f.memory.Close(ctx))
}

// TestRestoredIndexIsSeen waits for what was restored after New, and before Run, with no entry after it.
func TestRestoredIndexIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, x := journal.NewMemory(journal.Config{After: 7}), index.New()
		f := follow.New(m, x, noDelay)
		seen := make(chan error, 1)
		go func() { seen <- f.Wait(t.Context(), 7) }()
		synctest.Wait()
		x.Advance(7)
		run(t, f)
		if err := <-seen; err != nil {
			t.Error(err)
		}
	})
}

// TestFollowerConforms runs the tests of journals on what readers see.
func TestFollowerConforms(t *testing.T) {
	t.Parallel()
	journaltest.Run(t, journaltest.Harness{Open: func(t *testing.T, maxBytes int) journal.Journal {
		m := journal.NewMemory(journal.Config{MaxBytes: maxBytes})
		f := follow.New(m, index.New(), noDelay)
		return &followed{f, m, run(t, f)}
	}})
}

// TestReadersSeeEntriesAfterTheIndex appends entries that each store a block, while readers look up the block of each
// entry that they read.
func TestReadersSeeEntriesAfterTheIndex(t *testing.T) {
	t.Parallel()
	const entries = 3000
	m := journal.NewMemory(journal.Config{})
	f := follow.New(m, index.New(), noDelay)
	run(t, f)
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for after := uint64(0); after < entries; {
				changed := f.Changed()
				c, err := f.Read(t.Context(), journal.Query{After: after, MaxBytes: 1 << 20})
				if err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if len(f.Index().Tiers("w", 0, c.Last)) == 0 && c.Last > 0 {
					t.Errorf("entry %d was read, and its block is not in the index", c.Last)
					return
				}
				if c.Last == after {
					<-changed
				}
				after = c.Last
			}
		})
		readers.Go(func() {
			for newest := uint64(0); newest < entries; {
				changed := f.Changed()
				if newest = f.Bounds().Newest; f.Index().Seq() < newest {
					t.Errorf("the index is at %d, want at least %d", f.Index().Seq(), newest)
				}
				if newest < entries {
					<-changed
				}
			}
		})
	}
	for h := range uint64(entries) {
		storeBlock(t, m, h+1)
	}
	readers.Wait()
}

// TestFollowerHidesEntriesNotApplied reads while entries are appended and none is applied.
func TestFollowerHidesEntriesNotApplied(t *testing.T) {
	t.Parallel()
	m := journal.NewMemory(journal.Config{})
	storeBlock(t, m, 1)
	f := follow.New(m, index.New(), noDelay)
	if b := f.Bounds(); b.Newest != 0 || b.Oldest != 1 || b.Epoch != m.Bounds().Epoch {
		t.Errorf("bounds: got %+v", b)
	}
	for _, q := range []journal.Query{{MaxBytes: 1 << 20}, {MaxBytes: 1 << 20, Until: 1}} {
		if c, err := f.Read(t.Context(), q); err != nil || c.Entries != 0 || c.Last != 0 {
			t.Errorf("read up to %d: got %+v, %v, want no entry", q.Until, c, err)
		}
	}
	var pe *journal.PositionError
	_, err := f.Read(t.Context(), journal.Query{After: 1})
	if !errors.As(err, &pe) || !errors.Is(err, journal.ErrAhead) || pe.Bounds != f.Bounds() {
		t.Errorf("read after an entry that is not applied: got %v, want ErrAhead", err)
	}
	later := index.New()
	later.ApplyEntry(entryOf(1, event(0, stored(1))))
	storeBlock(t, m, 2)
	for _, until := range []uint64{0, 1, 2, 3} {
		c, err := follow.New(m, later, noDelay).Read(t.Context(), journal.Query{MaxBytes: 1 << 20, Until: until})
		if err != nil || c.Entries != 1 || c.Last != 1 {
			t.Errorf("read up to %d, the first of two entries is applied: got %+v, %v", until, c, err)
		}
	}
	m.Pin(0)
	changed := f.Changed()
	select {
	case <-changed:
		t.Error("changed before an entry was applied")
	default:
	}
	run(t, f)
	<-changed
	if c, err := f.Read(t.Context(), journal.Query{MaxBytes: 1 << 20}); err != nil || c.Entries != 2 || c.Last != 2 {
		t.Errorf("got %+v, %v, want both entries", c, err)
	}
	if got := f.Bounds().Newest; got != 2 {
		t.Errorf("newest: got %d, want 2", got)
	}
}

// pinnedJournal records the pinned seqs.
type pinnedJournal struct {
	*journal.Memory
	seqs []uint64
}

func (j *pinnedJournal) Pin(seq uint64) {
	j.seqs = append(j.seqs, seq)
	j.Memory.Pin(seq)
}

func TestRunAppliesWhatIsLeftInBoundedTurns(t *testing.T) {
	t.Parallel()
	m := &pinnedJournal{Memory: journal.NewMemory(journal.Config{})}
	f := follow.New(m, index.New(), noDelay)
	const entries = 2000 // of several turns
	for h := range uint64(entries) {
		storeBlock(t, m.Memory, h+1)
	}
	c, err := m.Read(t.Context(), journal.Query{MaxBytes: math.MaxInt})
	if err != nil || c.Bytes < 3*follow.TurnBytes {
		t.Fatalf("the journal has %d bytes, %v", c.Bytes, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Wait(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("wait before the run: got %v, want the context's error", err)
	}
	if err := f.Run(ctx); err != nil {
		t.Errorf("run: %v", err)
	}
	if err := f.Wait(ctx, entries); err != nil {
		t.Errorf("wait after the run: %v", err)
	}
	if _, blocks := f.Index().Len(); blocks != entries {
		t.Errorf("blocks: got %d, want %d", blocks, entries)
	}
	if n := len(m.seqs); n-1 < c.Bytes/follow.TurnBytes || !slices.IsSorted(m.seqs) || m.seqs[n-1] != entries {
		t.Errorf("%d bytes were applied in turns that pinned %v, want at most %d bytes a turn", c.Bytes, m.seqs, follow.TurnBytes)
	}
}

// lateJournal appends an entry and ends the follower after the read that finds the first no entry.
type lateJournal struct {
	*journal.Memory
	once sync.Once
	end  context.CancelFunc
}

func (j *lateJournal) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	c, err := j.Memory.Read(ctx, q)
	if c.Entries == 0 && err == nil {
		j.once.Do(func() {
			err = appendEntry(ctx, j.Memory, entryOf(0, event(0, stored(1))))
			j.end()
		})
	}
	return c, err
}

// TestRunAppliesEntriesAppendedJustBeforeItsEnd ends the context while the follower finds no further entry.
func TestRunAppliesEntriesAppendedJustBeforeItsEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	f := follow.New(&lateJournal{Memory: journal.NewMemory(journal.Config{}), end: cancel}, index.New(), noDelay)
	if err := f.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if got := f.Bounds().Newest; got != 1 {
		t.Errorf("newest: got %d, want 1", got)
	}
}

// TestEntriesAreHiddenWhileTheIndexIsRead appends an entry during a match: the follower cannot apply it, and no reader
// may see it.
func TestEntriesAreHiddenWhileTheIndexIsRead(t *testing.T) {
	t.Parallel()
	m := journal.NewMemory(journal.Config{})
	f := follow.New(m, index.New(), noDelay)
	run(t, f)
	storeBlock(t, m, 1)
	if err := f.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	changed := f.Changed()
	f.Index().Match(&index.Query{
		Prompts: []index.Prompt{{BlockHashes: []uint64{1}}},
		Worker: func(string) bool {
			storeBlock(t, m, 2)
			for range 10_000 {
				runtime.Gosched()
				if got := f.Bounds().Newest; got != 1 {
					t.Errorf("newest: got %d, want 1", got)
					return false
				}
			}
			return true
		},
	}, new(index.Matches))
	<-changed
	if err := f.Wait(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
}

// TestFollowerContinuesAfterTheIndex follows a journal from a position.
func TestFollowerContinuesAfterTheIndex(t *testing.T) {
	t.Parallel()
	m := journal.NewMemory(journal.Config{})
	x := index.New()
	storeBlock(t, m, 1)
	storeBlock(t, m, 2)
	x.ApplyEntry(entryOf(1, event(0, stored(1))))
	f := follow.New(m, x, noDelay)
	if got := f.Bounds().Newest; got != 1 {
		t.Errorf("newest before the run: got %d, want 1", got)
	}
	run(t, f)
	if err := f.Wait(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if _, blocks := x.Len(); blocks != 2 {
		t.Errorf("blocks: got %d, want 2", blocks)
	}
}

// splitJournal returns the entries of a journal in slices that end anywhere.
type splitJournal struct {
	*journal.Memory
	bytes int // of each slice
}

func (j splitJournal) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	c, err := j.Memory.Read(ctx, q)
	c.Slices = slices.Collect(slices.Chunk(bytes.Join(c.Slices, nil), j.bytes))
	return c, err
}

func TestEntriesInSeveralSlicesApply(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m, want := journal.NewMemory(journal.Config{MaxBytes: 1 << 20}), index.New()
		f := follow.New(splitJournal{m, rapid.IntRange(1, 200).Draw(t, "bytes of a slice")}, index.New(), noDelay)
		for seq := range uint64(rapid.IntRange(0, 60).Draw(t, "entries")) {
			e := entryOf(0, event(0, stored(rapid.SliceOfNDistinct(rapid.Uint64Range(1, 30), 0, 9, rapid.ID).Draw(t, "blocks")...)))
			e.Worker = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "worker")
			if err := appendEntry(context.Background(), m, e); err != nil {
				t.Fatal(err)
			}
			e.Seq = seq + 1
			want.ApplyEntry(e)
		}
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := f.Run(ended); err != nil {
			t.Fatal(err)
		}
		all, _ := want.Workers(nil)
		if got, _ := f.Index().Workers(nil); !cmp.Equal(all, got, protocmp.Transform()) {
			t.Fatalf("workers (-want +got):\n%s", cmp.Diff(all, got, protocmp.Transform()))
		}
	})
}

// TestAppendsWaitForTheFollower fills a small journal before the follower runs: appends wait, and no entry is lost.
func TestAppendsWaitForTheFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const entries = 5000
		m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10, MaxAge: time.Second})
		f := follow.New(m, index.New(), noDelay)
		appended := make(chan struct{})
		go func() {
			defer close(appended)
			for h := range uint64(entries) {
				storeBlock(t, m, h+1)
			}
		}()
		synctest.Wait()
		<-time.After(time.Minute) // entries that are pinned do not expire either
		b := m.Bounds()
		if b.Oldest != 1 || b.Newest < 100 || b.Newest == entries || m.Bytes() > 64<<10 {
			t.Errorf("before the follower runs: entries %d to %d in %d bytes", b.Oldest, b.Newest, m.Bytes())
		}
		run(t, f)
		<-appended
		if err := f.Wait(t.Context(), entries); err != nil {
			t.Fatal(err)
		}
		if _, blocks := f.Index().Len(); blocks != entries {
			t.Errorf("blocks: got %d, want %d", blocks, entries)
		}
		if got := m.Bounds().Oldest; got == 1 {
			t.Error("entries are still pinned after they were applied")
		}
	})
}

// TestBoundsAreConsistent reads the bounds while entries are applied and evicted.
func TestBoundsAreConsistent(t *testing.T) {
	t.Parallel()
	const entries = 20_000
	m := journal.NewMemory(journal.Config{MaxBytes: 16 << 10})
	f := follow.New(m, index.New(), noDelay)
	run(t, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for newest := uint64(0); newest < entries; {
			b := f.Bounds()
			if newest = b.Newest; b.Oldest > b.Newest+1 {
				t.Errorf("got bounds %+v", b)
				return
			}
		}
	}()
	for h := range uint64(entries) {
		storeBlock(t, m, h%50+1)
	}
	<-done
}

// TestIdleFollowerReleasesRemovedBlocks removes a worker, after which no entry follows.
func TestIdleFollowerReleasesRemovedBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{})
		f := follow.New(m, index.New(), noDelay)
		s := stored()
		for h := range uint64(100_000) {
			s.BlockHashes = append(s.BlockHashes, h)
		}
		for _, e := range []*kvcastv1.Entry{entryOf(0, event(0, s)), entryOf(0, event(0, &kvcastv1.WorkerRemoved{}))} {
			if err := appendEntry(t.Context(), m, e); err != nil {
				t.Fatal(err)
			}
		}
		run(t, f)
		synctest.Wait()
		if newest := f.Bounds().Newest; newest != 2 || f.Index().Sweep() {
			t.Errorf("got blocks that are not released after entry %d; want none after 2", newest)
		}
	})
}

func TestFollowerReportsDelaysOfTheOldestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{})
		var delays []time.Duration
		f := follow.New(m, index.New(), follow.Delays{Receipt: func(d time.Duration) { delays = append(delays, d) }})
		now := time.Now().UnixNano()
		for _, ingestTime := range []int64{0, now, now + int64(time.Second)} {
			e := entryOf(0, event(0, stored(1)))
			e.IngestTimeUnixNano = ingestTime
			if err := appendEntry(t.Context(), m, e); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(3 * time.Second)
		stop := run(t, f)
		synctest.Wait()
		storeBlock(t, m, 2) // an entry without a time
		synctest.Wait()
		e := entryOf(0, event(0, stored(1)))
		e.IngestTimeUnixNano = time.Now().Add(time.Hour).UnixNano() // the clock was set back since
		if err := appendEntry(t.Context(), m, e); err != nil {
			t.Fatal(err)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(delays, []time.Duration{3 * time.Second, 0}) {
			t.Errorf("got delays %v, want 3 s and 0", delays)
		}
	})
}

func TestFollowerReportsDelaysSinceTheEngineTimeOfEachBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := journal.NewMemory(journal.Config{})
		var delays []time.Duration
		f := follow.New(m, index.New(), follow.Delays{Engine: func(d time.Duration) { delays = append(delays, d) }})
		now := time.Now().UnixNano()
		for _, engineTime := range []int64{now, 0, math.MinInt64, now + int64(5*time.Second), 1, math.MaxInt64} {
			e := entryOf(0, event(0, stored(1)))
			e.EngineTimeUnixNano = engineTime
			if err := appendEntry(t.Context(), m, e); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(3 * time.Second)
		later := time.Now().UnixNano()
		stop := run(t, f)
		synctest.Wait()
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		want := []time.Duration{3 * time.Second, -2 * time.Second, time.Duration(later - 1), time.Duration(later - math.MaxInt64)}
		if !slices.Equal(delays, want) {
			t.Errorf("got delays %v, want %v", delays, want)
		}
	})
}

// TestRunFailsWithTheJournal covers a journal that is closed, one that lacks entries, and one with an invalid entry.
func TestRunFailsWithTheJournal(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		breaks func(*journal.Memory) follow.Journal
		want   error // nil: any
	}{
		"closed":     {func(m *journal.Memory) follow.Journal { _ = m.Close(context.Background()); return m }, journal.ErrClosed},
		"unreadable": {func(m *journal.Memory) follow.Journal { return failingJournal{m, broken} }, broken},
		"invalid": {func(m *journal.Memory) follow.Journal {
			if _, err := m.Append(context.Background(), journal.Record{Source: new(journal.Source), Body: []byte{0xff}}); err != nil {
				panic(err)
			}
			return m
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			m := journal.NewMemory(journal.Config{MaxBytes: 64 << 10})
			storeBlock(t, m, 1)
			f := follow.New(test.breaks(m), index.New(), noDelay)
			err := f.Run(t.Context())
			if err == nil || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("got error %v, want %v", err, test.want)
			}
			if b := f.Bounds(); b.Newest != 0 {
				t.Errorf("newest: got %d, want 0: readers must not see what was not applied", b.Newest)
			}
			for range 100 { // more than the journal retains: appends must not wait for a follower that has ended
				_, _ = m.Append(t.Context(), journal.Record{Source: new(journal.Source), Body: make([]byte, 4<<10)})
			}
		})
	}
}

type failingJournal struct {
	*journal.Memory
	err error
}

func (j failingJournal) Read(context.Context, journal.Query) (journal.Chunk, error) {
	return journal.Chunk{}, fmt.Errorf("read: %w", j.err)
}

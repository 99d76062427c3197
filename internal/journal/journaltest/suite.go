// Package journaltest is the conformance suite of package journal. Every implementation of journal.Journal runs
// it. Delayed is a journal for tests of its callers: it acknowledges late, and fails on request.
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
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Harness opens the journals to test.
type Harness struct {
	// Open returns an empty journal that retains about maxBytes. No entry expires by age during the test. The suite closes the journal.
	Open func(t *testing.T, maxBytes int) journal.Journal
	// Fail makes all appends of a source fail with err, those in flight and all later ones. It is nil if appends cannot fail.
	Fail func(j journal.Journal, s *journal.Source, err error)
	// Reopen closes a journal that Open returned and opens it again. It is nil if entries do not survive that.
	Reopen func(t *testing.T, j journal.Journal) journal.Journal
	// MaxOpen bounds the number of journals that a random test opens, because Open is slow; 0 means no bound.
	MaxOpen int
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	for name, test := range map[string]func(*testing.T, Harness){
		"BoundsAreThoseOfTheEntries":     testBounds,
		"UnreadablePositionsAreErrors":   testUnreadablePositionsAreErrors,
		"ReadsAreContiguousAndBounded":   testReads,
		"ReadersFollowTheNewestEntry":    testReadersFollowTheNewestEntry,
		"MemoryOfReadersIsNeverWritten":  testMemoryOfReadersIsNeverWritten,
		"AppendsOfASourceKeepTheirOrder": testAppendsOfASourceKeepTheirOrder,
		"AcknowledgedEntriesAreVisible":  testAcknowledgedEntriesAreVisible,
		"CloseFlushes":                   testCloseFlushes,
		"FailedAppendFailsItsSource":     testFailedAppendFailsItsSource,
		"ReopenedJournalContinues":       testReopenedJournalContinues,
	} {
		t.Run(name, func(t *testing.T) { test(t, h) })
	}
}

// fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

const defaultBytes = 64 << 20

func open(t *testing.T, h Harness, maxBytes int) journal.Journal {
	t.Helper()
	j := h.Open(t, maxBytes)
	t.Cleanup(func() { _ = j.Close(context.Background()) })
	return j
}

// Record returns a record of worker w<n>, such as w7, whose model has modelBytes bytes.
func Record(n, modelBytes int) journal.Record {
	name := fmt.Sprintf("w%d", n)
	return record(&journal.Source{Worker: name}, &kvcastv1.Entry{Worker: name, Model: strings.Repeat("m", modelBytes)})
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
	entries, err := decode(c)
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

func decode(c journal.Chunk) ([]*kvcastv1.Entry, error) {
	var m kvcastv1.SubscribeResponse
	encoded := bytes.Join(c.Slices, nil)
	if err := proto.Unmarshal(encoded, &m); err != nil {
		return nil, err
	}
	if entries := len(m.GetEntries()); c.Entries != entries || c.Bytes != len(encoded) {
		return nil, fmt.Errorf("chunk reports %d entries of %d bytes, and has %d of %d bytes", c.Entries, c.Bytes, entries, len(encoded))
	}
	return m.GetEntries(), nil
}

// appendAll appends records and waits until all are acknowledged.
func appendAll(t fataler, j journal.Journal, records ...journal.Record) {
	t.Helper()
	pending := make([]journal.Pending, len(records))
	for i, r := range records {
		var err error
		if pending[i], err = j.Append(context.Background(), r); err != nil {
			t.Fatalf("append %d of %d: %v", i+1, len(records), err)
		}
	}
	for i, p := range pending {
		if _, err := p.Wait(context.Background()); err != nil {
			t.Fatalf("wait for append %d of %d: %v", i+1, len(records), err)
		}
	}
}

// readTo reads the first entries of a journal up to a seq, and waits for those that are not appended yet.
func readTo(ctx context.Context, j journal.Journal, until uint64) ([]*kvcastv1.Entry, error) {
	var all []*kvcastv1.Entry
	for after := uint64(0); after < until; {
		changed := j.Changed()
		c, err := j.Read(ctx, journal.Query{After: after, MaxBytes: 4096})
		if err != nil {
			return nil, err
		}
		if c.Last == after {
			<-changed
			continue
		}
		entries, err := decode(c)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if after++; e.GetSeq() != after {
				return nil, fmt.Errorf("got entry %d, want %d", e.GetSeq(), after)
			}
		}
		all = append(all, entries...)
	}
	return all, nil
}

func testBounds(t *testing.T, h Harness) {
	j := open(t, h, defaultBytes)
	b := j.Bounds()
	if b.Epoch == "" || b.Oldest != 1 || b.Newest != 0 {
		t.Errorf("bounds of an empty journal: got %+v, want an epoch, oldest 1 and newest 0", b)
	}
	appendAll(t, j, Record(1, 10), Record(2, 10), Record(3, 10))
	if got, want := j.Bounds(), (journal.Bounds{Epoch: b.Epoch, Oldest: 1, Newest: 3}); got != want {
		t.Errorf("bounds: got %+v, want %+v", got, want)
	}
	into := make([][]byte, 0, 4)
	c, err := j.Read(t.Context(), journal.Query{After: 1, MaxBytes: 1 << 20, Slices: into})
	if err != nil || c.Last != 3 || c.Partial {
		t.Fatalf("read after 1: got %+v, %v, want a chunk that ends at 3", c, err)
	}
	if &c.Slices[:1][0] != &into[:1][0] {
		t.Error("the slices of the query are not reused")
	}
}

// testAppendsOfASourceKeepTheirOrder appends for four sources concurrently.
func testAppendsOfASourceKeepTheirOrder(t *testing.T, h Harness) {
	const sources, entries = 4, 200
	j := open(t, h, defaultBytes)
	var wg sync.WaitGroup
	for i := range sources {
		wg.Go(func() {
			source := &journal.Source{Worker: fmt.Sprintf("w%d", i)}
			for n := range entries {
				if _, err := j.Append(t.Context(), record(source, &kvcastv1.Entry{Worker: source.Worker, EngineTimeUnixNano: int64(n)})); err != nil {
					t.Errorf("append: %v", err)
				}
			}
		})
	}
	wg.Wait()
	all, err := readTo(t.Context(), j, sources*entries)
	if err != nil {
		t.Fatal(err)
	}
	next := make(map[string]int64)
	for _, e := range all {
		if e.GetEngineTimeUnixNano() != next[e.GetWorker()] {
			t.Fatalf("entry %d: got append %d of %s, want %d", e.GetSeq(), e.GetEngineTimeUnixNano(), e.GetWorker(), next[e.GetWorker()])
		}
		next[e.GetWorker()]++
	}
}

func testAcknowledgedEntriesAreVisible(t *testing.T, h Harness) {
	j := open(t, h, defaultBytes)
	if seq, err := (journal.Pending{}).Wait(t.Context()); seq != 0 || err != nil {
		t.Errorf("wait of the zero Pending: got %d, %v, want 0", seq, err)
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
			t.Errorf("newest after the acknowledgement: got %d, want %d", got, want)
		}
		<-changed
		if c, err := j.Read(t.Context(), journal.Query{After: want - 1, MaxBytes: 1}); err != nil || c.Entries != 1 {
			t.Errorf("got %d entries, error %v, want the acknowledged entry", c.Entries, err)
		}
	}
}

func testCloseFlushes(t *testing.T, h Harness) {
	j := open(t, h, defaultBytes)
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
			t.Errorf("append %d: got seq %d, error %v, want an acknowledgement", i+1, seq, err)
		}
	}
	if _, err := j.Append(t.Context(), Record(1, 10)); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("append after close: got %v, want ErrClosed", err)
	}
	if _, err := j.Read(t.Context(), journal.Query{MaxBytes: 1}); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("read after close: got %v, want ErrClosed", err)
	}
	if err := j.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func testFailedAppendFailsItsSource(t *testing.T, h Harness) {
	if h.Fail == nil {
		t.Skip("appends of this journal cannot fail")
	}
	j := open(t, h, defaultBytes)
	failing, other := Record(1, 10), Record(2, 10)
	appendAll(t, j, failing, other)
	h.Fail(j, failing.Source, journal.ErrFenced)
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
		appendAll(t, j, other)
	}
	failing.Source = &journal.Source{Worker: failing.Source.Worker}
	appendAll(t, j, failing)
	all, err := readTo(t.Context(), j, 6)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range all {
		got = append(got, e.GetWorker())
	}
	if diff := cmp.Diff([]string{"w1", "w2", "w2", "w2", "w2", "w1"}, got); diff != "" {
		t.Errorf("workers of the entries (-want +got):\n%s", diff)
	}
}

func testReopenedJournalContinues(t *testing.T, h Harness) {
	if h.Reopen == nil {
		t.Skip("entries of this journal do not survive")
	}
	j := open(t, h, defaultBytes)
	epoch := j.Bounds().Epoch
	reopen := func() {
		j = h.Reopen(t, j)
		t.Cleanup(func() { _ = j.Close(context.Background()) })
	}
	reopen() // empty
	var want []*kvcastv1.Entry
	for n := 1; n <= 300; n++ {
		r := Record(n, n)
		r.Source.Model = "m"
		appendAll(t, j, r)
		e := new(kvcastv1.Entry)
		if err := proto.Unmarshal(r.Body, e); err != nil {
			t.Fatal(err)
		}
		e.Seq = uint64(n)
		want = append(want, e)
		if n%100 == 0 {
			reopen()
		}
	}
	if got, want := j.Bounds(), (journal.Bounds{Epoch: epoch, Oldest: 1, Newest: 300}); got != want {
		t.Errorf("bounds: got %+v, want %+v", got, want)
	}
	got, err := readTo(t.Context(), j, 300)
	if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
		t.Errorf("error %v, entries (-want +got):\n%s", err, diff)
	}
	if _, err := j.Read(t.Context(), journal.Query{MaxBytes: 1 << 20, Filter: func(seq uint64, s *journal.Source, _ kvblock.Tiers) journal.Match {
		if s.Worker != fmt.Sprintf("w%d", seq) || s.Model != "m" {
			t.Errorf("source of entry %d: got %+v", seq, s)
		}
		return journal.MatchNone
	}}); err != nil {
		t.Error(err)
	}
}

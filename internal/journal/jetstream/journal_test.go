package jetstream_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/journal/journaltest"
	"github.com/kvcast/kvcast/test/harness"
)

func TestEmbeddedConforms(t *testing.T) {
	t.Parallel()
	conform(t, func(t *testing.T) jetstream.Config { return config(t.TempDir()) })
}

func TestEmbeddedConformsWithSyncAlways(t *testing.T) {
	t.Parallel()
	conform(t, func(t *testing.T) jetstream.Config {
		cfg := config(t.TempDir())
		cfg.SyncAlways = true
		return cfg
	})
}

// conform runs the conformance suite on journals with new configurations.
func conform(t *testing.T, newConfig func(t *testing.T) jetstream.Config) {
	configs := make(map[journal.Journal]jetstream.Config)
	openWith := func(t *testing.T, cfg jetstream.Config) journal.Journal {
		j, _ := load(t, cfg)
		configs[j] = cfg
		return j
	}
	journaltest.Run(t, journaltest.Harness{
		MaxOpen: 25,
		Open: func(t *testing.T, maxBytes int) journal.Journal {
			cfg := newConfig(t)
			cfg.Retention.MaxBytes = maxBytes
			return openWith(t, cfg)
		},
		Reopen: func(t *testing.T, j journal.Journal) journal.Journal {
			mustClose(t, j.(*jetstream.Journal))
			return openWith(t, configs[j])
		},
	})
}

func TestReopenedJournalContinues(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tt := range []struct {
		name   string
		reopen func(j *jetstream.Journal) string
	}{
		{"after Close", func(j *jetstream.Journal) string { mustClose(t, j); return dir }},
		{"after a crash of the process", func(*jetstream.Journal) string { return crash(t, dir) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j, entries := load(t, config(dir))
			entries = append(entries, appendN(t, j, "worker.*> \x00", 700)...)
			was := j.Bounds()
			j, got := load(t, config(tt.reopen(j)))
			wantEntries(t, got, entries)
			if b := j.Bounds(); b != was {
				t.Errorf("bounds: got %+v, want %+v", b, was)
			}
			next := appendN(t, j, "w", 1)
			if next[0].Seq != was.Newest+1 {
				t.Errorf("next seq: got %d, want %d", next[0].Seq, was.Newest+1)
			}
		})
	}
}

// TestCloseAfterItsTimeLosesNothing closes a journal without appends in flight.
func TestCloseAfterItsTimeLosesNothing(t *testing.T) {
	t.Parallel()
	j, _ := load(t, config(t.TempDir()))
	appendN(t, j, "w", 10)
	harness.WaitFor(t, func() bool { return j.InFlight() == 0 })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := j.Close(ctx); err != nil {
		t.Error(err)
	}
}

func TestLargeStateAndEmptyEntriesSurvive(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	var want []jetstream.Entry
	for i, r := range []journal.Record{
		{Source: &journal.Source{}},
		{Source: &journal.Source{Worker: strings.Repeat("\xff", 341), Model: "\r\n: x"}, Tiers: 255, Body: []byte("b")},
		{Source: &journal.Source{Worker: "w"}, State: bytes.Repeat([]byte("s"), 32<<10)},
		{Source: &journal.Source{Worker: "%"}, Body: []byte("body"), State: bytes.Repeat([]byte("s"), 1<<20)},
	} {
		p, err := j.Append(t.Context(), r)
		if err != nil {
			t.Fatalf("append %d: %v", i, err)
		}
		if seq, err := p.Wait(t.Context()); err != nil || seq != uint64(i+1) {
			t.Fatalf("append %d: got seq %d, %v", i, seq, err)
		}
		want = append(want, jetstream.Entry{Seq: uint64(i + 1), Worker: r.Source.Worker, Tiers: r.Tiers, Body: r.Body, State: r.State})
	}
	mustClose(t, j)
	_, got := load(t, config(dir))
	wantEntries(t, got, want)
}

func TestEntriesThatDoNotFitAreRefused(t *testing.T) {
	t.Parallel()
	j, _ := load(t, config(t.TempDir()))
	for _, tt := range []struct {
		name string
		r    journal.Record
		want string
	}{
		{"long name", journal.Record{Source: &journal.Source{Worker: strings.Repeat(".", 342)}}, "want at most 1024"},
		{"large body", journal.Record{Source: &journal.Source{Worker: "w"}, Body: make([]byte, 9<<20)}, "max_payload"},
	} {
		if _, err := j.Append(t.Context(), tt.r); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error with %q", tt.name, err, tt.want)
		}
		small := journal.Record{Source: tt.r.Source}
		small.Body = []byte("b")
		if _, err := j.Append(t.Context(), small); err == nil {
			t.Errorf("%s: the next entry of the source is accepted", tt.name)
		}
	}
	if got := appendN(t, j, "w", 1); got[0].Seq != 1 {
		t.Errorf("next seq: got %d, want 1", got[0].Seq)
	}
}

func TestDirectoryIsUsedByOneProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := open(t, config(dir))
	if _, err := jetstream.Open(t.Context(), config(dir)); err == nil || !strings.Contains(err.Error(), "another process uses "+dir) {
		t.Errorf("second open: got %v, want an error that names the directory", err)
	}
	mustClose(t, j)
	open(t, config(dir))
}

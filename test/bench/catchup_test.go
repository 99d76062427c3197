//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// BenchmarkCatchUp measures a subscriber that starts at the oldest entry of a journal full of B2
// entries (64 MiB, about 500,000 entries), on an otherwise idle server. b.N is repetitions.
//
// Included: opening the connection and the stream, and receiving. Excluded: decoding, since the
// subscriber decodes nothing. The rate depends on the server and on gRPC's client, which share the
// machine.
//
// Check: every entry from the oldest to the newest that the server's metrics report is present, in
// responses whose positions chain.
func BenchmarkCatchUp(b *testing.B) {
	requireProc(b)
	open := func() (*rig, error) { return openCatchUp() }
	benchmarkWith(b, "B2", open, func(b *testing.B, r *rig) {
		entries := 0
		b.ResetTimer()
		f, err := r.measure(func() error {
			for range b.N {
				n, err := r.catchUp()
				if err != nil {
					return err
				}
				entries += n
			}
			return nil
		})
		b.StopTimer()
		if err == nil {
			err = f.grown.want(metricEntriesSent, entries)
		}
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(entries)/f.elapsed.Seconds(), "entries/s")
		b.ReportMetric(float64(f.cpu.Nanoseconds())/float64(entries), "server-cpu-ns/entry")
		b.ReportMetric(f.grown[metricEntriesSent]/f.grown[metricResponsesSent], "entries/response")
		reportAllocations(b, f.grown[metricMallocs]/float64(b.N), f.grown[metricAllocBytes]/float64(b.N))
	})
}

// openCatchUp returns a rig whose journal is full and has evicted its oldest entries.
func openCatchUp(args ...string) (*rig, error) { return openCatchUpOf(shapeB2, args...) }

func openCatchUpOf(s shape, args ...string) (*rig, error) {
	r, err := newRig(s, 1, args...)
	if err != nil {
		return nil, err
	}
	for {
		if err := r.publish(4 * window); err != nil {
			return nil, closeAfter(err, r)
		}
		if err := r.arrive(); err != nil {
			return nil, closeAfter(err, r)
		}
		m, err := r.server.metrics(context.Background())
		if err != nil {
			return nil, closeAfter(err, r)
		}
		if m[metricOldest] > 1 {
			return r, nil
		}
	}
}

// catchUp reads the whole journal, and returns the number of entries.
func (r *rig) catchUp() (entries int, err error) {
	moved := make(chan struct{}, 1)
	s, err := subscribe(r.server.grpc, fromEarliest(), moved, nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	before := s.began
	timer := time.NewTimer(stall)
	defer timer.Stop()
	for s.seq.Load() < r.newest() {
		select {
		case <-moved:
		case <-timer.C:
			return 0, fmt.Errorf("catch up: at %d after %v, want %d", s.seq.Load(), stall, r.newest())
		}
		if err := s.ended(); err != nil {
			return 0, err
		}
	}
	return int(r.newest() - before), nil
}

// TestCatchUpReadsTheWholeJournal runs with a small journal.
func TestCatchUpReadsTheWholeJournal(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	r, err := openCatchUp("--journal-max-bytes", smallJournal)
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.server.metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n, err := r.catchUp()
	if err != nil {
		t.Fatal(err)
	}
	if want := int(m[metricNewest]-m[metricOldest]) + 1; n != want {
		t.Errorf("caught up with %d entries, want %d", n, want)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

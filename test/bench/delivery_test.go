//go:build cgo

package bench_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// BenchmarkDelivery measures the cost of delivering an entry to each of 8 or 64 subscribers that
// are behind: all start at the oldest entry of a journal of 8 MiB at once, each on a connection of
// its own, on an otherwise idle server. b.N is repetitions. BenchmarkFloorFanout has the floor.
//
// server-cpu-ns/delivery includes opening connections and streams, selecting entries, gRPC, and the
// kernel's work for loopback TCP, which includes most of the receivers' share. Excluded:
// ingesting the entries, and the subscribers.
//
// Check: as in BenchmarkCatchUp, for each subscriber.
func BenchmarkDelivery(b *testing.B) {
	requireProc(b)
	for _, s := range storeShapes {
		for _, subscribers := range fanouts {
			open := func() (*rig, error) { return openCatchUpOf(s.shape, "--journal-max-bytes", "8MiB") }
			benchmarkWith(b, fmt.Sprintf("%s/%d", s.name, subscribers), open, func(b *testing.B, r *rig) {
				b.ResetTimer()
				f, err := r.measure(func() error {
					for range b.N {
						if err := r.catchUpAll(subscribers); err != nil {
							return err
						}
					}
					return nil
				})
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
				deliveries := f.grown[metricEntriesSent]
				b.ReportMetric(float64(f.cpu.Nanoseconds())/deliveries, "server-cpu-ns/delivery")
				b.ReportMetric(deliveries/f.elapsed.Seconds(), "deliveries/s")
				b.ReportMetric(deliveries/f.grown[metricResponsesSent], "entries/response")
				b.ReportMetric(f.grown[metricEntryBytes]/deliveries, "B/delivery")
				reportAllocations(b, f.grown[metricMallocs]/deliveries, f.grown[metricAllocBytes]/deliveries)
			})
		}
	}
}

// catchUpAll makes n subscribers read the whole journal.
func (r *rig) catchUpAll(subscribers int) error {
	errs := make([]error, subscribers)
	var all sync.WaitGroup
	for i := range subscribers {
		all.Go(func() { _, errs[i] = r.catchUp() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// TestDeliveriesCountEverySubscriber runs with a small journal.
func TestDeliveriesCountEverySubscriber(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	r, err := openCatchUpOf(shapeB1, "--journal-max-bytes", smallJournal)
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.server.metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f, err := r.measure(func() error { return r.catchUpAll(3) })
	if err != nil {
		t.Fatal(err)
	}
	if err := f.grown.want(metricEntriesSent, 3*(int(m[metricNewest]-m[metricOldest])+1)); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

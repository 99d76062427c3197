package bench_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
)

// BenchmarkDelivery is what it costs to deliver an entry to each of 8 or 64
// subscribers that are behind: all begin at the oldest entry of a journal of 8 MiB, at
// once, each with a connection of its own, while nothing else happens. b.N is how
// often they do so. BenchmarkFloorFanout has the floor.
//
// Included in server-cpu-ns/delivery: opening connections and streams, finding out
// what to send, gRPC, and the kernel's work for loopback TCP, which is most of the
// receivers' part as well. Excluded: taking the entries in, and the subscribers.
//
// The check is that of BenchmarkCatchUp, for each.
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

// catchUpAll has that many subscribers read all that the journal has.
func (r *rig) catchUpAll(subscribers int) error {
	errs := make([]error, subscribers)
	var all sync.WaitGroup
	for i := range subscribers {
		all.Go(func() { _, errs[i] = r.catchUp() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// TestDeliveriesCountEverySubscriber has a small journal.
func TestDeliveriesCountEverySubscriber(t *testing.T) {
	requireProc(t)
	r, err := openCatchUpOf(shapeB1, "--journal-max-bytes", "1MiB")
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

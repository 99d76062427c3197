//go:build cgo

package bench_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

const (
	// growthRate is the number of batches a second of all engines together.
	growthRate = 2_000
	// growthBlocks is the number of blocks that are stored while their cost is measured.
	growthBlocks = 500_000
)

// growthLimits are the flags for more blocks than the defaults allow.
var growthLimits = []string{"--ingest-max-blocks", "100000000", "--ingest-max-blocks-per-rank", "100000000"}

var (
	growthEngines     = []int{10, 50, 200, 500, 1000, 2000}
	growthSizes       = []int{1_000_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000}
	growthSubscribers = []int{1, 8, 64, 256, 1000}
)

// BenchmarkGrowth measures how the cost of a server grows. Each figure is of one run; b.N does not matter.
//
// engines=N: engines that publish 2,000 batches a second together, one subscriber; server-cpu-ns/batch.
//
// blocks=N: a server that has so many blocks of one engine, all different, and stores 500,000 more in batches of 16;
// server-cpu-ns/batch, and B/block, the resident memory of the process by the number of blocks.
//
// subscribers=N: so many subscribers, each with a connection of its own, that read the same 8 MiB of entries of 16 blocks;
// server-cpu-ns/delivery, as in BenchmarkDelivery, and rss-MB.
//
// Check: all workers are present, and the checks of BenchmarkServer and BenchmarkCatchUp.
func BenchmarkGrowth(b *testing.B) {
	requireProc(b)
	for _, n := range growthEngines {
		open := func() (*scale, error) { return openScale(n, 1, float64(growthRate)/float64(n)) }
		benchmarkWith(b, fmt.Sprint("engines=", n), open, func(b *testing.B, s *scale) {
			ns, err := s.batchCost(scaleSeconds * time.Second)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(ns, "server-cpu-ns/batch")
		})
	}
	benchmarkBlocks(b)
	for _, n := range growthSubscribers {
		open := func() (*rig, error) {
			return openCatchUpOf(shapeB1, "--journal-max-bytes", "8MiB", "--subscribers-max-connections-per-address", scaleClients)
		}
		benchmarkWith(b, fmt.Sprint("subscribers=", n), open, func(b *testing.B, r *rig) {
			f, err := r.measure(func() error { return r.catchUpAll(n) })
			if err != nil {
				b.Fatal(err)
			}
			rss, err := r.server.residentBytes()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(f.cpu.Nanoseconds())/f.grown[metricEntriesSent], "server-cpu-ns/delivery")
			b.ReportMetric(float64(rss)/1e6, "rss-MB")
		})
	}
}

// benchmarkBlocks measures with one server, which has more blocks each time.
func benchmarkBlocks(b *testing.B) {
	var r *rig
	for _, size := range growthSizes {
		b.Run(fmt.Sprint("blocks=", size), func(b *testing.B) {
			var err error
			if r == nil {
				r, err = newRig(shape{blocks: 16, endless: true}, 1, growthLimits...)
			}
			if err == nil && r.load.present >= size {
				b.Skip("a size is measured once: -benchtime 1x")
			}
			var ns, bytes float64
			if err == nil {
				ns, bytes, err = r.growTo(size, growthBlocks)
			}
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(ns, "server-cpu-ns/batch")
			b.ReportMetric(bytes, "B/block")
		})
	}
	if r == nil {
		return
	}
	if err := r.Close(); err != nil {
		b.Error(err)
	}
}

// growTo stores blocks until there are so many, and returns the CPU time of the server by the number of batches, in nanoseconds, while it stores the
// last of them, and its resident memory by the number of all blocks.
func (r *rig) growTo(size, last int) (ns, bytes float64, err error) {
	store := func(to int) error {
		if err := r.publish((to - r.load.present) / r.load.shape.blocks); err != nil {
			return err
		}
		return r.arrive()
	}
	if err := store(size - last); err != nil {
		return 0, 0, err
	}
	sent := r.load.sent
	f, err := r.measure(func() error { return store(size) })
	if err != nil {
		return 0, 0, err
	}
	rss, err := r.server.residentBytes()
	return float64(f.cpu.Nanoseconds()) / float64(r.load.sent-sent), float64(rss) / float64(r.load.present), err
}

// batchCost returns the CPU time of the server by the number of batches in a time, in nanoseconds.
func (s *scale) batchCost(d time.Duration) (float64, error) {
	before, began, err := s.reading()
	if err != nil {
		return 0, err
	}
	<-time.After(d)
	after, ended, err := s.reading()
	for _, sub := range s.subscribers {
		err = errors.Join(err, sub.ended())
	}
	batches := after.since(before)[metricBatches]
	if err == nil && batches == 0 {
		err = errors.New("no batch was read")
	}
	return float64((ended - began).Nanoseconds()) / batches, err
}

// TestGrowthIsMeasured runs with small numbers.
func TestGrowthIsMeasured(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	r, err := newRig(shape{blocks: 16, endless: true}, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{32_000, 64_000} {
		ns, bytes, err := r.growTo(size, 16_000)
		if err != nil || ns < 0 || bytes <= 0 || r.load.present != size {
			t.Errorf("%d blocks: %.0f ns a batch, %.0f B a block with %d blocks: %v", size, ns, bytes, r.load.present, err)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	s, err := openScale(3, 1, 100)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := s.batchCost(time.Second)
	if err != nil || ns < 0 { // the clock of CPU time may not have ticked
		t.Errorf("a batch costs %.0f ns: %v", ns, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

package bench_test

import (
	"os/exec"
	"strings"
	"testing"
)

// serverLoads are what BenchmarkServer runs.
var serverLoads = []struct {
	name        string
	shape       shape
	subscribers int
	wrapper     []string // starts the server
}{
	{"B1", shapeB1, 8, nil},
	{"B2", shapeB2, 8, nil},
	{"B1Evicting", shape{blocks: 16, evicts: true}, 8, nil},
	{"B2Evicting", shape{blocks: 1, evicts: true}, 8, nil},
	{"B1OneCore", shapeB1, 8, oneCore},
	{"B2OneCore", shapeB2, 8, oneCore},
	{"B1OneCoreOneSubscriber", shapeB1, 1, oneCore},
	{"B2OneCoreOneSubscriber", shapeB2, 1, oneCore},
}

// BenchmarkServer is the whole server at saturation: one engine that publishes as
// fast as the server delivers, and 8 subscribers. B1 is a store of 16 blocks of 16
// tokens a batch, B2 of one block; every block is new, so that the table grows
// until the engine is reset at some million blocks. B1Evicting and B2Evicting are
// an engine whose cache is full: each batch also removes as many blocks as it
// stores, and the table keeps its size. Cycling through the same stores would
// measure neither: it counts copies.
//
// Included in server-cpu-ns/batch: all threads of the server's process (libzmq's,
// the garbage collector's), in user and system mode, with the kernel's work for
// loopback TCP, which is most of the receivers' part as well. Excluded: the
// publisher and the subscribers, which are in the benchmark's process and decode
// nothing; what they take is bench-cpu-ns/batch. b.N is batches; a reading is some
// 10 ms off, so that few batches tell nothing. batches/s and ns/op are the
// machine's, publisher and subscribers included. allocs/op and B/op are the
// server's.
//
// A server that cannot keep up sends many entries in a response, and pays less for
// each: entries/response tells. One engine is one lane, which is a core at most;
// with others to spare, subscribers keep up with it entry by entry, and the server
// is not saturated however fast the engine. OneCore is where it is: the process
// is kept to one CPU, by taskset, and counts one. What a delivery costs is the
// difference to OneCoreOneSubscriber, by 7.
//
// The check: every subscriber got as many entries as batches were sent, in
// responses that chain; the server's metrics count as many batches and blocks,
// hold as many blocks as the engine, and no gap, duplicate or refusal.
func BenchmarkServer(b *testing.B) {
	requireProc(b)
	for _, l := range serverLoads {
		if l.wrapper != nil {
			if _, err := exec.LookPath(l.wrapper[0]); err != nil {
				b.Logf("%s skipped: %v", l.name, err)
				continue
			}
		}
		open := func() (*rig, error) { return openServer(l.wrapper, l.shape, l.subscribers) }
		benchmarkWith(b, l.name, open, func(b *testing.B, r *rig) {
			b.ResetTimer()
			own := ownUsage().cpu
			f, err := r.measure(func() error {
				if err := r.publish(b.N); err != nil {
					return err
				}
				return r.arrive()
			})
			b.StopTimer()
			own = ownUsage().cpu - own
			if err != nil {
				b.Fatal(err)
			}
			rss, err := r.server.residentBytes()
			if err != nil {
				b.Fatal(err)
			}
			n := float64(b.N)
			b.ReportMetric(float64(f.cpu.Nanoseconds())/n, "server-cpu-ns/batch")
			b.ReportMetric(float64(own.Nanoseconds())/n, "bench-cpu-ns/batch")
			b.ReportMetric(n/f.elapsed.Seconds(), "batches/s")
			b.ReportMetric(f.grown[metricEntriesSent]/f.grown[metricResponsesSent], "entries/response")
			b.ReportMetric(float64(rss)/1e6, "rss-MB")
			reportAllocations(b, f.grown[metricMallocs]/n, f.grown[metricAllocBytes]/n)
		})
	}
}

// openServer returns a rig in the state in which it is to be measured: connections
// are warm, and an engine that evicts is full.
func openServer(wrapper []string, s shape, subscribers int) (*rig, error) {
	r, err := newWrappedRig(wrapper, s, subscribers)
	if err != nil {
		return nil, err
	}
	warm := window
	if s.evicts {
		warm = len(r.load.batches)
	}
	if err := r.publish(warm); err != nil {
		return nil, closeAfter(err, r)
	}
	if err := r.arrive(); err != nil {
		return nil, closeAfter(err, r)
	}
	return r, nil
}

// TestLossFailsTheBenchmark loses one batch of many.
func TestLossFailsTheBenchmark(t *testing.T) {
	requireProc(t)
	r, err := newRig(shapeB2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.measure(func() error {
		if err := r.publish(100); err != nil {
			return err
		}
		r.publisher.seq++ // the batch is told as a gap
		if err := r.publish(100); err != nil {
			return err
		}
		return r.until(r.newest())
	}); err == nil || !strings.Contains(err.Error(), "kvcast_ingest_gaps_total is 1") {
		t.Errorf("a batch was lost, and what was noticed is: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// TestServerDeliversEverything is BenchmarkServer with few batches.
func TestServerDeliversEverything(t *testing.T) {
	requireProc(t)
	for _, s := range []shape{shapeB1, {blocks: 16, evicts: true}} {
		r, err := newRig(s, 2)
		if err != nil {
			t.Fatal(err)
		}
		const n = 2*window + 7
		f, err := r.measure(func() error {
			if err := r.publish(n); err != nil {
				return err
			}
			return r.arrive()
		})
		if err != nil {
			t.Error(err)
		}
		if f.cpu <= 0 || f.elapsed <= 0 {
			t.Errorf("%d batches took %v of %v", n, f.cpu, f.elapsed)
		}
		if err := f.grown.want(metricEntriesSent, 2*n); err != nil {
			t.Error(err)
		}
		// The floor of BenchmarkFloorFanout writes what is delivered.
		if !s.evicts {
			got := f.grown[metricEntryBytes] / f.grown[metricEntriesSent]
			if want := float64(entryBytes(s.blocks)); got < want-2 || got > want+2 {
				t.Errorf("an entry has %.1f bytes, entryBytes says %.0f", got, want)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

//go:build cgo

package bench_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// serverLoads are the loads that BenchmarkServer runs.
var serverLoads = []struct {
	name        string
	shape       shape
	subscribers int
	wrapper     []string // command that starts the server
	sync        string   // of a journal in files; empty: in memory
}{
	{"B1", shapeB1, 8, nil, ""},
	{"B2", shapeB2, 8, nil, ""},
	{"B1Evicting", shape{blocks: 16, evicts: true}, 8, nil, ""},
	{"B2Evicting", shape{blocks: 1, evicts: true}, 8, nil, ""},
	{"B1OneCore", shapeB1, 8, oneCore, ""},
	{"B2OneCore", shapeB2, 8, oneCore, ""},
	{"B1OneCoreOneSubscriber", shapeB1, 1, oneCore, ""},
	{"B2OneCoreOneSubscriber", shapeB2, 1, oneCore, ""},
	{"B1File", shapeB1, 8, nil, "1s"},
	{"B1FileAlways", shapeB1, 8, nil, "always"},
	{"B1FileOneCore", shapeB1, 8, oneCore, "1s"},
}

// BenchmarkServer measures the whole server at saturation: one engine that publishes as fast as the
// server delivers, and 8 subscribers. A B1 batch stores 16 blocks of 16 tokens, a B2 batch one
// block. Every block is new, so the table grows until the engine is reset at several million
// blocks. In B1Evicting and B2Evicting the engine's cache is full: each batch also removes as many
// blocks as it stores, and the table keeps its size.
//
// server-cpu-ns/batch includes all threads of the server process (libzmq's and the garbage
// collector's too), in user and system mode, with the kernel's work for loopback TCP, which includes
// most of the receivers' share. Excluded: the publisher and the subscribers, which run in the
// benchmark's process and decode nothing; bench-cpu-ns/batch is their CPU time. b.N is batches. A
// reading of CPU time has an error of about 10 ms, so few batches give no usable figure. batches/s
// and ns/op are wall-clock rates of the whole machine, publisher and subscribers included.
// allocs/op and B/op are the server's.
//
// A server that cannot keep up sends many entries per response, and pays less for each;
// entries/response shows how many. One engine is one lane, which uses at most one core. On a
// machine with more cores, subscribers keep up entry by entry, and the server is not saturated at
// any publishing rate. OneCore saturates it: taskset confines the process to one CPU. The cost of a
// delivery is the difference to OneCoreOneSubscriber, divided by 7.
//
// B1File and B1FileAlways have a journal in files, which is synced to the disk each second or always.
//
// Check: every subscriber received one entry per batch, in responses whose positions chain; the
// server's metrics count the same number of batches and blocks, report as many blocks as the engine
// has, and report no gap, duplicate or rejection.
func BenchmarkServer(b *testing.B) {
	requireProc(b)
	for _, l := range serverLoads {
		if l.wrapper != nil {
			if _, err := exec.LookPath(l.wrapper[0]); err != nil {
				b.Logf("%s skipped: %v", l.name, err)
				continue
			}
		}
		open := func() (*rig, error) {
			return openServer(l.wrapper, l.shape, l.subscribers, journalArgs(b.TempDir(), l.sync)...)
		}
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

// journalArgs returns the flags for a journal in files; none if sync is empty.
func journalArgs(dir, sync string) []string {
	if sync == "" {
		return nil
	}
	return []string{"--journal", "file:" + dir, "--journal-sync", sync}
}

// openServer returns a rig that is ready to measure: connections are warm, and an evicting engine
// is full.
func openServer(wrapper []string, s shape, subscribers int, args ...string) (*rig, error) {
	r, err := newWrappedRig(wrapper, s, subscribers, args...)
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

// TestLossFailsTheBenchmark drops one batch of many.
func TestLossFailsTheBenchmark(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	r, err := newRig(shapeB2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.measure(func() error {
		if err := r.publish(100); err != nil {
			return err
		}
		r.publisher.seq++ // the server reports the batch as a gap
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

// TestServerDeliversEverything runs BenchmarkServer's loads with few batches.
func TestServerDeliversEverything(t *testing.T) {
	testclass.Process(t)
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
		// The floor of BenchmarkFloorFanout writes the same bytes as the server delivers.
		if !s.evicts {
			got := f.grown[metricEntryBytes] / f.grown[metricEntriesSent]
			const parentBytes = 9 // which the first store of a prompt lacks
			if want := float64(entryBytes(s.blocks)) - float64(parentBytes*s.blocks)/chainBlocks; got < want-2 || got > want+2 {
				t.Errorf("an entry has %.1f bytes, entryBytes says %.0f", got, want)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

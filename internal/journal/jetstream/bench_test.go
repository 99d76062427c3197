package jetstream_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// benchRecord is like the entry of a store of 16 blocks of 16 tokens.
func benchRecord(worker int) journal.Record {
	return journal.Record{
		Source: &journal.Source{Worker: fmt.Sprintf("worker-%d", worker), Model: "meta-llama/Llama-3.1-8B"},
		Tiers:  2,
		Body:   bytes.Repeat([]byte("b"), 330),
		State:  bytes.Repeat([]byte("s"), 80),
	}
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func diskBytes(b *testing.B, dir string) (total int64) {
	b.Helper()
	if err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && !d.IsDir() {
			total += info.Size()
		}
		return err
	}); err != nil {
		b.Fatal(err)
	}
	return total
}

var syncSettings = []struct {
	name   string
	change func(*jetstream.Config)
}{
	{"interval", func(*jetstream.Config) {}},
	{"always", func(c *jetstream.Config) { c.SyncAlways = true }},
}

// benchConfig returns a configuration whose mirror has room for all entries.
func benchConfig(b *testing.B, dir string) jetstream.Config {
	b.Helper()
	cfg := config(dir)
	cfg.Retention.MaxBytes = 256 << 20
	return cfg
}

// BenchmarkAppend appends with the default number in flight.
func BenchmarkAppend(b *testing.B) {
	for _, sync := range syncSettings {
		b.Run("sync="+sync.name, func(b *testing.B) {
			dir := b.TempDir()
			cfg := benchConfig(b, dir)
			sync.change(&cfg)
			j, _ := load(b, cfg)
			var records []journal.Record
			for i := range 64 {
				records = append(records, benchRecord(i))
			}
			before, cpu, n := diskBytes(b, dir), cpuTime(), 0
			var last journal.Pending
			for b.Loop() {
				var err error
				if last, err = j.Append(b.Context(), records[n%64]); err != nil {
					b.Fatal(err)
				}
				n++
			}
			if _, err := last.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(n), "cpu-ns/op")
			b.ReportMetric(float64(diskBytes(b, dir)-before)/float64(n), "disk-B/op")
		})
	}
}

// BenchmarkSharedAppend appends to a stream of NATS servers, one in this process or three of their own, for workers that the instance owns, with the
// default number in flight. The instance reads each entry back, and so does each follower. Three servers keep three copies.
func BenchmarkSharedAppend(b *testing.B) {
	for _, c := range []struct{ servers, workers, followers int }{{1, 1, 0}, {1, 1000, 0}, {1, 1000, 4}, {3, 1, 0}, {3, 1000, 0}} {
		b.Run(fmt.Sprintf("servers=%d/workers=%d/followers=%d", c.servers, c.workers, c.followers), func(b *testing.B) {
			cfg, used := benchConfig(b, ""), cpuTime
			if c.servers == 1 {
				cfg.Servers = []string{natstest.Start(b)}
			} else {
				cluster := natstest.StartCluster(b)
				used = func() time.Duration { return cpuTime() + cluster.CPUTime() }
				cfg.Servers, cfg.Replicas = strings.Split(cluster.URLs(), ","), c.servers
			}
			j, _ := load(b, cfg)
			following := cfg
			following.Follow, following.Replicas = true, 0
			followers := make([]*jetstream.Journal, c.followers)
			for i := range followers {
				followers[i], _ = load(b, following)
			}
			records := make([]journal.Record, c.workers)
			var claims errgroup.Group
			claims.SetLimit(16)
			for i := range records {
				records[i] = benchRecord(i)
				claims.Go(func() error {
					_, err := j.Claim(b.Context(), *records[i].Source, jetstream.Owner{})
					return err
				})
			}
			if err := claims.Wait(); err != nil {
				b.Fatal(err)
			}
			pending := make([]journal.Pending, c.workers) // the last of each worker
			start, cpu, n := time.Now(), used(), 0
			for b.Loop() {
				p, err := j.Append(b.Context(), records[n%c.workers])
				if err != nil {
					b.Fatal(err)
				}
				pending[n%c.workers] = p
				n++
			}
			for _, p := range pending[:min(n, c.workers)] {
				if _, err := p.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			for _, f := range followers {
				awaitNewest(f, uint64(c.workers+n))
			}
			b.ReportMetric(float64(n)/time.Since(start).Seconds(), "entries/s")
			b.ReportMetric(float64(used()-cpu)/float64(n), "cpu-ns/op")
		})
	}
}

// BenchmarkAppendLatency has one append in flight.
func BenchmarkAppendLatency(b *testing.B) {
	for _, sync := range syncSettings {
		b.Run("sync="+sync.name, func(b *testing.B) {
			cfg := benchConfig(b, b.TempDir())
			sync.change(&cfg)
			j, _ := load(b, cfg)
			r := benchRecord(0)
			var latencies []time.Duration
			for b.Loop() {
				start := time.Now()
				p, err := j.Append(b.Context(), r)
				if err == nil {
					_, err = p.Wait(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
				latencies = append(latencies, time.Since(start))
			}
			slices.Sort(latencies)
			b.ReportMetric(float64(latencies[len(latencies)/2]), "p50-ns")
			b.ReportMetric(float64(latencies[len(latencies)*99/100]), "p99-ns")
		})
	}
}

// BenchmarkLoad loads 130,000 entries.
func BenchmarkLoad(b *testing.B) {
	const entries = 130_000
	dir := b.TempDir()
	j, _ := load(b, benchConfig(b, dir))
	r := benchRecord(0)
	var last journal.Pending
	for range entries {
		var err error
		if last, err = j.Append(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
	if _, err := last.Wait(b.Context()); err != nil {
		b.Fatal(err)
	}
	crashed := filepath.Join(b.TempDir(), "copy")
	if err := os.CopyFS(crashed, os.DirFS(dir)); err != nil {
		b.Fatal(err)
	}
	mustClose(b, j)
	for name, dir := range map[string]string{"stopped": dir, "crashed": crashed} {
		b.Run("after="+name, func(b *testing.B) {
			var opening, loading, cpu time.Duration
			for b.Loop() {
				start, startCPU := time.Now(), cpuTime()
				j := open(b, benchConfig(b, dir))
				opened, n := time.Now(), 0
				if err := j.Load(b.Context(), 0, func(jetstream.Entry) error { n++; return nil }); err != nil || n != entries {
					b.Fatalf("load: %d entries, %v", n, err)
				}
				opening, loading, cpu = opening+opened.Sub(start), loading+time.Since(opened), cpu+cpuTime()-startCPU
				mustClose(b, j)
			}
			b.ReportMetric(float64(opening)/float64(b.N), "open-ns/op")
			b.ReportMetric(float64(loading)/float64(b.N), "load-ns/op")
			b.ReportMetric(float64(cpu)/float64(b.N), "cpu-ns/op")
		})
	}
}

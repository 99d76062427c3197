package jetstream_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/journal/jetstream"
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
				if err := j.Load(b.Context(), func(jetstream.Entry) error { n++; return nil }); err != nil || n != entries {
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

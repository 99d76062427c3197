package bench_test

import "testing"

// pacedRate is the rate of batches that latencies are told at, a second.
const pacedRate = 2_000

// BenchmarkLatency is the way of an entry while little happens: an engine of 2,000
// B2 batches a second, sent one by one, and one subscriber.
//
// Included: all from just before the batch is given to ZeroMQ to when its response
// is in the subscriber's hands, still encoded; both are in the benchmark's process,
// which the server shares the machine with. read-p99 is the part up to when the
// server has read the batch. Excluded: how late the publisher was, and decoding.
// The time of an engine is a float; this one's is cut to microseconds. b.N is
// batches, and ns/op says no more than the rate that was kept.
//
// B2BesideSlow is the same while one client subscribes and never reads, and another
// takes a response every 100 ms: it is to be compared with B2, also in rss-MB, the
// memory of the server.
//
// The check is that of BenchmarkServer, and a time for each batch.
func BenchmarkLatency(b *testing.B) {
	requireProc(b)
	benchmarkWith(b, "B2", openLatency, benchmarkLatency)
	benchmarkWith(b, "B2BesideSlow", openBesideSlow, func(b *testing.B, o *besideSlow) { benchmarkLatency(b, o.observed) })
}

func benchmarkLatency(b *testing.B, o *observed) {
	b.Helper()
	b.ResetTimer()
	t, f, err := o.measure(b.N)
	b.StopTimer()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(microseconds(quantile(t.ways, 0.5)), "p50-us")
	b.ReportMetric(microseconds(quantile(t.ways, 0.99)), "p99-us")
	b.ReportMetric(microseconds(quantile(t.ways, 1)), "max-us")
	rss, err := residentBytes(o.server.cmd.Process.Pid)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(microseconds(quantile(t.reads, 0.99)), "read-p99-us")
	b.ReportMetric(float64(rss)/1e6, "rss-MB")
	reportAllocations(b, f.grown[metricMallocs]/float64(b.N), f.grown[metricAllocBytes]/float64(b.N))
}

// observed is a rig with an observer.
type observed struct {
	*rig
	observer observer
}

func openLatency() (*observed, error) {
	r, err := newRig(shapeB2, 0)
	if err != nil {
		return nil, err
	}
	o := &observed{rig: r}
	if _, err := r.subscribe(o.observer.observe); err != nil {
		return nil, closeAfter(err, r)
	}
	// So that all is warm.
	if _, _, err := o.measure(200); err != nil {
		return nil, closeAfter(err, r)
	}
	return o, nil
}

// measure sends n batches at the rate.
func (o *observed) measure(n int) (times, figures, error) {
	o.observer.restart()
	f, err := o.rig.measure(func() error {
		if err := o.pace(n); err != nil {
			return err
		}
		return o.arrive()
	})
	if err != nil {
		return times{}, f, err
	}
	t, err := o.observer.seen(n)
	return t, f, err
}

func TestLatencyIsOfEveryBatch(t *testing.T) {
	requireProc(t)
	o, err := openLatency()
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := o.measure(20)
	if err != nil {
		t.Fatal(err)
	}
	// Times are cut to microseconds.
	if first := got.reads[0]; first < -1000 {
		t.Errorf("a batch was read %v before it was sent", -first)
	}
	for k := range got.ways {
		if got.ways[k] < got.reads[k] {
			t.Errorf("way %d of %v is shorter than %v, the part of it to ingest", k, got.ways[k], got.reads[k])
		}
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
}

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
// batches.
//
// The floor is the same number of batches to a loop in C that writes their seqs to a
// TCP connection, by turns with the others, a tenth of a second each: what the machine,
// ZeroMQ and TCP take of any way. A p99 wants more than a second: -benchtime 20s.
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
	floor := o.floor.seen()
	b.ReportMetric(microseconds(quantile(floor, 0.5)), "floor-p50-us")
	b.ReportMetric(microseconds(quantile(floor, 0.99)), "floor-p99-us")
	b.ReportMetric(microseconds(quantile(floor, 1)), "floor-max-us")
	rss, err := o.server.residentBytes()
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
	floor    *relayed // or nil
}

func openLatency() (*observed, error) {
	o, err := openObserved()
	if err != nil {
		return nil, err
	}
	if err := o.warm(); err != nil {
		return nil, closeAfter(err, o)
	}
	return o, nil
}

// warm publishes some batches: enough to fill what a transport holds, so that whoever
// does not read is stuck.
func (o *observed) warm() error {
	if err := o.publish(4 * window); err != nil {
		return err
	}
	if err := o.arrive(); err != nil {
		return err
	}
	_, _, err := o.measure(200)
	o.floor.seen()
	return err
}

func openObserved() (*observed, error) {
	r, err := newRig(shapeB2, 0)
	if err != nil {
		return nil, err
	}
	o := &observed{rig: r}
	if _, err := r.subscribe(o.observer.observe); err != nil {
		return nil, closeAfter(err, r)
	}
	if o.floor, err = newRelayed(shapeB2); err != nil {
		return nil, closeAfter(err, r)
	}
	return o, nil
}

// turnBatches is how many batches go one way before as many go the other.
const turnBatches = pacedRate / 10

// measure sends n batches at the rate, and as many past the server.
func (o *observed) measure(n int) (times, figures, error) {
	o.observer.restart()
	f, err := o.rig.measure(func() error {
		for left := n; left > 0; left -= turnBatches {
			turn := min(left, turnBatches)
			if err := o.pace(turn); err != nil {
				return err
			}
			if err := o.arrive(); err != nil {
				return err
			}
			if err := o.floor.measure(turn); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return times{}, f, err
	}
	t, err := o.observer.seen(n)
	return t, f, err
}

// Close ends all parts.
func (o *observed) Close() error {
	if o.floor == nil {
		return o.rig.Close()
	}
	return closeAll(o.rig, o.floor)
}

func TestLatencyMeasuresEveryBatch(t *testing.T) {
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
	if floor := o.floor.seen(); len(floor) != len(got.ways) || floor[0] <= 0 {
		t.Errorf("the floor is %v, want %d ways", floor, len(got.ways))
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

//go:build cgo

package bench_test

import (
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
)

// pacedRate is the rate in batches per second at which latencies are measured.
const pacedRate = 2_000

// BenchmarkLatency measures the latency of an entry at low load: an engine of 2,000 B2 batches per
// second, sent one by one, and one subscriber.
//
// Included: everything from just before the batch is passed to ZeroMQ until the subscriber has
// received the encoded response. Both run in the benchmark's process, which shares the machine with
// the server. read-p99 is the part until the server has read the batch. Excluded: the publisher's
// lateness, and decoding. An engine's time is a float; here it is truncated to microseconds. b.N is
// batches.
//
// The floor is the same number of batches sent to a C loop that writes their seqs to a TCP
// connection, alternating with the server every tenth of a second. It measures the cost of the
// machine, ZeroMQ and TCP on any path. A p99 requires more than a second: -benchtime 20s.
//
// index-p99 is the upper bound of the server's own figure from the receipt of a batch until its blocks are matched and
// its entry can be sent: a bound of a histogram whose bounds double.
//
// B2/native and B2/libzmq connect to the engine with that implementation of ZeroMQ. B2/file/1s and B2/file/always have a
// journal in files, which is synced to the disk each second or always. B2BesideSlow adds
// a client that subscribes and never reads, and a client that reads one response every 100 ms. Compare
// it with the others, including rss-MB, the memory of the server.
//
// Check: as in BenchmarkServer, and one measurement per batch.
func BenchmarkLatency(b *testing.B) {
	requireProc(b)
	for _, zmq := range []config.ZMQ{config.ZMQNative, config.ZMQLib} {
		open := func() (*observed, error) { return openLatency("--ingest-connect-transport", string(zmq)) }
		benchmarkWith(b, "B2/"+string(zmq), open, benchmarkLatency)
	}
	for _, sync := range []string{"1s", "always"} {
		open := func() (*observed, error) { return openLatency(journalArgs(b.TempDir(), sync)...) }
		benchmarkWith(b, "B2/file/"+sync, open, benchmarkLatency)
	}
	benchmarkWith(b, "B2BesideSlow", openBesideSlow, func(b *testing.B, o *besideSlow) { benchmarkLatency(b, o.observed) })
}

func benchmarkLatency(b *testing.B, o *observed) {
	b.Helper()
	before, err := o.server.histogram(b.Context(), metricIndexDelay)
	if err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	t, f, err := o.measure(b.N)
	b.StopTimer()
	if err != nil {
		b.Fatal(err)
	}
	after, err := o.server.histogram(b.Context(), metricIndexDelay)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(microseconds(quantileSince(before, after, 0.99)), "index-p99-us")
	b.ReportMetric(microseconds(quantile(t.latencies, 0.5)), "p50-us")
	b.ReportMetric(microseconds(quantile(t.latencies, 0.99)), "p99-us")
	b.ReportMetric(microseconds(quantile(t.latencies, 1)), "max-us")
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
	floor    *latencyFloor // nil if the floor is not measured
}

func openLatency(args ...string) (*observed, error) {
	o, err := openObserved(args...)
	if err != nil {
		return nil, err
	}
	if err := o.warm(); err != nil {
		return nil, closeAfter(err, o)
	}
	return o, nil
}

// warm publishes enough batches to fill the transport's buffers, so that a client that does not
// read is blocked.
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

func openObserved(args ...string) (*observed, error) {
	r, err := newRig(shapeB2, 0, args...)
	if err != nil {
		return nil, err
	}
	o := &observed{rig: r}
	if _, err := r.subscribe(o.observer.observe); err != nil {
		return nil, closeAfter(err, r)
	}
	if o.floor, err = newLatencyFloor(shapeB2); err != nil {
		return nil, closeAfter(err, r)
	}
	return o, nil
}

// pathBatches is the number of batches sent on one path before switching to the other.
const pathBatches = pacedRate / 10

// measure sends n batches at the rate to the server, and as many on the floor's path.
func (o *observed) measure(n int) (times, figures, error) {
	o.observer.restart()
	f, err := o.rig.measure(func() error {
		for left := n; left > 0; left -= pathBatches {
			batches := min(left, pathBatches)
			if err := o.pace(batches); err != nil {
				return err
			}
			if err := o.arrive(); err != nil {
				return err
			}
			if err := o.floor.measure(batches); err != nil {
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

// Close closes all parts.
func (o *observed) Close() error {
	if o.floor == nil {
		return o.rig.Close()
	}
	return closeAll(o.rig, o.floor)
}

func TestLatencyMeasuresEveryBatch(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	o, err := openLatency()
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := o.measure(20)
	if err != nil {
		t.Fatal(err)
	}
	// Times are truncated to microseconds.
	if first := got.reads[0]; first < -1000 {
		t.Errorf("a batch was read %v before it was sent", -first)
	}
	if floor := o.floor.seen(); len(floor) != len(got.latencies) || floor[0] <= 0 {
		t.Errorf("the floor is %v, want %d latencies", floor, len(got.latencies))
	}
	for k := range got.latencies {
		if got.latencies[k] < got.reads[k] {
			t.Errorf("latency %d of %v is shorter than %v, the part of it to ingest", k, got.latencies[k], got.reads[k])
		}
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
}

package bench_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

// metrics are the values of /metrics by name, summed over labels.
type metrics map[string]float64

// The metrics that the benchmarks use.
const (
	metricBatches       = "kvcast_ingest_batches_total"
	metricStored        = "kvcast_pipeline_blocks_stored_total"
	metricRemoved       = "kvcast_pipeline_blocks_removed_total"
	metricBlocks        = "kvcast_index_blocks"
	metricEntriesSent   = "kvcast_server_entries_sent_total"
	metricEntryBytes    = "kvcast_server_entry_bytes_sent_total"
	metricResponsesSent = "kvcast_server_responses_sent_total"
	metricBehind        = "kvcast_index_behind_entries"
	metricOldest        = "kvcast_server_journal_oldest_seq"
	metricNewest        = "kvcast_server_journal_newest_seq"
	metricMallocs       = "go_memstats_mallocs_total"
	metricAllocBytes    = "go_memstats_alloc_bytes_total"
)

// faults are the metrics that must be 0 when nothing is lost.
var faults = []string{
	"kvcast_ingest_gaps_total",
	"kvcast_ingest_missed_batches_total",
	"kvcast_ingest_restarts_total",
	"kvcast_ingest_duplicates_total",
	"kvcast_ingest_events_skipped_total",
	"kvcast_ingest_batches_rejected_total",
	"kvcast_ingest_messages_refused_total",
	"kvcast_pipeline_gaps_total",
	"kvcast_pipeline_raw_event_holes_total",
	"kvcast_index_incomplete",
	"kvcast_server_panics_total",
}

// since returns the increase of each metric.
func (m metrics) since(before metrics) metrics {
	grown := make(metrics, len(m))
	for name, value := range m {
		grown[name] = value - before[name]
	}
	return grown
}

// faultless returns an error if any fault metric increased.
func (m metrics) faultless() error {
	for _, name := range faults {
		if m[name] != 0 {
			return fmt.Errorf("check metrics: %s is %g", name, m[name])
		}
	}
	return nil
}

// want returns an error unless a metric has the value.
func (m metrics) want(name string, value int) error {
	if got, ok := m[name]; !ok || got != float64(value) {
		return fmt.Errorf("check metrics: %s is %.0f, want %d", name, got, value)
	}
	return nil
}

// metricIndexDelay is a histogram: the time from the receipt of a batch until subscribers can read its entry.
const metricIndexDelay = "kvcast_index_delay_seconds"

// bucket is the number of observations up to a bound.
type bucket struct{ bound, count float64 }

// histogram returns the buckets of a histogram without labels, by bound.
func (p *process) histogram(ctx context.Context, name string) ([]bucket, error) {
	text, err := p.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	return bucketsOf(text, name)
}

func bucketsOf(text, name string) (buckets []bucket, err error) {
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name+`_bucket{le="`)
		if !ok {
			continue
		}
		bound, count, _ := strings.Cut(strings.TrimSpace(rest), `"} `)
		var b bucket
		if b.bound, err = strconv.ParseFloat(bound, 64); err == nil {
			b.count, err = strconv.ParseFloat(count, 64)
		}
		if err != nil {
			return nil, fmt.Errorf("read histogram %s: %w", name, err)
		}
		buckets = append(buckets, b)
	}
	if len(buckets) == 0 {
		return nil, fmt.Errorf("read histogram %s: the server has none", name)
	}
	return buckets, nil
}

// quantileSince returns the least bound that a quantile of the observations since before does not exceed; 0 if there are
// none.
func quantileSince(before, after []bucket, q float64) time.Duration {
	last := len(after) - 1
	want := q * (after[last].count - before[last].count)
	for i, b := range after {
		if n := b.count - before[i].count; n > 0 && n >= want {
			return time.Duration(b.bound * float64(time.Second))
		}
	}
	return 0
}

func TestQuantileIsTheBoundOfItsBucket(t *testing.T) {
	const form = `# TYPE a histogram
a_bucket{le="0.001"} %d
a_bucket{le="0.002"} %d
a_bucket{le="+Inf"} %d
a_count 3
`
	before, err := bucketsOf(fmt.Sprintf(form, 5, 5, 7), "a")
	if err != nil {
		t.Fatal(err)
	}
	after, err := bucketsOf(fmt.Sprintf(form, 14, 15, 17), "a")
	if err != nil {
		t.Fatal(err)
	}
	for q, want := range map[float64]time.Duration{0.5: time.Millisecond, 0.9: time.Millisecond, 0.99: 2 * time.Millisecond} {
		if got := quantileSince(before, after, q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if got := quantileSince(after, after, 0.5); got != 0 {
		t.Errorf("without observations, the quantile is %v", got)
	}
	if _, err := bucketsOf("", "a"); err == nil {
		t.Error("without the histogram: no error")
	}
}

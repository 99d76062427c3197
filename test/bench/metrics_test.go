package bench_test

import (
	"fmt"
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

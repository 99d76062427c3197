package server

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/index"
)

// metrics are the counters over all calls.
type metrics struct {
	responses prometheus.Counter
	entries   prometheus.Counter
	bytes     prometheus.Counter
	progress  prometheus.Counter
	panics    prometheus.Counter
	stalled   prometheus.Counter
	late      prometheus.Counter
}

// newMetrics registers the server's metrics, except for those of its limiters and quotas.
func (s *Server) newMetrics(all promauto.Factory) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return all.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string, value func() float64) {
		all.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	gauge("receiving_requests", "Calls whose request is being received.", func() float64 { return float64(len(s.receiving)) })
	gauge("subscribers", "Open Subscribe streams.", func() float64 { return float64(s.subscribers.inUse()) })
	gauge("snapshots", "Snapshots being sent.", func() float64 { return float64(s.snapshots.inUse()) })
	gauge("snapshots_waiting", "Snapshots waiting for a slot.", func() float64 { return float64(s.snapshots.waiting()) })
	gauge("journal_bytes", "Bytes of the retained entries.", func() float64 { return float64(s.journal.Bytes()) })
	gauge("journal_evicted_bytes", "Bytes of evicted entries still in memory, mostly because slow subscribers reference them.",
		func() float64 { return float64(s.journal.EvictedBytes()) })
	gauge("journal_oldest_seq", "Seq of the oldest retained entry.", func() float64 { return float64(s.journal.Bounds().Oldest) })
	gauge("journal_newest_seq", "Seq of the newest entry.", func() float64 { return float64(s.journal.Bounds().Newest) })
	return &metrics{
		responses: counter("responses_sent_total", "Responses with entries sent to subscribers."),
		entries:   counter("entries_sent_total", "Entries sent to subscribers."),
		bytes:     counter("entry_bytes_sent_total", "Bytes of entries sent to subscribers."),
		progress:  counter("progress_sent_total", "Progress messages sent to subscribers."),
		stalled:   counter("stalled_streams_total", "Streams ended because the client did not read, or read a snapshot too slowly."),
		late:      counter("late_requests_total", "Calls canceled because their request was not received in time."),
		panics:    counter("panics_total", "Calls ended by a panic; the log has the stack."),
	}
}

var (
	descBlocks     = prometheus.NewDesc("kvcast_index_blocks", "Distinct blocks.", []string{"worker", "dp_rank", "tier"}, nil)
	descIncomplete = prometheus.NewDesc("kvcast_index_incomplete",
		"1 if the blocks of a dp rank may differ from the engine's because events were lost.", []string{"worker", "dp_rank"}, nil)
	tierNames = [index.NumTiers]string{"device", "host_pinned", "disk", "external"}
)

// indexMetrics collects the metrics of an index. A worker's metrics are removed with it.
type indexMetrics struct{ *index.Index }

// Describe implements prometheus.Collector.
func (indexMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- descBlocks
	ch <- descIncomplete
}

// Collect implements prometheus.Collector.
func (m indexMetrics) Collect(ch chan<- prometheus.Metric) {
	workers, _ := m.Workers(nil)
	for _, w := range workers {
		for _, r := range w.Ranks {
			rank, incomplete := strconv.FormatUint(uint64(r.Rank), 10), 0.0
			if r.Reasons != 0 {
				incomplete = 1
			}
			ch <- prometheus.MustNewConstMetric(descIncomplete, prometheus.GaugeValue, incomplete, w.Name, rank)
			for tier, d := range r.Blocks {
				if r.UsedTiers&(1<<tier) != 0 {
					ch <- prometheus.MustNewConstMetric(descBlocks, prometheus.GaugeValue, float64(d.Blocks), w.Name, rank, tierNames[tier])
				}
			}
		}
	}
}

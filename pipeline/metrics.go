package pipeline

import (
	"maps"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// laneCounts are a lane's counters, guarded by its lock.
type laneCounts struct {
	events            [16]uint64 // by the number of the event's field in RouterEvent
	flushes           [numFlushReasons]uint64
	rawEventHoles     uint64
	blocksStored      uint64
	blocksRemoved     uint64
	removesSuppressed uint64
	staleRemoved      uint64
	blocksRefused     [consolidate.NumRefusals]uint64
	blocksEvicted     [consolidate.RefusedAttributes]uint64 // of lower tiers, by limit
	tracker           consolidate.Counts
	gaps              uint64
	missedBatches     uint64
}

var (
	descEvents        = workerDesc("events_total", "RouterEvents emitted.", "event")
	descFlushes       = workerDesc("flushes_total", "Runs of merged events emitted, by what ended them.", "reason")
	descRawEventHoles = workerDesc("raw_event_holes_total",
		"Engine events that did not reach the pipeline: those dropped as invalid or as parts of blocks, and one for each batch that was lost or refused. Ignored events are not counted.")
	descBlocksStored      = workerDesc("blocks_stored_total", "Blocks in stored events emitted.")
	descBlocksRemoved     = workerDesc("blocks_removed_total", "Blocks in removed events emitted.")
	descRemovesSuppressed = workerDesc("removes_suppressed_total", "Removes not emitted: the engine has another copy, or another source of the worker holds the block.")
	descStaleRemoved      = workerDesc("stale_blocks_removed_total", "Blocks from before a gap removed because their dp rank exceeded ingest.max_blocks_per_rank; also in blocks_removed_total.")
	descBlocksRefused     = workerDesc("blocks_refused_total", "Stores of blocks refused because a bound was reached: ingest.max_blocks_per_rank (rank), ingest.max_blocks (total) or ingest.max_attribute_bytes (attributes).", "reason")
	descBlocksEvicted     = workerDesc("blocks_evicted_total", "Blocks of lower tiers removed to make room because a bound was reached: ingest.max_blocks_per_rank (rank) or ingest.max_blocks (total); also in blocks_removed_total.", "reason")
	descRemovesIgnored    = workerDesc("removes_ignored_total", "Removes without effect, of workers with several sources: of blocks without a holder (unknown), or that the source does not hold by that name (not_held).", "reason")
	descTracked           = workerDesc("consolidated_blocks", "Distinct blocks held by the sources of a worker with several sources.", "dp_rank")
	descNames             = workerDesc("consolidated_names", "Names that sources have or had for these blocks; kept as long as the block.", "dp_rank", "source")
	descGaps              = workerDesc("gaps_total", "Gaps that could not be repaired.")
	descMissed            = workerDesc("missed_batches_total", "Batches lost in gaps that could not be repaired.")
)

func workerDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvcast_pipeline_"+name, help, append([]string{"worker"}, labels...), nil)
}

var _ prometheus.Collector = (*Pipeline)(nil)

// Describe implements prometheus.Collector.
func (p *Pipeline) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descEvents, descFlushes, descRawEventHoles, descBlocksStored, descBlocksRemoved,
		descRemovesSuppressed, descStaleRemoved, descBlocksRefused, descBlocksEvicted, descGaps, descMissed, descRemovesIgnored, descTracked, descNames,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. A worker's metrics are removed with it.
func (p *Pipeline) Collect(ch chan<- prometheus.Metric) {
	p.mu.Lock()
	lanes := slices.Collect(maps.Values(p.lanes))
	p.mu.Unlock()
	for _, l := range lanes {
		for _, m := range l.metrics() {
			ch <- m
		}
	}
}

// eventKinds are the kinds of RouterEvents. Their names are metric labels.
var eventKinds = (*kvcastv1.RouterEvent)(nil).ProtoReflect().Descriptor().Oneofs().ByName("event")

func (l *Lane) metrics() (all []prometheus.Metric) {
	metric := func(d *prometheus.Desc, t prometheus.ValueType, v uint64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(d, t, float64(v), append([]string{l.worker}, labels...)...))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	counts := &l.counts
	for i := range eventKinds.Fields().Len() {
		kind := eventKinds.Fields().Get(i)
		metric(descEvents, prometheus.CounterValue, counts.events[kind.Number()], string(kind.Name()))
	}
	for why, n := range counts.flushes {
		metric(descFlushes, prometheus.CounterValue, n, flushNames[why])
	}
	metric(descRawEventHoles, prometheus.CounterValue, counts.rawEventHoles)
	metric(descBlocksStored, prometheus.CounterValue, counts.blocksStored)
	metric(descBlocksRemoved, prometheus.CounterValue, counts.blocksRemoved)
	metric(descRemovesSuppressed, prometheus.CounterValue, counts.removesSuppressed+counts.tracker.Suppressed)
	metric(descStaleRemoved, prometheus.CounterValue, counts.staleRemoved+counts.tracker.StaleRemoved)
	for why, n := range counts.blocksRefused {
		metric(descBlocksRefused, prometheus.CounterValue, n, refusalNames[why])
	}
	for why, n := range counts.blocksEvicted {
		metric(descBlocksEvicted, prometheus.CounterValue, n, refusalNames[why])
	}
	metric(descGaps, prometheus.CounterValue, counts.gaps)
	metric(descMissed, prometheus.CounterValue, counts.missedBatches)
	if l.consolidation == dedup {
		metric(descRemovesIgnored, prometheus.CounterValue, counts.tracker.UnknownRemoves, "unknown")
		metric(descRemovesIgnored, prometheus.CounterValue, counts.tracker.IdleRemoves, "not_held")
	}
	for rank := range l.ranks {
		if t := l.tracker(rank); t != nil {
			name := strconv.FormatUint(uint64(rank), 10)
			metric(descTracked, prometheus.GaugeValue, uint64(t.Len()), name)
			for source, n := range t.Names() {
				metric(descNames, prometheus.GaugeValue, uint64(n), name, l.sourceNames[source])
			}
		}
	}
	return all
}

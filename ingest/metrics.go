package ingest

import (
	"errors"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/ingest/wire"
)

const (
	metricsNamespace = "kvcast"
	metricsSubsystem = "ingest"
)

// counterID identifies a counter.
type counterID uint8

const (
	batchesTotal counterID = iota
	eventsTotal
	skippedTotal
	rejectedTotal
	refusedTotal
	duplicatesTotal
	gapsTotal
	missedTotal
	restartsTotal
	messagesTotal
	connectionsTotal
	disconnectionsTotal
	connectAttemptsTotal
	connectFailuresTotal
	replaysTotal
	replaysDoneTotal
	replaysFailedTotal
	replayedTotal
	receiveDropsTotal
	reorderDropsTotal
	staleTotal
	conflictsTotal

	numCounters
)

// counterOpts describe the counters. Each has the label worker, which is empty for a message or
// connection of no worker, and the label named here, unless that is empty.
var counterOpts = [numCounters]struct{ name, label, help string }{
	batchesTotal:         {"batches_total", "", "Batches delivered."},
	eventsTotal:          {"events_total", "kind", "Events delivered, by kind."},
	skippedTotal:         {"events_skipped_total", "reason", "Events, or the ends of stores, left out of batches, by reason."},
	rejectedTotal:        {"batches_rejected_total", "error", "Batches that do not decode, by error."},
	refusedTotal:         {"messages_refused_total", "reason", "Messages refused, by reason."},
	duplicatesTotal:      {"duplicates_total", "", "Batches dropped because they were read before."},
	gapsTotal:            {"gaps_total", "", "Gaps reported."},
	missedTotal:          {"missed_batches_total", "", "Batches lost, as reported by gaps."},
	restartsTotal:        {"restarts_total", "", "Restarts of engines."},
	messagesTotal:        {"messages_total", "", "Messages received from engines, without replies of replay sockets. Messages to listeners have an empty worker label."},
	connectionsTotal:     {"connections_total", "", "Connections with engines. Connections to listeners have an empty worker label."},
	disconnectionsTotal:  {"disconnections_total", "", "Connections that were closed. Connections to listeners have an empty worker label."},
	connectAttemptsTotal: {"connect_attempts_total", "", "Attempts to connect to engines."},
	connectFailuresTotal: {"connect_failures_total", "", "Attempts to connect that failed and are retried."},
	replaysTotal:         {"replays_total", "cause", "Repairs started, by cause."},
	replaysDoneTotal:     {"replays_done_total", "", "Repairs that brought everything."},
	replaysFailedTotal:   {"replays_failed_total", "", "Repairs that were abandoned."},
	replayedTotal:        {"replayed_batches_total", "", "Batches delivered from replays."},
	receiveDropsTotal:    {"receive_buffer_dropped_total", "", "Messages dropped because the receive buffer was full. They are requested from the replay socket. Messages to listeners have an empty worker label."},
	reorderDropsTotal:    {"reorder_buffer_dropped_total", "", "Live batches that did not fit into the reorder buffer. They are requested from the replay socket."},
	staleTotal:           {"stale_batches_total", "", "Live batches dropped because an earlier incarnation sent them."},
	conflictsTotal:       {"publisher_conflicts_total", "", "Conflicts: two publishers used the same topic and rank."},
}

// metrics are the metrics of one Ingest.
type metrics struct {
	registry          *prometheus.Registry // has all of them
	counters          [numCounters]*prometheus.CounterVec
	lastSeq           *prometheus.GaugeVec
	publishers        *prometheus.GaugeVec
	replaysInProgress *prometheus.GaugeVec
	peersRejected     *prometheus.CounterVec
	durations         prometheus.Histogram
}

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	factory := promauto.With(m.registry)
	for i, o := range counterOpts {
		labels := []string{"worker", o.label}
		if o.label == "" {
			labels = labels[:1]
		}
		m.counters[i] = factory.NewCounterVec(prometheus.CounterOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: o.name, Help: o.help,
		}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return factory.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: name, Help: help,
		}, labels)
	}
	m.lastSeq = gauge("last_seq", "Engine seq of the last batch.", "worker", "source", "rank")
	m.publishers = gauge("publishers", "Publishers, one for each source and dp rank, by state.", "state")
	m.replaysInProgress = gauge("replays_in_progress",
		"Requests to replay sockets, by state: waiting for a slot, waiting for the first reply, or being read.", "state")
	m.peersRejected = factory.NewCounterVec(prometheus.CounterOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "peers_rejected_total",
		Help: "Peers of listeners that were disconnected because of what they sent or because of a limit, by reason.",
	}, []string{"reason"})
	m.durations = factory.NewHistogram(prometheus.HistogramOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "batch_duration_seconds",
		Help:    "Time from receiving a batch to its delivery, averaged over batches that were processed together.",
		Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12),
	})
	return m
}

// count adds n to a counter without a label beside worker.
func (m *metrics) count(id counterID, worker string, n int) {
	m.counters[id].WithLabelValues(worker).Add(float64(n))
}

// changeState counts a publisher under another state; 0 means that it is not counted.
func (m *metrics) changeState(from, to SourceState) {
	if from != 0 {
		m.publishers.WithLabelValues(from.String()).Dec()
	}
	if to != 0 {
		m.publishers.WithLabelValues(to.String()).Inc()
	}
}

// observe records the duration of n batches that were processed together.
func (m *metrics) observe(began time.Time, n int) {
	if n > 0 {
		m.durations.Observe(time.Since(began).Seconds() / float64(n))
	}
}

// forget deletes the metrics of a worker.
func (m *metrics) forget(worker string) {
	labels := prometheus.Labels{"worker": worker}
	for _, c := range m.counters {
		c.DeletePartialMatch(labels)
	}
	m.lastSeq.DeletePartialMatch(labels)
}

// workerMetrics are the metrics of one worker. Its counters are looked up once, which keeps lookups
// out of the hot path.
type workerMetrics struct {
	all    *metrics
	worker string
	// counters are the counters without a label beside worker; the others are nil.
	counters                 [numCounters]prometheus.Counter
	stored, removed, cleared prometheus.Counter
	// skipped are nil until an event is skipped for the reason.
	skipped [wire.NumReasons]prometheus.Counter
}

func (m *metrics) of(worker string) *workerMetrics {
	w := &workerMetrics{all: m, worker: worker}
	for i, o := range counterOpts {
		if o.label == "" {
			w.counters[i] = m.counters[i].WithLabelValues(worker)
		}
	}
	w.stored = w.labeled(eventsTotal, "stored")
	w.removed = w.labeled(eventsTotal, "removed")
	w.cleared = w.labeled(eventsTotal, "cleared")
	return w
}

// inc increments a counter without a label beside worker.
func (m *workerMetrics) inc(id counterID) { m.counters[id].Inc() }

// labeled returns a counter with a label beside worker.
func (m *workerMetrics) labeled(id counterID, value string) prometheus.Counter {
	return m.all.counters[id].WithLabelValues(m.worker, value)
}

// batch counts a delivered batch. It adds the counts of Rules.Admit, and resets them.
func (m *workerMetrics) batch(events []wire.Event, counts *wire.Counts) {
	m.inc(batchesTotal)
	var stored, removed, cleared int
	for i := range events {
		switch events[i].Kind {
		case wire.KindStored:
			stored++
		case wire.KindRemoved:
			removed++
		case wire.KindCleared:
			cleared++
		}
	}
	if stored > 0 {
		m.stored.Add(float64(stored))
	}
	if removed > 0 {
		m.removed.Add(float64(removed))
	}
	if cleared > 0 {
		m.cleared.Add(float64(cleared))
	}
	if *counts == (wire.Counts{}) {
		return
	}
	for reason, n := range counts {
		if n == 0 {
			continue
		}
		if m.skipped[reason] == nil {
			m.skipped[reason] = m.labeled(skippedTotal, wire.Reason(reason).String())
		}
		m.skipped[reason].Add(float64(n))
	}
	*counts = wire.Counts{}
}

func (m *workerMetrics) lastSeq(source int, rank uint32) prometheus.Gauge {
	return m.all.lastSeq.WithLabelValues(m.worker, strconv.Itoa(source), strconv.FormatUint(uint64(rank), 10))
}

// errorName returns the metric label for an error of wire.Decoder, or for errTooLong.
func errorName(err error) string {
	var e wire.Error
	switch {
	case errors.As(err, &e):
		return e.Name()
	case errors.Is(err, errTooLong):
		return refusedLength.String()
	}
	return "unknown"
}

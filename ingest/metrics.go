package ingest

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/wire"
)

const (
	metricsNamespace = "kvcast"
	metricsSubsystem = "ingest"
)

// metrics are those of one Ingest. What counts for no worker has an empty worker label.
type metrics struct {
	batches    *prometheus.CounterVec
	events     *prometheus.CounterVec
	skipped    *prometheus.CounterVec
	rejected   *prometheus.CounterVec
	refused    *prometheus.CounterVec
	duplicates *prometheus.CounterVec
	gaps       *prometheus.CounterVec
	missed     *prometheus.CounterVec
	restarts   *prometheus.CounterVec

	messages        *prometheus.CounterVec
	connections     *prometheus.CounterVec
	disconnections  *prometheus.CounterVec
	connectAttempts *prometheus.CounterVec
	connectFailures *prometheus.CounterVec
	replays         *prometheus.CounterVec
	replaysDone     *prometheus.CounterVec
	replaysFailed   *prometheus.CounterVec
	replayed        *prometheus.CounterVec
	undelivered     *prometheus.CounterVec
	unbuffered      *prometheus.CounterVec
	stale           *prometheus.CounterVec
	ambiguous       *prometheus.CounterVec

	lastSeq           *prometheus.GaugeVec
	publishers        *prometheus.GaugeVec
	replaysInProgress *prometheus.GaugeVec
	durations         prometheus.Histogram

	registered []prometheus.Collector
}

func newMetrics() *metrics {
	return &metrics{
		batches:    counter("batches_total", "Batches delivered.", "worker"),
		events:     counter("events_total", "Events delivered, by kind.", "worker", "kind"),
		skipped:    counter("events_skipped_total", "Events, or the ends of stores, left out of batches, by reason.", "worker", "reason"),
		rejected:   counter("batches_rejected_total", "Batches that do not decode, by error.", "worker", "error"),
		refused:    counter("messages_refused_total", "Messages refused, by reason.", "worker", "reason"),
		duplicates: counter("duplicates_total", "Batches dropped because they were read before.", "worker"),
		gaps:       counter("gaps_total", "Gaps reported.", "worker"),
		missed:     counter("missed_batches_total", "Batches lost, as reported by gaps.", "worker"),
		restarts:   counter("restarts_total", "Restarts of engines.", "worker"),

		messages:        counter("messages_total", "Messages received from engines, without replies of replay sockets. Those of listeners have an empty worker label.", "worker"),
		connections:     counter("connections_total", "Connections with engines. Those to listeners have an empty worker label.", "worker"),
		disconnections:  counter("disconnections_total", "Connections that were closed. Those to listeners have an empty worker label.", "worker"),
		connectAttempts: counter("connect_attempts_total", "Attempts to connect to engines.", "worker"),
		connectFailures: counter("connect_failures_total", "Attempts to connect that failed and are retried.", "worker"),
		replays:         counter("replays_total", "Repairs started, by cause.", "worker", "cause"),
		replaysDone:     counter("replays_done_total", "Repairs that brought everything.", "worker"),
		replaysFailed:   counter("replays_failed_total", "Repairs that were abandoned.", "worker"),
		replayed:        counter("replayed_batches_total", "Batches delivered from replays.", "worker"),
		undelivered:     counter("receive_buffer_dropped_total", "Messages dropped because the receive buffer was full. They are requested from the replay socket. Those of listeners have an empty worker label.", "worker"),
		unbuffered:      counter("reorder_buffer_dropped_total", "Live batches that did not fit into the reorder buffer. They are requested from the replay socket.", "worker"),
		stale:           counter("stale_batches_total", "Live batches dropped because a former incarnation sent them.", "worker"),
		ambiguous:       counter("publisher_conflicts_total", "Conflicts: two publishers used one topic and rank.", "worker"),

		lastSeq:           gauge("last_seq", "Engine seq of the last batch.", "worker", "source", "rank"),
		publishers:        gauge("publishers", "Publishers, one for each source and dp rank, by state.", "state"),
		replaysInProgress: gauge("replays_in_progress", "Requests to replay sockets, by state: waiting for a slot, for the first reply, or being read.", "state"),
		durations: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "batch_duration_seconds",
			Help:    "Time from receiving a batch to its delivery, averaged over those processed together.",
			Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12),
		}),
	}
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: name, Help: help,
	}, labels)
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: name, Help: help,
	}, labels)
}

// register registers all or none.
func (m *metrics) register(r prometheus.Registerer, more ...prometheus.Collector) error {
	for _, c := range append(more, m.undelivered,
		m.batches, m.events, m.skipped, m.rejected, m.refused, m.duplicates,
		m.gaps, m.missed, m.restarts, m.messages, m.connections, m.disconnections, m.connectAttempts, m.connectFailures, m.replays, m.replaysDone,
		m.replaysFailed, m.replayed, m.unbuffered, m.stale, m.ambiguous, m.lastSeq, m.publishers, m.replaysInProgress, m.durations,
	) {
		if err := r.Register(c); err != nil {
			m.unregister(r)
			return fmt.Errorf("register metrics: %w", err)
		}
		m.registered = append(m.registered, c)
	}
	return nil
}

func (m *metrics) unregister(r prometheus.Registerer) {
	for _, c := range m.registered {
		r.Unregister(c)
	}
	m.registered = nil
}

// move counts a publisher in another state; 0 is none.
func (m *metrics) move(from, to SourceState) {
	if from != 0 {
		m.publishers.WithLabelValues(from.String()).Dec()
	}
	if to != 0 {
		m.publishers.WithLabelValues(to.String()).Inc()
	}
}

// observe records the duration of n batches that were processed together.
func (m *metrics) observe(began time.Time, n int) {
	if n == 0 {
		return
	}
	each := time.Since(began).Seconds() / float64(n)
	m.durations.Observe(each)
}

// forget deletes the metrics of a worker.
func (m *metrics) forget(worker string) {
	of := prometheus.Labels{"worker": worker}
	for _, v := range []interface {
		DeletePartialMatch(prometheus.Labels) int
	}{
		m.batches, m.events, m.skipped, m.rejected, m.refused, m.duplicates, m.gaps, m.missed, m.restarts,
		m.messages, m.connections, m.disconnections, m.connectAttempts, m.connectFailures, m.replays, m.replaysDone, m.replaysFailed, m.replayed,
		m.unbuffered, m.undelivered, m.stale, m.ambiguous, m.lastSeq,
	} {
		v.DeletePartialMatch(of)
	}
}

// workerMetrics are the metrics of one worker, resolved once, so that a batch costs no
// lookup. Those of skipped events are created when the first one is skipped.
type workerMetrics struct {
	all    *metrics
	worker string

	batches    prometheus.Counter
	stored     prometheus.Counter
	removed    prometheus.Counter
	cleared    prometheus.Counter
	duplicates prometheus.Counter
	gaps       prometheus.Counter
	missed     prometheus.Counter
	restarts   prometheus.Counter

	messages        prometheus.Counter
	connections     prometheus.Counter
	disconnections  prometheus.Counter
	connectAttempts prometheus.Counter
	connectFailures prometheus.Counter
	replaysDone     prometheus.Counter
	replaysFailed   prometheus.Counter
	replayed        prometheus.Counter
	unbuffered      prometheus.Counter
	stale           prometheus.Counter
	ambiguous       prometheus.Counter

	skipped [wire.NumReasons]prometheus.Counter
}

func (m *metrics) of(worker string) *workerMetrics {
	return &workerMetrics{
		all:        m,
		worker:     worker,
		batches:    m.batches.WithLabelValues(worker),
		stored:     m.events.WithLabelValues(worker, "stored"),
		removed:    m.events.WithLabelValues(worker, "removed"),
		cleared:    m.events.WithLabelValues(worker, "cleared"),
		duplicates: m.duplicates.WithLabelValues(worker),
		gaps:       m.gaps.WithLabelValues(worker),
		missed:     m.missed.WithLabelValues(worker),
		restarts:   m.restarts.WithLabelValues(worker),

		messages:        m.messages.WithLabelValues(worker),
		connections:     m.connections.WithLabelValues(worker),
		disconnections:  m.disconnections.WithLabelValues(worker),
		connectAttempts: m.connectAttempts.WithLabelValues(worker),
		connectFailures: m.connectFailures.WithLabelValues(worker),
		replaysDone:     m.replaysDone.WithLabelValues(worker),
		replaysFailed:   m.replaysFailed.WithLabelValues(worker),
		replayed:        m.replayed.WithLabelValues(worker),
		unbuffered:      m.unbuffered.WithLabelValues(worker),
		stale:           m.stale.WithLabelValues(worker),
		ambiguous:       m.ambiguous.WithLabelValues(worker),
	}
}

// batch counts a delivered batch, and adds and resets the counts of Rules.Admit.
func (m *workerMetrics) batch(events []wire.Event, counts *wire.Counts) {
	m.batches.Inc()
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
			m.skipped[reason] = m.all.skipped.WithLabelValues(m.worker, wire.Reason(reason).String())
		}
		m.skipped[reason].Add(float64(n))
	}
	*counts = wire.Counts{}
}

func (m *workerMetrics) replay(cause sequence.Cause) {
	m.all.replays.WithLabelValues(m.worker, cause.String()).Inc()
}

func (m *workerMetrics) gap(missed uint64) {
	m.gaps.Inc()
	m.missed.Add(float64(missed))
}

func (m *workerMetrics) reject(name string) {
	m.all.rejected.WithLabelValues(m.worker, name).Inc()
}

func (m *workerMetrics) refuse(r refusal) {
	m.all.refused.WithLabelValues(m.worker, r.String()).Inc()
}

func (m *workerMetrics) lastSeq(source int, rank uint32) prometheus.Gauge {
	return m.all.lastSeq.WithLabelValues(m.worker, strconv.Itoa(source), strconv.FormatUint(uint64(rank), 10))
}

// errorName is why a batch does not decode, as metrics label it.
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

package ingest

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/wire"
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
	snapshotsTotal
	snapshotsFailedTotal
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
	snapshotsTotal:       {"snapshots_total", "", "Snapshots of engines' caches that were used."},
	snapshotsFailedTotal: {"snapshots_failed_total", "", "Requests for snapshots of engines' caches that failed, or whose snapshot was of no use."},
	receiveDropsTotal:    {"receive_buffer_dropped_total", "", "Messages dropped because the receive buffer was full. They are requested from the replay socket. Messages to listeners have an empty worker label."},
	reorderDropsTotal:    {"reorder_buffer_dropped_total", "", "Live batches that did not fit into the reorder buffer. They are requested from the replay socket."},
	staleTotal:           {"stale_batches_total", "", "Live batches dropped because they are of an earlier incarnation or a closed connection. Without a replay socket they may count as lost, too."},
	conflictsTotal:       {"publisher_conflicts_total", "", "Conflicts: two publishers used the same topic and rank."},
}

// metrics are the metrics of one Ingest.
type metrics struct {
	registry          *prometheus.Registry // has all of them
	workers           *workerCollector
	listeners         *workerMetrics // of messages and connections of no worker
	publishers        *prometheus.GaugeVec
	replaysInProgress *prometheus.GaugeVec
	peersRejected     *prometheus.CounterVec
	suspended         prometheus.Gauge
	durations         prometheus.Histogram
}

func newMetrics(sources *sourceList) *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), workers: newWorkerCollector(sources)}
	m.registry.MustRegister(m.workers)
	m.listeners = m.workers.add("")
	factory := promauto.With(m.registry)
	gauge := func(name, help string) *prometheus.GaugeVec {
		return factory.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: name, Help: help,
		}, []string{"state"})
	}
	m.publishers = gauge("publishers", "Publishers, one for each source and dp rank, by state.")
	m.replaysInProgress = gauge("replays_in_progress",
		"Requests to replay sockets, by state: waiting for a slot, waiting for the first reply, being read, or for a snapshot.")
	m.peersRejected = factory.NewCounterVec(prometheus.CounterOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "peers_rejected_total",
		Help: "Peers of listeners that were disconnected because of what they sent or because of a limit, by reason.",
	}, []string{"reason"})
	m.suspended = factory.NewGauge(prometheus.GaugeOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "listeners_suspended",
		Help: "1 while engines that connect to listeners are refused, so that they connect to another server, and 0 otherwise.",
	})
	m.durations = factory.NewHistogram(prometheus.HistogramOpts{
		Namespace: metricsNamespace, Subsystem: metricsSubsystem, Name: "batch_duration_seconds",
		Help:    "Time from receiving a batch to its delivery, averaged over batches that were processed together.",
		Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12),
	})
	return m
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

// workerCollector exports the counters and the last seqs of workers. A worker's counters take a tenth
// of the memory of counters of package prometheus, which matters with thousands of workers.
type workerCollector struct {
	counters [numCounters]*prometheus.Desc
	// lastSeq and engineDelay are of each source at each dp rank.
	lastSeq, engineDelay *prometheus.Desc
	sources              *sourceList

	mu      sync.Mutex // guards workers
	workers map[string]*workerMetrics
}

func newWorkerCollector(sources *sourceList) *workerCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(metricsNamespace, metricsSubsystem, name), help, labels, nil)
	}
	c := &workerCollector{sources: sources, workers: make(map[string]*workerMetrics)}
	c.lastSeq = desc("last_seq", "Engine seq of the last batch.", "worker", "source", "dp_rank")
	c.engineDelay = desc("engine_delay_seconds",
		"Time from the engine's time of the last live batch to its receipt. Negative if the engine's clock is ahead; a constant offset is that of the clocks.",
		"worker", "source", "dp_rank")
	for i, o := range counterOpts {
		labels := []string{"worker", o.label}
		if o.label == "" {
			labels = labels[:1]
		}
		c.counters[i] = desc(o.name, o.help, labels...)
	}
	return c
}

func (c *workerCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.counters {
		ch <- d
	}
	ch <- c.lastSeq
	ch <- c.engineDelay
}

// Collect implements prometheus.Collector. It holds no mutex while it sends, so that a slow reader does not hold up delivery.
func (c *workerCollector) Collect(ch chan<- prometheus.Metric) {
	for _, e := range c.sources.all() {
		s := e.get()
		if !s.Started {
			continue
		}
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v,
				s.Worker, strconv.Itoa(e.source), strconv.FormatUint(uint64(s.Rank), 10))
		}
		gauge(c.lastSeq, float64(s.LastSeq))
		if s.HasEngineDelay {
			gauge(c.engineDelay, s.EngineDelay.Seconds())
		}
	}
	c.mu.Lock()
	workers := slices.Collect(maps.Values(c.workers))
	c.mu.Unlock()
	for _, w := range workers {
		w.collect(ch, &c.counters)
	}
}

// add adds a worker, whose name must be unique.
func (c *workerCollector) add(worker string) *workerMetrics {
	w := &workerMetrics{worker: worker, labeled: make(map[labeledCounter]uint64)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers[worker] = w
	return w
}

// remove removes a worker.
func (c *workerCollector) remove(worker string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.workers, worker)
}

// workerMetrics are the counters of one worker, or of what belongs to no worker. They are safe for concurrent use.
type workerMetrics struct {
	worker string // empty for no worker

	mu sync.Mutex // guards the fields below
	// counters are the counters without a label beside worker.
	counters [numCounters]uint64
	events   [len(eventNames)]uint64 // eventsTotal, by kind
	labeled  map[labeledCounter]uint64
}

// labeledCounter identifies a counter that has a label beside worker, other than eventsTotal.
type labeledCounter struct {
	id    counterID
	value string
}

// ofListeners are the counters without a label beside worker that listeners and replays use.
var ofListeners = [numCounters]bool{messagesTotal: true, connectionsTotal: true, disconnectionsTotal: true, receiveDropsTotal: true}

func (m *workerMetrics) collect(ch chan<- prometheus.Metric, descs *[numCounters]*prometheus.Desc) {
	m.mu.Lock()
	counters, events, labeled := m.counters, m.events, maps.Clone(m.labeled)
	m.mu.Unlock()
	for id, n := range counters {
		if counterOpts[id].label == "" && (m.worker != "" || ofListeners[id]) {
			ch <- prometheus.MustNewConstMetric(descs[id], prometheus.CounterValue, float64(n), m.worker)
		}
	}
	for kind, n := range events {
		if m.worker != "" && eventNames[kind] != "" {
			ch <- prometheus.MustNewConstMetric(descs[eventsTotal], prometheus.CounterValue, float64(n), m.worker, eventNames[kind])
		}
	}
	for l, n := range labeled {
		ch <- prometheus.MustNewConstMetric(descs[l.id], prometheus.CounterValue, float64(n), m.worker, l.value)
	}
}

// add adds n to a counter without a label beside worker.
func (m *workerMetrics) add(id counterID, n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counters[id] += n
}

// inc increments a counter without a label beside worker.
func (m *workerMetrics) inc(id counterID) { m.add(id, 1) }

// onDrop counts n messages of this worker that were dropped.
func (m *workerMetrics) onDrop(n int) { m.add(receiveDropsTotal, uint64(n)) }

// incLabeled increments a counter that has a label beside worker.
func (m *workerMetrics) incLabeled(id counterID, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.labeled[labeledCounter{id, value}]++
}

// batch counts a delivered batch. It adds the counts of Rules.Admit, and resets them.
func (m *workerMetrics) batch(events []wire.Event, counts *wire.Counts) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counters[batchesTotal]++
	for i := range events {
		m.events[events[i].Kind]++
	}
	if *counts == (wire.Counts{}) {
		return
	}
	for reason, n := range counts {
		if n > 0 {
			m.labeled[labeledCounter{skippedTotal, wire.Reason(reason).String()}] += n
		}
	}
	*counts = wire.Counts{}
}

// eventNames are the values of the label kind.
var eventNames = [...]string{wire.KindStored: "stored", wire.KindRemoved: "removed", wire.KindCleared: "cleared"}

// errorName returns the metric label for an error of wire.Decoder, or for transport.ErrTooLong.
func errorName(err error) string {
	var e wire.Error
	switch {
	case errors.As(err, &e):
		return e.Name()
	case errors.Is(err, transport.ErrTooLong):
		return refusedLength.String()
	}
	return "unknown"
}

package engineclient

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/ingest"
)

// Stats is the state of a Client. Counts begin at Start, and remain after Stop.
type Stats struct {
	// State is the state of the source; 0 before Start.
	State ingest.SourceState
	// Connected reports whether there is a connection. A connection that broke during a replay
	// counts until the replay has ended. A connection that seems to be dead does not count.
	Connected bool
	// Started reports whether a batch was read; LastSeq is the seq of the last batch.
	Started bool
	LastSeq uint64
	// WorkerStats counts what was read, without the calls of ReplayFrom.
	ingest.WorkerStats
	// ReplayFromDone counts the successful calls of ReplayFrom, and ReplayFromFailed the others.
	ReplayFromDone   uint64
	ReplayFromFailed uint64

	// Waiting is the number of events that wait for the handler.
	Waiting int
	// Handled counts the calls of the handler. HandlerErrors counts the calls that returned an error,
	// and HandlerPanics the calls that panicked. HandlerTime is the total time of the calls.
	Handled       uint64
	HandlerErrors uint64
	HandlerPanics uint64
	HandlerTime   time.Duration
	// HandledSeq is the seq of the last batch whose events were all handled. HandledAny reports
	// whether there is one. ReplayFrom(ctx, HandledSeq+1, h) reads the batches after it.
	HandledAny bool
	HandledSeq uint64
	// Discarded counts the events that were not handled because the Client was stopped.
	Discarded uint64
}

// Stats returns the state of the Client. It never waits for the handler.
func (c *Client) Stats() Stats {
	d := c.delivery
	s := Stats{
		ReplayFromDone:   c.replaysDone.Load(),
		ReplayFromFailed: c.replaysFailed.Load(),
		Waiting:          len(d.queue),
		Handled:          d.handled.Load(),
		HandlerErrors:    d.failed.Load(),
		HandlerPanics:    d.panicked.Load(),
		HandlerTime:      time.Duration(d.spent.Load()),
		HandledAny:       d.started.Load(),
		HandledSeq:       d.seq.Load(),
		Discarded:        d.discarded.Load(),
	}
	if r, _ := c.current(); r != nil { // the run may have ended
		source := r.source()
		s.State, s.Started, s.LastSeq = source.State, source.Started, source.LastSeq
		s.Connected = r.connected()
		s.WorkerStats, _ = r.in.Stats(c.config.Worker)
	}
	return s
}

// newMetrics returns a registry with the Client's own metrics, and creates the handler's histogram.
func (c *Client) newMetrics() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	named := prometheus.WrapRegistererWithPrefix("kvcast_client_", registry)
	factory := promauto.With(prometheus.WrapRegistererWith(prometheus.Labels{"worker": c.config.Worker}, named))
	d := c.delivery
	counter := func(name, help string, labels prometheus.Labels, value func() uint64) {
		factory.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels},
			func() float64 { return float64(value()) })
	}
	counter("events_handled_total", "Events handled.", nil, d.handled.Load)
	const failures = "Failures of the handler, by type."
	counter("handler_errors_total", failures, prometheus.Labels{"type": "error"}, d.failed.Load)
	counter("handler_errors_total", failures, prometheus.Labels{"type": "panic"}, d.panicked.Load)
	const replays = "Calls of ReplayFrom that ended, by result."
	counter("replays_total", replays, prometheus.Labels{"result": "done"}, c.replaysDone.Load)
	counter("replays_total", replays, prometheus.Labels{"result": "failed"}, c.replaysFailed.Load)
	factory.NewGaugeFunc(prometheus.GaugeOpts{Name: "events_waiting", Help: "Events that wait for the handler."},
		func() float64 { return float64(len(d.queue)) })
	factory.NewGaugeFunc(prometheus.GaugeOpts{Name: "connected", Help: "1 while there is a connection, else 0."},
		func() float64 {
			if c.Connected() {
				return 1
			}
			return 0
		})
	d.latency = factory.NewHistogram(prometheus.HistogramOpts{
		Name: "handler_seconds", Help: "Time of the handler for an event.",
		Buckets: prometheus.ExponentialBuckets(1e-6, 4, 12), // 1 µs to 4.2 s
	})
	return registry
}

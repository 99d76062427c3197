package engineclient

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
)

const (
	namespace = "kvcast"
	subsystem = "client"
)

// Stats is the state of a Client. Counts are since Start, and stay after Stop.
type Stats struct {
	// State is that of the source; 0 before Start.
	State ingest.SourceState
	// Connected reports whether there is a connection. One that broke during a replay
	// counts until the replay has ended; one that seems to be dead does not.
	Connected bool
	// Started reports whether a batch was read; LastSeq is that of the last.
	Started bool
	LastSeq uint64
	// WorkerStats are the counts of what was read. ReplayFrom does not count there.
	ingest.WorkerStats
	// ReplayFromDone and ReplayFromFailed count the calls of ReplayFrom that ended.
	ReplayFromDone   uint64
	ReplayFromFailed uint64

	// Waiting is how many events wait for the handler.
	Waiting int
	// Handled counts the calls of the handler; it returned an error in HandlerErrors of
	// them, and panicked in HandlerPanics. HandlerTime is the time of all.
	Handled       uint64
	HandlerErrors uint64
	HandlerPanics uint64
	HandlerTime   time.Duration
	// HandledSeq is the seq of the last batch of which all events were handled;
	// HandledAny reports whether there was one. ReplayFrom has what follows it.
	HandledAny bool
	HandledSeq uint64
	// Discarded counts the events that were not handled, as the Client was stopped.
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
	if r, _ := c.current(); r != nil { // also one that has ended
		source := r.source()
		s.State, s.Started, s.LastSeq = source.State, source.Started, source.LastSeq
		s.Connected = connected(source.State)
		s.WorkerStats = r.stats(c.config.Worker)
	}
	return s
}

// connected reports whether a source in this state has a connection.
func connected(s ingest.SourceState) bool {
	switch s {
	case ingest.SourceCatchingUp, ingest.SourceLive, ingest.SourceRepairing:
		return true
	default:
		return false
	}
}

// collectors returns the Client's own metrics.
func (c *Client) collectors() []prometheus.Collector {
	d := c.delivery
	labels := func(more ...string) prometheus.Labels {
		l := prometheus.Labels{"worker": c.config.Worker}
		if len(more) == 2 {
			l[more[0]] = more[1]
		}
		return l
	}
	counter := func(name, help string, l prometheus.Labels, value func() float64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, ConstLabels: l,
		}, value)
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: namespace, Subsystem: subsystem, Name: name, Help: help, ConstLabels: labels(),
		}, value)
	}
	const (
		failures = "Failures of the handler, by type."
		replays  = "Calls of ReplayFrom that ended, by result."
	)
	return []prometheus.Collector{
		counter("events_handled_total", "Events handled.", labels(),
			func() float64 { return float64(d.handled.Load()) }),
		counter("handler_errors_total", failures, labels("type", "error"),
			func() float64 { return float64(d.failed.Load()) }),
		counter("handler_errors_total", failures, labels("type", "panic"),
			func() float64 { return float64(d.panicked.Load()) }),
		d.latency,
		counter("replays_total", replays, labels("result", "done"),
			func() float64 { return float64(c.replaysDone.Load()) }),
		counter("replays_total", replays, labels("result", "failed"),
			func() float64 { return float64(c.replaysFailed.Load()) }),
		gauge("events_waiting", "Events that wait for the handler.",
			func() float64 { return float64(len(d.queue)) }),
		gauge("connected", "1 while there is a connection, else 0.", func() float64 {
			if c.Connected() {
				return 1
			}
			return 0
		}),
	}
}

// register registers the Client's own metrics, all or none.
func (c *Client) register() (unregister func(), err error) {
	user := c.config.Metrics
	if user == nil {
		return func() {}, nil
	}
	var done []prometheus.Collector
	unregister = func() {
		for _, m := range done {
			user.Unregister(m)
		}
	}
	for _, m := range c.collectors() {
		if err := user.Register(m); err != nil {
			unregister()
			return nil, fmt.Errorf("register metrics: %w", err)
		}
		done = append(done, m)
	}
	return unregister, nil
}

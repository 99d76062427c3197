package ingest

import (
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const clientSubsystem = "client"

// ClientStats is how a Client is doing. Counts are since Start, and stay after
// Stop.
type ClientStats struct {
	// State is how far the reading has come; 0 before Start.
	State SourceState
	// Connected tells that there is a connection. One that broke while batches are
	// fetched counts until that is over; one that seems to be dead does not.
	Connected bool
	// ConnectAttempts counts the attempts to connect, Connections those that
	// succeeded, ConnectFailures those that failed and are repeated. Disconnections
	// counts the connections that broke, or were closed by Reconnect.
	ConnectAttempts uint64
	Connections     uint64
	ConnectFailures uint64
	Disconnections  uint64

	// Started tells that a batch has been read; LastSeq is that of the last.
	Started bool
	LastSeq uint64
	// Messages counts those that came from the publisher, whatever they are. Replies
	// to replay requests are none of them.
	Messages uint64
	// Batches counts those received and taken, live and by replay, each once. Of
	// their events Stored, Removed and Cleared count those of each kind, Skipped
	// those left out.
	Batches uint64
	Stored  uint64
	Removed uint64
	Cleared uint64
	Skipped uint64
	// Duplicates counts batches that had come before, Rejected those that do not
	// decode, Refused messages that are no batch.
	Duplicates uint64
	Rejected   uint64
	Refused    uint64
	// Gaps counts runs of batches that are lost for good, Missed the batches.
	Gaps   uint64
	Missed uint64
	// Restarts counts the engine's new beginnings.
	Restarts uint64
	// Replays counts the replays asked for to repair what was missing, ReplaysDone
	// and ReplaysFailed those that came to an end, Replayed the batches they
	// brought. The calls of ReplayFrom are counted beside.
	Replays       uint64
	ReplaysDone   uint64
	ReplaysFailed uint64
	Replayed      uint64
	// ReplayFromDone and ReplayFromFailed count the calls of ReplayFrom that came to
	// an end.
	ReplayFromDone   uint64
	ReplayFromFailed uint64

	// Waiting is how many events wait for the handler now.
	Waiting int
	// Handled counts the events that the handler was called with, of which it
	// failed with an error or a panic for HandlerErrors and HandlerPanics.
	Handled       uint64
	HandlerErrors uint64
	HandlerPanics uint64
	// HandlerTime is how long it took in all.
	HandlerTime time.Duration
	// HandledSeq is the seq of the last batch whose events the handler was called
	// with, all of them; HandledAny tells that there was one. What comes after it
	// can be had from ReplayFrom.
	HandledAny bool
	HandledSeq uint64
	// Discarded counts the events that the handler was never called with, because
	// the Client was stopped.
	Discarded uint64
}

// Stats returns how the Client is doing. It never waits for the handler.
func (c *Client) Stats() ClientStats {
	d := c.delivery
	s := ClientStats{
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
	r, _ := c.current() // what has ended has counted too
	if r == nil {
		return s
	}
	source := r.source()
	s.State, s.Started, s.LastSeq = source.State, source.Started, source.LastSeq
	s.Connected = connected(source.State)
	n := r.registry.read()
	s.Connections, s.Disconnections = n["connections_total"], n["disconnections_total"]
	s.ConnectAttempts, s.ConnectFailures = n["connect_attempts_total"], n["connect_failures_total"]
	s.Messages = n["messages_total"]
	s.Batches, s.Skipped = n["batches_total"], n["events_skipped_total"]
	s.Stored, s.Removed, s.Cleared = n["events_total stored"], n["events_total removed"], n["events_total cleared"]
	s.Duplicates, s.Rejected, s.Refused = n["duplicates_total"], n["batches_rejected_total"], n["messages_refused_total"]
	s.Gaps, s.Missed, s.Restarts = n["gaps_total"], n["missed_batches_total"], n["restarts_total"]
	s.Replays, s.Replayed = n["replays_total"], n["replayed_batches_total"]
	s.ReplaysDone, s.ReplaysFailed = n["replays_done_total"], n["replays_failed_total"]
	return s
}

// connected tells whether a source in this state has a connection.
func connected(s SourceState) bool {
	switch s {
	case SourceCatchingUp, SourceLive, SourceRepairing:
		return true
	default:
		return false
	}
}

// clientRegistry is where the metrics of a Client's Ingest are registered: where
// the user wants them, until the Client ends, and for Stats to read.
type clientRegistry struct {
	own  *prometheus.Registry
	user prometheus.Registerer // nil where the user wants none
}

func newClientRegistry(c *ClientConfig) *clientRegistry {
	r := &clientRegistry{own: prometheus.NewRegistry()}
	if c.Metrics != nil {
		r.user = prometheus.WrapRegistererWith(prometheus.Labels{"client": c.Worker}, c.Metrics)
	}
	return r
}

// Register registers a collector.
func (r *clientRegistry) Register(c prometheus.Collector) error {
	if r.user != nil {
		if err := r.user.Register(c); err != nil {
			return err
		}
	}
	return r.own.Register(c)
}

// MustRegister registers collectors.
func (r *clientRegistry) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

// Unregister takes a collector from the user's metrics alone: Stats reads the others
// after Stop too.
func (r *clientRegistry) Unregister(c prometheus.Collector) bool {
	return r.user == nil || r.user.Unregister(c)
}

// read returns the counters' values, summed by name, and by name and kind where
// they have one.
func (r *clientRegistry) read() map[string]uint64 {
	const prefix = metricsNamespace + "_" + metricsSubsystem + "_"
	values := make(map[string]uint64)
	families, err := r.own.Gather()
	if err != nil {
		return values // can not be: they are a fixed set, which was registered
	}
	for _, f := range families {
		name := strings.TrimPrefix(f.GetName(), prefix)
		for _, m := range f.GetMetric() {
			n := uint64(m.GetCounter().GetValue())
			values[name] += n
			for _, l := range m.GetLabel() {
				if l.GetName() == "kind" {
					values[name+" "+l.GetValue()] += n
				}
			}
		}
	}
	return values
}

// collectors are the metrics that a Client has beside its Ingest's.
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
			Namespace: metricsNamespace, Subsystem: clientSubsystem, Name: name, Help: help, ConstLabels: l,
		}, value)
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: metricsNamespace, Subsystem: clientSubsystem, Name: name, Help: help, ConstLabels: labels(),
		}, value)
	}
	const (
		failures = "Events that the handler failed with, by type."
		replays  = "Replays asked for by the program, by result."
	)
	return []prometheus.Collector{
		counter("events_handled_total", "Events that the handler was called with.", labels(),
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

// register registers the Client's own metrics, all or none, and returns what
// unregisters them.
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

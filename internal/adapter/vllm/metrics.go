package vllm

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/internal/budget"
)

type metrics struct {
	batches   prometheus.Counter
	omitted   Omitted
	consumers prometheus.Gauge
	states    prometheus.Counter
	replays   prometheus.Counter
	missed    prometheus.Counter
	refused   prometheus.Counter
	restarts  prometheus.Counter
}

func newMetrics(e *Egress, registerer prometheus.Registerer) *metrics {
	create := promauto.With(registerer)
	counter := func(name, help string) prometheus.Counter {
		return create.NewCounter(prometheus.CounterOpts{Name: "kvcast_egress_" + name, Help: help})
	}
	m := &metrics{
		batches:   counter("batches_total", "Batches published in vLLM's format."),
		consumers: create.NewGauge(prometheus.GaugeOpts{Name: "kvcast_egress_consumers", Help: "Connections of consumers of vLLM's format, to PUB and replay sockets."}),
		states:    counter("states_total", "Times that all blocks of a dp rank were sent to a consumer, after its subscription or a replay request."),
		replays:   counter("replays_total", "Replay requests of consumers."),
		missed:    counter("missed_total", "Times that a consumer was too slow, and missed batches."),
		refused:   counter("refused_connections_total", "Connections of consumers that were closed because there are too many, of all or of their address."),
		restarts:  counter("restarts_total", "Times that all blocks were published anew, because egress was slower than the journal's retention."),
	}
	m.omitted = NewOmitted(registerer, "kvcast_egress_blocks_omitted_total")
	create.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvcast_egress_history_bytes", Help: "Memory of batches that are kept for consumers."}, func() float64 {
		e.mu.Lock()
		defer e.mu.Unlock()
		bytes := 0
		for _, p := range e.endpoints {
			bytes += p.history.bytes
		}
		return float64(bytes)
	})
	registerer.MustRegister(budget.Collector{e.memory})
	return m
}

// Omitted counts the blocks that streams omit, by reason.
type Omitted [numOmissions]prometheus.Counter

// NewOmitted registers a metric.
func NewOmitted(registerer prometheus.Registerer, name string) (o Omitted) {
	all := promauto.With(registerer).NewCounterVec(prometheus.CounterOpts{Name: name, Help: "Stored blocks that were not published, by reason."}, []string{"reason"})
	for reason, name := range omissionNames {
		o[reason] = all.WithLabelValues(name)
	}
	return o
}

// Count counts the blocks that a stream has omitted since the last call.
func (o *Omitted) Count(s *Stream) {
	for reason, n := range s.omitted {
		o[reason].Add(float64(n))
	}
	clear(s.omitted[:])
}

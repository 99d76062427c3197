package discovery

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the metrics of all watches, with their names as label.
type Metrics struct {
	failures                   *prometheus.CounterVec
	failing, workers, rejected *prometheus.GaugeVec
}

// NewMetrics registers the metrics.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	labels := []string{"discovery"}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	m := &Metrics{
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvcast_discovery_failures_total",
			Help: "Polls that failed: the name server, the file or the API server could not be read.",
		}, labels),
		failing:  gauge("kvcast_discovery_failing", "Whether the last poll failed. The workers found before stay."),
		workers:  gauge("kvcast_discovery_workers", "Workers that were found and added."),
		rejected: gauge("kvcast_discovery_rejected_workers", "Workers that were found and cannot be added or changed. The log has the reasons."),
	}
	registry.MustRegister(m.failures, m.failing, m.workers, m.rejected)
	return m
}

// polled records a poll of a watch, and its workers after the poll.
func (m *Metrics) polled(watch string, err error, workers, rejected int) {
	if m == nil {
		return
	}
	failing := 0.
	if err != nil {
		failing = 1
		m.failures.WithLabelValues(watch).Inc()
	} else {
		m.failures.WithLabelValues(watch) // starts at 0
	}
	m.failing.WithLabelValues(watch).Set(failing)
	m.workers.WithLabelValues(watch).Set(float64(workers))
	m.rejected.WithLabelValues(watch).Set(float64(rejected))
}

package serve

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/follow"
)

// buildInfo returns a metric that names the version.
func buildInfo() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvcast_build_info", Help: "Always 1; the labels have the versions of kvcast and Go.",
		ConstLabels: prometheus.Labels{"version": cli.Version(), "go_version": runtime.Version()},
	}, func() float64 { return 1 })
}

// newIndexMetrics registers the metrics of the follower, and returns the functions that it calls.
func newIndexMetrics(registry *prometheus.Registry, s *Service) follow.Delays {
	create := promauto.With(registry)
	create.NewGaugeFunc(
		prometheus.GaugeOpts{Name: "kvcast_index_behind_entries", Help: "Entries of the journal that are not applied to the index yet."},
		func() float64 {
			if s.cfg.Cluster.Ingest && !s.isAssembled() { // the index is behind by what is not recovered yet
				return 0
			}
			applied := s.follower.Bounds().Newest
			return float64(s.mode.Bounds().Newest - applied)
		})
	create.NewGaugeFunc(
		prometheus.GaugeOpts{Name: "kvcast_index_token_id_bytes", Help: "Memory of token ids that the index keeps."},
		func() float64 { return float64(s.follower.Index().TokenIDBytes()) })
	receipt := create.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvcast_index_delay_seconds",
		Help:    "Time from the receipt of a batch until subscribers can read its entry, of the oldest entry of those that are applied to the index together. Includes batch.timeout.",
		Buckets: prometheus.ExponentialBuckets(50e-6, 2, 16),
	})
	engine := create.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvcast_index_engine_delay_seconds",
		Help:    "Time from the engine's time of a batch until its entry is appended and subscribers can read it. 0 if the engine's clock is ahead.",
		Buckets: prometheus.ExponentialBuckets(500e-6, 2, 18), // 500 µs to 65 s
	})
	ahead := create.NewCounter(prometheus.CounterOpts{
		Name: "kvcast_index_engine_clock_ahead_total",
		Help: "Batches whose engine time is later than this machine's clock when their entry is appended. Their delay is observed as 0.",
	})
	return follow.Delays{
		Receipt: func(d time.Duration) { receipt.Observe(d.Seconds()) },
		Engine: func(d time.Duration) {
			if d < 0 {
				ahead.Inc()
				d = 0
			}
			engine.Observe(d.Seconds())
		},
	}
}

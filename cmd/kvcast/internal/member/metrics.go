package member

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics show what the instance has done. Those that show a state are read from the Member.
type metrics struct {
	takeovers        *prometheus.CounterVec // by reason
	takeoverTime     prometheus.Histogram
	releases, fenced prometheus.Counter
}

func newMetrics(m *Member, r prometheus.Registerer) *metrics {
	create := promauto.With(r)
	for _, live := range []bool{true, false} {
		state := "dead"
		if live {
			state = "live"
		}
		create.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvcast_cluster_instances", ConstLabels: prometheus.Labels{"state": state},
			Help: "Servers that share the journal, this one included, by state: live or dead. A dead one is counted for a minute after its last heartbeat.",
		}, func() float64 { return float64(m.count(live)) })
	}
	create.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvcast_cluster_workers", Help: "Workers that this server ingests.",
	}, func() float64 {
		m.mu.Lock()
		defer m.mu.Unlock()
		return float64(len(m.claims.seqs))
	})
	indicator := func(name, help string, is func() bool) {
		create.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			m.mu.Lock()
			defer m.mu.Unlock()
			if is() {
				return 1
			}
			return 0
		})
	}
	indicator("kvcast_cluster_isolated",
		"1 while this server's own heartbeats do not come back, so that it takes no workers, and 0 otherwise.", m.machine.Isolated)
	indicator("kvcast_cluster_cut_off",
		"1 while this server reaches no engine and another server does, so that the others read the engines, and 0 otherwise.", m.machine.CutOff)
	return &metrics{
		takeovers: create.NewCounterVec(prometheus.CounterOpts{
			Name: "kvcast_cluster_takeovers_total", Help: "Workers that this server has taken, by the reason.",
		}, []string{"reason"}),
		takeoverTime: create.NewHistogram(prometheus.HistogramOpts{
			Name:    "kvcast_cluster_takeover_seconds",
			Help:    "Time from the decision to take a worker until its recovery is done and its engines are read again.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 2, 15),
		}),
		releases: create.NewCounter(prometheus.CounterOpts{
			Name: "kvcast_cluster_releases_total", Help: "Workers that this server has handed over or removed.",
		}),
		fenced: create.NewCounter(prometheus.CounterOpts{
			Name: "kvcast_cluster_fenced_total", Help: "Workers whose appends were refused, because another server had taken them.",
		}),
	}
}

// count returns the number of the live or the dead instances.
func (m *Member) count(live bool) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.machine.Instances() {
		if i.Live == live {
			n++
		}
	}
	return n
}

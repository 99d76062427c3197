package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
)

// metrics are the server's own, over all subscribers.
type metrics struct {
	responses prometheus.Counter
	entries   prometheus.Counter
	bytes     prometheus.Counter
	progress  prometheus.Counter
	panics    prometheus.Counter
	stalled   prometheus.Counter
	late      prometheus.Counter
}

func newMetrics(r prometheus.Registerer, s *Server) (*metrics, error) {
	m := &metrics{
		responses: serverCounter("responses_sent_total", "Responses with entries sent to subscribers."),
		entries:   serverCounter("entries_sent_total", "Entries sent to subscribers."),
		bytes:     serverCounter("entry_bytes_sent_total", "Bytes of entries sent to subscribers."),
		progress:  serverCounter("progress_sent_total", "Progress messages sent to subscribers."),
		stalled:   serverCounter("stalled_total", "Streams ended because their client read nothing for too long, or a snapshot too slowly."),
		late:      serverCounter("late_requests_total", "Calls canceled because their request did not arrive in time."),
		panics:    serverCounter("panics_total", "Calls ended by a panic, each with its stack in the log."),
	}
	gauges := []prometheus.Collector{
		budget.Collector{s.conns.limit.all, s.watches.all, s.reflections.all, s.filterBytes},
		s.conns.limit.refused, s.watches.refused, s.reflections.refused,
		serverGauge("arriving_requests", "Calls whose request is arriving.", func() float64 { return float64(len(s.arriving)) }),
		serverGauge("subscribers", "Subscribe streams open.", func() float64 { return float64(s.subscribers.count()) }),
		serverGauge("snapshots", "Snapshots being sent.", func() float64 {
			taken, _ := s.snapshots.count()
			return float64(taken)
		}),
		serverGauge("snapshots_waiting", "Snapshots waiting for their turn.", func() float64 {
			_, waiting := s.snapshots.count()
			return float64(waiting)
		}),
		serverGauge("journal_bytes", "Bytes that the entries retained take.", func() float64 { return float64(s.journal.Bytes()) }),
		serverGauge("journal_retained_bytes", "Bytes of entries that the journal has let go of and that are still in memory, most of them because slow subscribers hold them.", func() float64 { return float64(s.journal.Retained()) }),
		serverGauge("journal_oldest_seq", "Seq of the oldest entry retained.", func() float64 { return float64(s.journal.Bounds().Oldest) }),
		serverGauge("journal_newest_seq", "Seq of the newest entry.", func() float64 { return float64(s.journal.Bounds().Newest) }),
	}
	for _, q := range []*queryLimiter{s.tokensLookups, s.blockLookups, s.workersQueries} {
		gauges = append(gauges, q.metrics()...)
	}
	for _, c := range append(gauges, m.responses, m.entries, m.bytes, m.progress, m.panics, m.stalled, m.late) {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func serverCounter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kvcast", Subsystem: "server", Name: name, Help: help})
}

func serverGauge(name, help string, f func() float64) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "kvcast", Subsystem: "server", Name: name, Help: help}, f)
}

func (m *metrics) sent(c journal.Chunk) {
	m.responses.Inc()
	m.entries.Add(float64(c.Entries))
	m.bytes.Add(float64(c.Bytes))
}

package server

import (
	"fmt"
	"net/http"
	_ "net/http/pprof" // registers /debug/pprof/ with http.DefaultServeMux

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// NewAdmin returns the handler of the admin port: /metrics, /healthz (the process runs), /readyz (the server
// accepts subscribers) and /debug/pprof/. It needs no credentials, so clients must not be able to reach it.
func (s *Server) NewAdmin(metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case s.stopping.Load():
			http.Error(w, "shutting down", http.StatusServiceUnavailable)
		case !s.started.Load():
			http.Error(w, "starting", http.StatusServiceUnavailable)
		default:
			_, _ = fmt.Fprintln(w, "ok")
		}
	})
	mux.Handle("GET /debug/pprof/", http.DefaultServeMux)
	return mux
}

// metrics are the counters over all calls.
type metrics struct {
	responses prometheus.Counter
	entries   prometheus.Counter
	bytes     prometheus.Counter
	progress  prometheus.Counter
	panics    prometheus.Counter
	stalled   prometheus.Counter
	late      prometheus.Counter
}

// newMetrics registers the server's metrics, except for those of its limiters and quotas.
func (s *Server) newMetrics(all promauto.Factory) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return all.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string, value func() float64) {
		all.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	gauge("receiving_requests", "Calls whose request is being received.", func() float64 { return float64(len(s.receiving)) })
	gauge("subscribers", "Open Subscribe streams.", func() float64 { return float64(s.subscribers.inUse()) })
	gauge("snapshots", "Snapshots being sent.", func() float64 { return float64(s.snapshots.inUse()) })
	gauge("snapshots_waiting", "Snapshots waiting for a slot.", func() float64 { return float64(s.snapshots.waiting()) })
	gauge("journal_bytes", "Bytes of the retained entries.", func() float64 { return float64(s.journal.Bytes()) })
	gauge("journal_evicted_bytes", "Bytes of evicted entries still in memory, mostly because slow subscribers reference them.",
		func() float64 { return float64(s.journal.EvictedBytes()) })
	gauge("journal_oldest_seq", "Seq of the oldest retained entry.", func() float64 { return float64(s.journal.Bounds().Oldest) })
	gauge("journal_newest_seq", "Seq of the newest entry.", func() float64 { return float64(s.journal.Bounds().Newest) })
	return &metrics{
		responses: counter("responses_sent_total", "Responses with entries sent to subscribers."),
		entries:   counter("entries_sent_total", "Entries sent to subscribers."),
		bytes:     counter("entry_bytes_sent_total", "Bytes of entries sent to subscribers."),
		progress:  counter("progress_sent_total", "Progress messages sent to subscribers."),
		stalled:   counter("stalled_streams_total", "Streams ended because the client did not read, or read a snapshot too slowly."),
		late:      counter("late_requests_total", "Calls canceled because their request was not received in time."),
		panics:    counter("panics_total", "Calls ended by a panic; the log has the stack."),
	}
}

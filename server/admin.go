package server

import (
	"fmt"
	"net/http"
	_ "net/http/pprof" // registers /debug/pprof/ with http.DefaultServeMux

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// NewAdmin returns the handler of the admin port: /metrics, /healthz (the process runs), /readyz (the server
// accepts subscribers, and the journal appends) and /debug/pprof/. It needs no credentials, so clients must not be able to reach it.
func (s *Server) NewAdmin(metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.Unready(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /debug/pprof/", http.DefaultServeMux)
	return mux
}

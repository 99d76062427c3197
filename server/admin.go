package server

import (
	"fmt"
	"net/http"
	_ "net/http/pprof" // registers /debug/pprof/ with http.DefaultServeMux
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvcast/kvcast/internal/budget"
)

// NewAdmin returns the handler of the admin port: /metrics, /healthz (the process runs), /readyz (the server
// accepts subscribers, and the journal appends) and /debug/pprof/. It needs no credentials, so clients must not be able to reach it.
func (s *Server) NewAdmin(metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", inTurns(maxScrapes, promhttp.HandlerFor(metrics, promhttp.HandlerOpts{})))
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
	mux.Handle("GET /debug/pprof/", inTurns(maxProfiles, http.DefaultServeMux))
	return mux
}

const (
	// maxScrapes and maxProfiles bound the scrapes and the profiles in progress, of which an address has one: each takes memory and CPU time, and some profiles
	// stop the program for a moment. maxAdminWaiting bounds those that wait.
	maxScrapes      = 4
	maxProfiles     = 2
	maxAdminWaiting = 64
	// adminWriteTimeout is how long a client may read nothing. What is recorded of a trace meanwhile stays in memory.
	adminWriteTimeout = 10 * time.Second
)

// inTurns returns a handler of so many requests at a time, for which addresses take turns.
func inTurns(n int64, next http.Handler) http.Handler {
	turns := budget.NewShares(budget.New("", n), 1).LimitWaiting(maxAdminWaiting)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		address := budget.ClientOf(r.RemoteAddr)
		if err := turns.Acquire(r.Context(), address, 1); err != nil {
			http.Error(w, "too many requests wait; try again later", http.StatusServiceUnavailable)
			return
		}
		defer turns.Release(address, 1)
		next.ServeHTTP(&readWriter{w, http.NewResponseController(w)}, r)
	})
}

// readWriter is an answer that its client must read.
type readWriter struct {
	http.ResponseWriter
	control *http.ResponseController
}

func (w *readWriter) Write(b []byte) (int, error) {
	_ = w.control.SetWriteDeadline(time.Now().Add(adminWriteTimeout)) // without one, a recorder in a test
	return w.ResponseWriter.Write(b)
}

// Unwrap returns the answer to http.ResponseController.
func (w *readWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

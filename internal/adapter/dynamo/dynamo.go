// Package dynamo answers the queries of Dynamo's routers over HTTP, as Dynamo's standalone KV indexer does.
//
// In: requests with tokens or tokens hashes of a prompt, and an index. Out: for each worker and dp rank the prefix that it
// holds. Guarantee: an answer is exact at one seq of the index. Requests in progress are limited, and so are connections and the memory
// of bodies and answers, of which one address can use half.
//
// The requests and answers are those of crate dynamo-kv-router 1.6. A routing group is a value of a worker's label. kvcast
// itself reads engines, so the paths by which engines are registered with Dynamo's indexer do not exist.
package dynamo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/loglimit"
)

const (
	// maxBodyBytes is the size of the largest body, as in Dynamo's indexer: a million tokens in JSON.
	maxBodyBytes = 8 << 20
	// maxElements bounds the commas of a body: its tokens or hashes.
	maxElements = 1 << 20
	// maxReading is the memory of bodies that are being received, and maxSending that of answers that are being sent, of each of which one address may use
	// half. maxConnections is the number of connections, of which one address may have an eighth.
	maxReading     = 128 << 20
	maxSending     = 64 << 20
	maxConnections = 1024
	// maxRequests is how many requests are decoded and answered at a time, and maxDumps how many dumps. One address may have half of them. Others wait
	// for maxWait, which is less than the time limit of Dynamo's clients, and addresses take turns.
	maxRequests = 16
	maxDumps    = 2
	maxWait     = 3 * time.Second
	// dumpTimeout bounds the time to send a dump, of which dumpPace bytes must be read in each writeTimeout.
	dumpTimeout = 5 * time.Minute
	dumpPace    = 8 << 20

	readHeaderTimeout = 5 * time.Second
	readTimeout       = 10 * time.Second
	writeTimeout      = 30 * time.Second // from the end of the header
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 16 << 10
)

// Config configures a handler.
type Config struct {
	// WorkerIDs are the ids of workers, by name, that have no label WorkerIDLabel.
	WorkerIDs map[string]uint64
	// WorkerIDLabel is the label with a worker's id, and GroupLabel the label with its routing group, which is
	// DefaultGroup for a worker without the label. Empty: none.
	WorkerIDLabel, GroupLabel string
	// Ready returns why requests cannot be answered yet; empty if they can.
	Ready func() string
	// Authorize returns a handler that refuses requests without credentials.
	Authorize func(http.Handler) http.Handler
	Logger    *slog.Logger
	// Registerer receives the metrics.
	Registerer prometheus.Registerer
}

// DefaultGroup is the routing group of requests and workers without one.
const DefaultGroup = "default"

// handler answers requests.
type handler struct {
	cfg      Config
	index    *index.Index
	requests *budget.Shares
	dumps    *budget.Shares
	reading  *budget.Shares
	sending  *budget.Shares
	unknown  loglimit.Keys // names of workers without an id
	shared   loglimit.Keys // ids of several workers
}

// NewServer returns an HTTP server of an index.
func NewServer(c Config, x *index.Index) *http.Server {
	return &http.Server{
		Handler: NewHandler(c, x), ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout,
		WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes, ErrorLog: log.New(loglimit.Writer(c.Logger, slog.LevelDebug, "HTTP server"), "", 0),
	}
}

// NewHandler returns a handler of requests.
func NewHandler(c Config, x *index.Index) http.Handler {
	reading := budget.New("dynamo_request_bytes", maxReading)
	sending := budget.New("dynamo_answer_bytes", maxSending)
	c.Registerer.MustRegister(budget.Collector{reading, sending})
	h := &handler{
		cfg: c, index: x, requests: budget.NewShares(budget.New("", maxRequests), maxRequests/2), dumps: budget.NewShares(budget.New("", maxDumps), maxDumps/2),
		reading: budget.NewShares(reading, maxReading/2), sending: budget.NewShares(sending, maxSending/2),
	}
	protected := http.NewServeMux()
	protected.HandleFunc("POST /query", h.limited(h.requests, h.buffered(h.query)))
	protected.HandleFunc("POST /query_by_hash", h.limited(h.requests, h.buffered(h.queryByHash)))
	protected.HandleFunc("POST /query_tiered_by_hash", h.limited(h.requests, h.buffered(h.queryTieredByHash)))
	protected.HandleFunc("GET /workers", h.limited(h.requests, h.buffered(h.workers)))
	protected.HandleFunc("GET /dump", h.limited(h.dumps, func(w http.ResponseWriter, r *http.Request) (send func()) {
		h.dump(w, r)
		return nil
	}))
	for _, path := range []string{"/register", "/unregister", "/register_peer", "/deregister_peer"} {
		protected.HandleFunc("POST "+path, func(w http.ResponseWriter, _ *http.Request) {
			writeError(w, http.StatusNotFound, "kvcast reads the engines of its own configuration: add workers to that, or register them by gRPC")
		})
	}
	mux := http.NewServeMux()
	mux.Handle("/", c.Authorize(protected))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { // probes have no credentials
		if why := c.Ready(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
		}
	})
	return mux
}

// limited returns a handler function that receives the body, and waits until fewer requests than a limit are in progress. So
// clients that send slowly do not delay others, nor do those that read slowly what next returns to be sent afterwards.
func (h *handler) limited(limit *budget.Shares, next func(http.ResponseWriter, *http.Request) (send func())) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if why := h.cfg.Ready(); why != "" {
			writeError(w, http.StatusServiceUnavailable, "kvcast does not know the engines' caches: "+why)
			return
		}
		if send := h.answer(limit, next, w, r); send != nil {
			send()
		}
	}
}

func (h *handler) answer(limit *budget.Shares, next func(http.ResponseWriter, *http.Request) (send func()), w http.ResponseWriter, r *http.Request) (send func()) {
	address := budget.ClientOf(r.RemoteAddr)
	body, err := h.receive(w, r)
	defer func() { h.reading.Release(address, int64(cap(body))) }()
	if err != nil {
		return func() { writeFailure(w, err) }
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	waiting, cancel := context.WithTimeout(r.Context(), maxWait)
	defer cancel()
	if limit.Acquire(waiting, address, 1) != nil {
		return func() { writeError(w, http.StatusServiceUnavailable, "too many requests are in progress: try again") }
	}
	defer limit.Release(address, 1)
	return next(w, r)
}

// buffered returns a function that returns how to send what a handler answers.
func (h *handler) buffered(next http.HandlerFunc) func(http.ResponseWriter, *http.Request) (send func()) {
	return func(w http.ResponseWriter, r *http.Request) (send func()) {
		answer := &answer{ResponseWriter: w, status: http.StatusOK}
		next(answer, r)
		address, size := budget.ClientOf(r.RemoteAddr), int64(answer.body.Len())
		if h.sending.Reserve(address, size) != nil {
			return func() {
				writeError(w, http.StatusServiceUnavailable, "the answers that are being sent take all memory for that: read faster, or try again")
			}
		}
		return func() {
			defer h.sending.Release(address, size)
			w.WriteHeader(answer.status)
			_, _ = w.Write(answer.body.Bytes()) // fails if the client has disconnected
		}
	}
}

// answer is an answer that is sent later, except for its header fields.
type answer struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (a *answer) WriteHeader(status int) { a.status = status }

func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

// failure is an error with the status of its answer.
type failure struct {
	status int
	err    error
}

func (f *failure) Error() string { return f.err.Error() }

func failf(status int, format string, args ...any) error {
	return &failure{status, fmt.Errorf(format, args...)}
}

func writeFailure(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	if f := new(failure); errors.As(err, &f) {
		status = f.status
	}
	writeError(w, status, err.Error())
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]string{"error": message})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // fails if the client has disconnected
}

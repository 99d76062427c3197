// Package console serves a web page on the admin port that shows the fleet's cache.
//
// In: calls of a browser. Out: static files, the answers of the server's RPCs as JSON, and a stream of those that the page
// shows all the time. Guarantee: it shows what the RPCs answer, and computes nothing that they do not; it costs nothing while
// no page is open, and pages share one poll of the server. Its callers need what callers of the RPCs need, unless the port is
// on loopback.
package console

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/server"
)

const (
	// MaxPages is the maximum number of open streams.
	MaxPages = 32
	// maxCalls is the maximum number of calls in progress, from when a request is received until its answer is encoded.
	maxCalls = 16
	// maxRequestBytes is the maximum size of a request, and readTimeout the time for it. A prompt of the largest size that
	// MatchPrefix accepts fits.
	maxRequestBytes = 4 << 20
	readTimeout     = 10 * time.Second
	// maxObjects is the maximum number of JSON objects in a request. One of two bytes takes a hundred times as much when it is
	// decoded. The largest request has 64 prompts.
	maxObjects = 256
	// answerTimeout is the time to write an answer, and maxAnswerBytes the size of all answers that are being written.
	answerTimeout  = 30 * time.Second
	maxAnswerBytes = 64 << 20
	// Of calls and answers, an address may have three quarters.
	maxCallsPerAddress       = maxCalls * 3 / 4
	maxAnswerBytesPerAddress = maxAnswerBytes * 3 / 4
)

// Caller answers unary calls, as server.Server does.
type Caller interface {
	Call(ctx context.Context, method string, caller server.Caller, decode func(proto.Message) error) (proto.Message, error)
}

// Config configures a Console.
type Config struct {
	Server Caller
	// Loopback says that the port is on loopback: callers need no token, unless a proxy has forwarded the request.
	Loopback bool
	// About describes the gRPC port, for commands that the page shows.
	About About
	// Registerer gets the metrics of the memory for answers; nil: they are not exported.
	Registerer prometheus.Registerer
}

// About is what a client of the gRPC port needs to know.
type About struct {
	// GRPC is the address at which it listens. It may be a wildcard.
	GRPC string `json:"grpc"`
	// TLS reports whether it has TLS, and Token whether calls need a token.
	TLS   bool `json:"tls"`
	Token bool `json:"token"`
}

// Console serves the page. New makes one.
type Console struct {
	cfg    Config
	mux    *http.ServeMux
	origin *http.CrossOriginProtection
	calls  *budget.Shares // in progress
	// answers are bytes that are being written.
	answers *budget.Shares
	hub     *hub
}

// New returns a Console. The caller closes it when no request is served any more.
func New(cfg Config) *Console {
	answers := budget.New("console_answer_bytes", maxAnswerBytes)
	c := &Console{
		cfg: cfg, mux: http.NewServeMux(), origin: http.NewCrossOriginProtection(),
		calls: budget.NewShares(budget.New("", maxCalls), maxCallsPerAddress), answers: budget.NewShares(answers, maxAnswerBytesPerAddress),
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(budget.Collector{answers})
	}
	c.hub = newHub(cfg)
	files := newFiles()
	c.mux.Handle("GET /{$}", files["index.html"])
	c.mux.HandleFunc("GET /console/{file}", func(w http.ResponseWriter, r *http.Request) {
		if f := files[r.PathValue("file")]; f != nil {
			f.ServeHTTP(w, r)
			return
		}
		http.NotFound(w, r)
	})
	c.mux.HandleFunc("POST /console/rpc/{service}/{method}", c.rpc)
	c.mux.HandleFunc("POST /console/stream", c.stream)
	return c
}

// Register adds the paths of the console to those of the admin port: / and /console/.
func (c *Console) Register(mux *http.ServeMux) {
	mux.Handle("GET /{$}", c)
	mux.Handle("/console/", c)
}

// ServeHTTP implements http.Handler.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	setSecurityHeaders(w.Header())
	if r.Method == http.MethodPost { // also for a body that nobody reads, of a request that is refused
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(readTimeout))
	}
	if message := RefuseHost(r.Host, c.cfg.Loopback, c.cfg.About.Token); message != "" {
		writeError(w, http.StatusMisdirectedRequest, problem{Code: "misdirected_request", Message: message})
		return
	}
	if err := c.origin.Check(r); err != nil {
		writeError(w, http.StatusForbidden, problem{Code: "cross_origin", Message: "another site may not call the console"})
		return
	}
	c.mux.ServeHTTP(w, r)
}

// Close stops what the streams have started, and waits for them. Their requests must have ended, or be about to end.
func (c *Console) Close() { c.hub.close() }

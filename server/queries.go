package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
)

// Bounds of queries: unary calls that walk the workers, beside ingest and on the same
// cores. A lookup of tokens hashes reads every block of every worker that its filter
// takes, so that one at a time is what a machine of few cores can spare.
const (
	maxTokensLookups  = 1
	maxBlockLookups   = 4
	maxWorkersQueries = 2 // ListWorkers and GetStatus
	// maxQueriesWaiting is how many of a kind may wait for their turn, and queryWait
	// for how long.
	maxQueriesWaiting = 64
	queryWait         = 5 * time.Second
)

// maxResponse is what clients of gRPC take by default. What is larger, they would
// receive and discard.
const maxResponse = 4 << 20

// queryLimiter bounds the queries of a kind.
type queryLimiter struct {
	places
	kind    string
	refused prometheus.Counter
}

func newQueryLimiter(kind string, limit int) *queryLimiter {
	return &queryLimiter{
		kind:   kind,
		places: places{limit: limit, line: maxQueriesWaiting, wait: queryWait},
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kvcast", Subsystem: "server", Name: "queries_refused_total",
			Help:        "Queries refused because too many of their kind were running and waiting, or they had waited for too long.",
			ConstLabels: prometheus.Labels{"kind": kind},
		}),
	}
}

// metrics are those of the limiter.
func (q *queryLimiter) metrics() []prometheus.Collector {
	gauge := func(name, help string, value func() int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "kvcast", Subsystem: "server", Name: name, Help: help, ConstLabels: prometheus.Labels{"kind": q.kind},
		}, func() float64 { return float64(value()) })
	}
	return []prometheus.Collector{
		q.refused,
		gauge("queries_running", "Queries running, by kind.", func() int { taken, _ := q.count(); return taken }),
		gauge("queries_waiting", "Queries waiting for their turn, by kind.", func() int { _, waiting := q.count(); return waiting }),
	}
}

// turn waits until a query may run. Where the error is nil, leave ends its turn.
func (q *queryLimiter) turn(ctx context.Context, b journal.Bounds) error {
	err := q.enter(ctx, nil, 2*q.wait, func() error { return nil }) // nobody to tell that the query waits
	switch {
	case errors.Is(err, errNoPlace):
		q.refused.Inc()
		return errTooManyQueries(q.limit, fmt.Sprintf("none has come to its end within %v", q.wait), b)
	case errors.Is(err, errLineFull):
		q.refused.Inc()
		return errTooManyQueries(q.limit, fmt.Sprintf("%d more are waiting", q.line), b)
	case err != nil:
		return status.FromContextError(err).Err()
	}
	return nil
}

// fits tells whether clients take a response.
func fits(m proto.Message) bool { return proto.Size(m) <= maxResponse }

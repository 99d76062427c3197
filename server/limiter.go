package server

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/journal"
)

var (
	errQueueFull   = errors.New("the wait queue is full")
	errWaitTimeout = errors.New("no slot was released in time")

	errAddressQuota = errors.New("the quota of the address is used up")
	errTotalQuota   = errors.New("the total quota is used up")
)

// limiter is a FIFO semaphore with a bounded wait queue. When the queue is full, or a
// caller has waited for maxWait, acquire fails.
type limiter struct {
	capacity   int
	maxWaiting int
	maxWait    time.Duration

	slots   *semaphore.Weighted
	inUse   atomic.Int64
	waiting atomic.Int64
}

func newLimiter(capacity, maxWaiting int, maxWait time.Duration) *limiter {
	return &limiter{capacity: capacity, maxWaiting: maxWaiting, maxWait: maxWait, slots: semaphore.NewWeighted(int64(capacity))}
}

// tryAcquire acquires a slot if one is free and reports whether it did.
func (l *limiter) tryAcquire() bool {
	ok := l.slots.TryAcquire(1)
	if ok {
		l.inUse.Add(1)
	}
	return ok
}

// acquire waits for a slot. The error is errQueueFull, errWaitTimeout or the cause of
// the context's end. A free slot is acquired even if the context has ended.
func (l *limiter) acquire(ctx context.Context) error {
	if l.tryAcquire() {
		return nil
	}
	defer l.waiting.Add(-1)
	if l.waiting.Add(1) > int64(l.maxWaiting) {
		return errQueueFull
	}
	ctx, cancel := context.WithTimeoutCause(ctx, l.maxWait, errWaitTimeout)
	defer cancel()
	if l.slots.Acquire(ctx, 1) != nil {
		return context.Cause(ctx)
	}
	l.inUse.Add(1)
	return nil
}

// release returns a slot. The first in the queue gets it.
func (l *limiter) release() {
	l.inUse.Add(-1)
	l.slots.Release(1)
}

// refusal describes errQueueFull and errWaitTimeout to a client; ok is false for other errors.
func (l *limiter) refusal(err error) (description string, ok bool) {
	switch {
	case errors.Is(err, errQueueFull):
		return fmt.Sprintf("%d more are waiting", l.maxWaiting), true
	case errors.Is(err, errWaitTimeout):
		return fmt.Sprintf("none has ended within %v", l.maxWait), true
	}
	return "", false
}

// Limits of queries: unary calls that read all workers' tables, which competes with ingest. A lookup by tokens
// hash reads every block of every worker that the filter selects, so only one runs at a time.
const (
	maxTokensLookups  = 1
	maxBlockLookups   = 4
	maxWorkersQueries = 2 // ListWorkers and GetStatus
	maxQueriesWaiting = 64
	maxQueryWait      = 5 * time.Second
)

// queryLimiter limits the queries of one kind.
type queryLimiter struct {
	*limiter
	kind    string
	refused prometheus.Counter
}

func newQueryLimiter(kind string, capacity int) *queryLimiter {
	return &queryLimiter{
		limiter: newLimiter(capacity, maxQueriesWaiting, maxQueryWait),
		kind:    kind,
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kvcast", Subsystem: "server", Name: "queries_refused_total",
			Help:        "Queries refused because the wait queue was full or the wait timed out, by kind.",
			ConstLabels: prometheus.Labels{"kind": kind},
		}),
	}
}

// acquire waits until a query may run, or returns the client's error.
func (q *queryLimiter) acquire(ctx context.Context, b journal.Bounds) error {
	err := q.limiter.acquire(ctx)
	if err == nil {
		return nil
	}
	if why, ok := q.refusal(err); ok {
		q.refused.Inc()
		return errorf(ReasonTooManyQueries, b, "%d queries of this kind are running, which is the limit, and %s; try again later", q.capacity, why)
	}
	return status.FromContextError(ctx.Err()).Err()
}

// collectors returns the limiter's metrics.
func (q *queryLimiter) collectors() []prometheus.Collector {
	gauge := func(name, help string, value *atomic.Int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "kvcast", Subsystem: "server", Name: name, Help: help, ConstLabels: prometheus.Labels{"kind": q.kind},
		}, func() float64 { return float64(value.Load()) })
	}
	return []prometheus.Collector{
		q.refused,
		gauge("queries_running", "Queries running, by kind.", &q.inUse),
		gauge("queries_waiting", "Queries waiting for a slot, by kind.", &q.waiting),
	}
}

// quota bounds how many instances of a resource all client addresses use, and each.
type quota struct {
	total      *budget.Budget
	perAddress int64
	refused    prometheus.Counter // because of perAddress; the budget counts the others
}

func newQuota(resource string, total, perAddress int) *quota {
	return &quota{
		total:      budget.New(resource, int64(total)),
		perAddress: int64(perAddress),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "kvcast", Subsystem: "server", Name: "address_refused_total",
			Help:        "Requests for a resource that were refused because the quota of the client's address was used up, by resource.",
			ConstLabels: prometheus.Labels{"resource": resource},
		}),
	}
}

// acquire takes one instance, for an address that uses inUse of them. The error is
// errAddressQuota or errTotalQuota.
func (q *quota) acquire(inUse *atomic.Int64) error {
	if inUse.Add(1) > q.perAddress {
		inUse.Add(-1)
		q.refused.Inc()
		return errAddressQuota
	}
	if !q.total.Take(1) {
		inUse.Add(-1)
		return errTotalQuota
	}
	return nil
}

// release returns what acquire took.
func (q *quota) release(inUse *atomic.Int64) {
	q.total.Release(1)
	inUse.Add(-1)
}

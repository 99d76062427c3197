package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

var (
	errQueueFull   = errors.New("the wait queue is full")
	errWaitTimeout = errors.New("no slot was released in time")

	errAddressQuota = errors.New("the quota of the address is used up")
	errTotalQuota   = errors.New("the total quota is used up")
)

// limiter is a FIFO semaphore with a bounded wait queue: acquire fails if the queue is full, or after maxWait.
// Blocked senders of a Go channel are served in FIFO order.
type limiter struct {
	slots      chan struct{} // one element per slot in use
	maxWaiting int
	maxWait    time.Duration
	queued     atomic.Int64
}

func newLimiter(capacity, maxWaiting int, maxWait time.Duration) *limiter {
	return &limiter{slots: make(chan struct{}, capacity), maxWaiting: maxWaiting, maxWait: maxWait}
}

func (l *limiter) inUse() int { return len(l.slots) }

func (l *limiter) waiting() int { return int(l.queued.Load()) }

// tryAcquire acquires a slot and reports whether one was free.
func (l *limiter) tryAcquire() bool {
	select {
	case l.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// acquire waits for a slot. The error is errQueueFull, errWaitTimeout or the cause of
// the context's end. A free slot is acquired even if the context has ended.
func (l *limiter) acquire(ctx context.Context) error {
	if l.tryAcquire() {
		return nil
	}
	defer l.queued.Add(-1)
	if l.queued.Add(1) > int64(l.maxWaiting) {
		return errQueueFull
	}
	select {
	case l.slots <- struct{}{}:
		return nil
	case <-time.After(l.maxWait):
		return errWaitTimeout
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (l *limiter) release() { <-l.slots }

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

// Limits of queries: unary calls that read all workers of the index, which delays new entries. A lookup by
// tokens hash reads every block of every worker that the filter selects, so only one runs at a time.
const (
	maxTokensLookups  = 1
	maxBlockLookups   = 4
	maxWorkersQueries = 2 // ListWorkers and GetStatus together
	maxInspections    = 2 // ListIncidents, ListEntries and GetChain together
	maxSharingScans   = 1 // of ListSharedPrefixes, which read every block
	maxQueriesWaiting = 64
	maxQueryWait      = 5 * time.Second

	// A match takes some microseconds and no lock for longer, but each has its own memory for the matches. The memory
	// of the requests bounds how many wait.
	maxMatches        = 64
	maxMatchesWaiting = math.MaxInt32
)

// queryLimiter limits the queries of one kind.
type queryLimiter struct {
	*limiter
	refused prometheus.Counter
}

func newQueryLimiter(metrics promauto.Factory, kind string, capacity, maxWaiting int) *queryLimiter {
	l := newLimiter(capacity, maxWaiting, maxQueryWait)
	labels := prometheus.Labels{"kind": kind}
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_running", Help: "Queries running, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.inUse()) })
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_waiting", Help: "Queries waiting for a slot, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.waiting()) })
	return &queryLimiter{l, metrics.NewCounter(prometheus.CounterOpts{
		Name: "queries_refused_total", Help: "Queries refused because the wait queue was full or the wait timed out, by kind.", ConstLabels: labels,
	})}
}

// acquire waits until a query may run, or returns the client's error.
func (q *queryLimiter) acquire(ctx context.Context, b journal.Bounds) error {
	err := q.limiter.acquire(ctx)
	if err == nil {
		return nil
	}
	if why, ok := q.refusal(err); ok {
		q.refused.Inc()
		return callerror.New(callerror.TooManyQueries, b, "%d queries of this kind are running, which is the limit, and %s; try again later", cap(q.slots), why)
	}
	return status.FromContextError(ctx.Err()).Err()
}

// quota bounds how many instances of a resource one client address uses, and all addresses together.
type quota struct {
	total          *budget.Budget
	perAddress     int64
	addressRefused prometheus.Counter // refusals because of perAddress; total counts its own
}

func newQuota(metrics promauto.Factory, resource string, total, perAddress int) *quota {
	return &quota{
		total:      budget.New(resource, int64(total)),
		perAddress: int64(perAddress),
		addressRefused: metrics.NewCounter(prometheus.CounterOpts{
			Name:        "address_refused_total",
			Help:        "Requests for a resource that were refused because the quota of the client's address was used up, by resource.",
			ConstLabels: prometheus.Labels{"resource": resource},
		}),
	}
}

// acquire acquires one instance for an address. inUse counts the instances that the address uses. The error is
// errAddressQuota or errTotalQuota.
func (q *quota) acquire(inUse *atomic.Int64) error {
	if inUse.Add(1) > q.perAddress {
		inUse.Add(-1)
		q.addressRefused.Inc()
		return errAddressQuota
	}
	if !q.total.Reserve(1) {
		inUse.Add(-1)
		return errTotalQuota
	}
	return nil
}

func (q *quota) release(inUse *atomic.Int64) {
	q.total.Release(1)
	inUse.Add(-1)
}

// logBurst is how many log records of a kind are allowed at a time, since clients can cause any number of them.
const logBurst = 20

// Package admission bounds what clients of a gRPC server use, by address and in all: connections, calls whose requests are being received,
// streams and queries.
package admission

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

// errWaitTimeout means that no slot was released in time.
var errWaitTimeout = errors.New("no slot was released in time")

// Limiter is a semaphore with a bounded wait queue, in which addresses take turns: see budget.Shares.
type Limiter struct {
	slots      *budget.Budget
	shares     *budget.Shares
	maxWaiting int
	maxWait    time.Duration
}

// NewLimiter returns a limiter with a number of slots, of which an address may have perAddress. At most maxWaiting callers wait, for at most maxWait.
func NewLimiter(capacity, perAddress, maxWaiting int, maxWait time.Duration) *Limiter {
	slots := budget.New("", int64(capacity))
	return &Limiter{slots, budget.NewShares(slots, int64(perAddress)).LimitWaiting(maxWaiting), maxWaiting, maxWait}
}

// InUse returns the number of slots in use.
func (l *Limiter) InUse() int { return int(l.slots.Used()) }

// Waiting returns the number of callers that wait.
func (l *Limiter) Waiting() int { return l.shares.Waiting() }

// TryAcquire acquires a slot for an address, and reports whether one was free.
func (l *Limiter) TryAcquire(address netip.Prefix) bool { return l.shares.TryAcquire(address, 1) }

// Acquire waits for a slot for an address. The error is budget.ErrWaiting, errWaitTimeout or the cause of the context's end. A free slot is acquired even if
// the context has ended.
func (l *Limiter) Acquire(ctx context.Context, address netip.Prefix) error {
	if l.TryAcquire(address) {
		return nil
	}
	waiting, cancel := context.WithTimeoutCause(ctx, l.maxWait, errWaitTimeout)
	defer cancel()
	err := l.shares.Acquire(waiting, address, 1)
	if err == nil || errors.Is(err, budget.ErrWaiting) {
		return err
	}
	return context.Cause(waiting)
}

// Release releases a slot of an address.
func (l *Limiter) Release(address netip.Prefix) { l.shares.Release(address, 1) }

// Refusal describes budget.ErrWaiting and errWaitTimeout to a client; ok is false for other errors.
func (l *Limiter) Refusal(err error) (description string, ok bool) {
	switch {
	case errors.Is(err, budget.ErrWaiting):
		return fmt.Sprintf("%d more are waiting", l.maxWaiting), true
	case errors.Is(err, errWaitTimeout):
		return fmt.Sprintf("none has ended within %v", l.maxWait), true
	}
	return "", false
}

// maxQueryWait is how long a query waits for a slot.
const maxQueryWait = 5 * time.Second

// Queries limits the queries of one kind.
type Queries struct {
	*Limiter
	refused prometheus.Counter
}

// NewQueries returns the limiter of a kind of queries, with its metrics.
func NewQueries(metrics promauto.Factory, kind string, capacity, perAddress, maxWaiting int) *Queries {
	l := NewLimiter(capacity, perAddress, maxWaiting, maxQueryWait)
	labels := prometheus.Labels{"kind": kind}
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_running", Help: "Queries running, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.InUse()) })
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_waiting", Help: "Queries waiting for a slot, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.Waiting()) })
	return &Queries{l, metrics.NewCounter(prometheus.CounterOpts{
		Name: "queries_refused_total", Help: "Queries refused because the wait queue was full or the wait timed out, by kind.", ConstLabels: labels,
	})}
}

// Acquire waits until a query may run, or returns the client's error. The caller calls release after the query.
func (q *Queries) Acquire(ctx context.Context, b journal.Bounds) (release func(), err error) {
	address := AddressOf(ctx)
	err = q.Limiter.Acquire(ctx, address)
	if err == nil {
		return func() { q.Release(address) }, nil
	}
	if why, ok := q.Refusal(err); ok {
		q.refused.Inc()
		return nil, callerror.New(callerror.TooManyQueries, b, "%d queries of this kind are running, which is the limit, and %s; try again later", q.slots.Limit(), why)
	}
	return nil, status.FromContextError(ctx.Err()).Err()
}

// Package admission bounds what clients of a gRPC server use, by address and in all: connections, calls whose requests are being received,
// streams and queries.
package admission

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

var (
	errQueueFull   = errors.New("the wait queue is full")
	errWaitTimeout = errors.New("no slot was released in time")
)

// Limiter is a FIFO semaphore with a bounded wait queue: Acquire fails if the queue is full, or after maxWait.
// Blocked senders of a Go channel are served in FIFO order.
type Limiter struct {
	slots      chan struct{} // one element per slot in use
	maxWaiting int
	maxWait    time.Duration
	queued     atomic.Int64
}

// NewLimiter returns a limiter with a number of slots, for which at most maxWaiting callers wait.
func NewLimiter(capacity, maxWaiting int, maxWait time.Duration) *Limiter {
	return &Limiter{slots: make(chan struct{}, capacity), maxWaiting: maxWaiting, maxWait: maxWait}
}

// InUse returns the number of slots in use.
func (l *Limiter) InUse() int { return len(l.slots) }

// Waiting returns the number of callers that wait.
func (l *Limiter) Waiting() int { return int(l.queued.Load()) }

// TryAcquire acquires a slot and reports whether one was free.
func (l *Limiter) TryAcquire() bool {
	select {
	case l.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// Acquire waits for a slot. The error is errQueueFull, errWaitTimeout or the cause of
// the context's end. A free slot is acquired even if the context has ended.
func (l *Limiter) Acquire(ctx context.Context) error {
	if l.TryAcquire() {
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

// Release releases a slot.
func (l *Limiter) Release() { <-l.slots }

// Refusal describes errQueueFull and errWaitTimeout to a client; ok is false for other errors.
func (l *Limiter) Refusal(err error) (description string, ok bool) {
	switch {
	case errors.Is(err, errQueueFull):
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
func NewQueries(metrics promauto.Factory, kind string, capacity, maxWaiting int) *Queries {
	l := NewLimiter(capacity, maxWaiting, maxQueryWait)
	labels := prometheus.Labels{"kind": kind}
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_running", Help: "Queries running, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.InUse()) })
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "queries_waiting", Help: "Queries waiting for a slot, by kind.", ConstLabels: labels},
		func() float64 { return float64(l.Waiting()) })
	return &Queries{l, metrics.NewCounter(prometheus.CounterOpts{
		Name: "queries_refused_total", Help: "Queries refused because the wait queue was full or the wait timed out, by kind.", ConstLabels: labels,
	})}
}

// Acquire waits until a query may run, or returns the client's error.
func (q *Queries) Acquire(ctx context.Context, b journal.Bounds) error {
	err := q.Limiter.Acquire(ctx)
	if err == nil {
		return nil
	}
	if why, ok := q.Refusal(err); ok {
		q.refused.Inc()
		return callerror.New(callerror.TooManyQueries, b, "%d queries of this kind are running, which is the limit, and %s; try again later", cap(q.slots), why)
	}
	return status.FromContextError(ctx.Err()).Err()
}

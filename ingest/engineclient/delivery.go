package engineclient

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// logInterval is the time between log lines of a failing handler.
const logInterval = 10 * time.Second

// PanicError is a panic of a Handler.
type PanicError struct {
	// Value is that of the panic, and Stack its stack trace.
	Value any
	Stack []byte
}

// Error returns the value as text.
func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.Value) }

// Unwrap returns the value where it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// handle calls a handler, and returns its panic as a PanicError.
func handle(ctx context.Context, h Handler, e *Event) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return h.HandleEvent(ctx, e)
}

// delivery calls the handler with the events that were read, in order and each once.
//
// Its queue has room for Config.Buffer events. While it is full reading waits, and nothing
// is dropped: ZeroMQ buffers, and what it drops is requested from the replay socket, or
// reported as a gap. Events that wait when the Client is stopped are counted as discarded.
type delivery struct {
	config *Config
	queue  chan *Event
	// handler is nil until ready is closed.
	handler  atomic.Pointer[Handler]
	ready    chan struct{}
	setReady sync.Once

	// logAfter is when the next failure may be logged, and suppressed how many were not.
	// They belong to the goroutine of run.
	logAfter   time.Time
	suppressed int

	handled   atomic.Uint64
	failed    atomic.Uint64 // of those handled, by an error
	panicked  atomic.Uint64 // of those handled
	discarded atomic.Uint64
	spent     atomic.Int64 // in the handler, in nanoseconds
	latency   prometheus.Histogram
	started   atomic.Bool // whether seq is set
	seq       atomic.Uint64
}

func newDelivery(c *Config) *delivery {
	return &delivery{
		config: c,
		queue:  make(chan *Event, c.Buffer),
		ready:  make(chan struct{}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Subsystem: subsystem, Name: "handler_seconds",
			Help:        "Time of the handler for an event.",
			Buckets:     prometheus.ExponentialBuckets(1e-6, 4, 12), // 1 µs to 4.2 s
			ConstLabels: prometheus.Labels{"worker": c.Worker},
		}),
	}
}

// setHandler replaces the handler from the next event on.
func (d *delivery) setHandler(h Handler) {
	d.handler.Store(&h)
	d.setReady.Do(func() { close(d.ready) })
}

// run calls the handler, once there is one, until ctx is done.
func (d *delivery) run(ctx context.Context) {
	select {
	case <-d.ready:
	case <-ctx.Done():
	}
	for ctx.Err() == nil {
		select {
		case e := <-d.queue:
			if ctx.Err() != nil {
				d.discarded.Add(1)
				return
			}
			d.deliver(ctx, e)
		case <-ctx.Done():
		}
	}
}

func (d *delivery) deliver(ctx context.Context, e *Event) {
	began := time.Now()
	err := handle(ctx, *d.handler.Load(), e)
	spent := time.Since(began)
	d.spent.Add(int64(spent))
	d.latency.Observe(spent.Seconds())
	d.handled.Add(1)
	if e.Kind <= EventCleared && !e.More {
		d.seq.Store(e.Seq)
		d.started.Store(true)
	}
	if err != nil {
		d.fail(e, err)
	}
}

// fail counts and logs a failure of the handler.
func (d *delivery) fail(e *Event, err error) {
	args := []any{"worker", e.Worker, "rank", e.Rank, "seq", e.Seq, "kind", e.Kind.String(), "error", err}
	if p, ok := err.(*PanicError); ok { //nolint:errorlint // only the panic of this call is one
		d.panicked.Add(1)
		args = append(args, slog.String("stack", string(p.Stack)))
	} else {
		d.failed.Add(1)
	}
	now := time.Now()
	if now.Before(d.logAfter) {
		d.suppressed++
		return
	}
	d.config.Logger.Error("handler failed", append(args, "suppressed", d.suppressed)...)
	d.logAfter, d.suppressed = now.Add(logInterval), 0
}

// end counts the events that are left. Nothing is read or handled any more.
func (d *delivery) end() {
	for {
		select {
		case <-d.queue:
			d.discarded.Add(1)
		default:
			return
		}
	}
}

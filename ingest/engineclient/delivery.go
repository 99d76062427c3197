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

// PanicError is a panic of a Handler.
type PanicError struct {
	// Value is the argument of panic, and Stack the stack trace.
	Value any
	Stack []byte
}

// Error returns the value as text.
func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.Value) }

// Unwrap returns the value if it is an error.
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

// delivery calls the handler with each event once, in order.
//
// Its queue has room for Config.Buffer events. While the queue is full, reading is blocked: ZeroMQ
// buffers messages, and those that it drops are requested from the replay socket, or reported as a gap.
// Events in the queue when the Client is stopped are counted as discarded.
type delivery struct {
	config *Config
	queue  chan *Event

	handler atomic.Pointer[Handler]
	// ready is closed once there is a handler.
	ready    chan struct{}
	setReady sync.Once

	handled   atomic.Uint64
	failed    atomic.Uint64 // handled events whose handler returned an error
	panicked  atomic.Uint64 // handled events whose handler panicked
	discarded atomic.Uint64
	spent     atomic.Int64 // time in the handler, in nanoseconds
	latency   prometheus.Histogram
	started   atomic.Bool // reports whether seq is set
	seq       atomic.Uint64
}

// setHandler replaces the handler from the next event on.
func (d *delivery) setHandler(h Handler) {
	d.handler.Store(&h)
	d.setReady.Do(func() { close(d.ready) })
}

// put adds an event to the queue, and blocks while the queue is full. It discards the event once ctx is done.
func (d *delivery) put(ctx context.Context, e *Event) {
	if ctx.Err() == nil {
		select {
		case d.queue <- e:
			return
		case <-ctx.Done():
		}
	}
	d.discarded.Add(1)
}

// run calls the handler with the events in the queue until ctx is done. It waits until there is a handler.
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
		d.recordFailure(e, err)
	}
}

func (d *delivery) recordFailure(e *Event, err error) {
	args := []any{"worker", e.Worker, "rank", e.Rank, "seq", e.Seq, "kind", e.Kind.String(), "error", err}
	if p, ok := err.(*PanicError); ok { //nolint:errorlint // a wrapped PanicError is an error of the handler
		d.panicked.Add(1)
		args = append(args, slog.String("stack", string(p.Stack)))
	} else {
		d.failed.Add(1)
	}
	d.config.Logger.Error("handler failed", args...)
}

// discardQueue counts the events in the queue as discarded. It is called when no event is added or handled any more.
func (d *delivery) discardQueue() {
	for len(d.queue) > 0 {
		<-d.queue
		d.discarded.Add(1)
	}
}

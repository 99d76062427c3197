package ingest

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
)

// PanicError is a panic of an EventHandler.
type PanicError struct {
	// Value is what it panicked with, and Stack where.
	Value any
	Stack []byte
}

// Error says what it panicked with.
func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v", e.Value) }

// Unwrap returns the value where it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// handle calls a handler, and returns its panic as a PanicError.
func handle(ctx context.Context, h EventHandler, e *Event) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return h.HandleEvent(ctx, e)
}

// delivery brings what is read to the handler, in order and each once.
//
// Between them is a queue of ClientConfig.Buffer events, which fills up while there
// is no handler yet. While it is full reading waits, and nothing is dropped: ZeroMQ
// buffers, and what it drops at the engine's end is fetched, or reported as a gap.
// Only when the Client is stopped do events end that the handler was not given: they
// are counted as discarded.
type delivery struct {
	config *ClientConfig
	queue  chan *Event
	// handler is nil until ready is closed.
	handler  atomic.Pointer[EventHandler]
	ready    chan struct{}
	setReady sync.Once

	// notice and held are how long the next failure is not logged, and how many
	// were not. The goroutine of run has them.
	notice time.Time
	held   int

	handled   atomic.Uint64
	failed    atomic.Uint64 // of those handled, by an error
	panicked  atomic.Uint64 // of those handled
	discarded atomic.Uint64
	spent     atomic.Int64 // in the handler, in nanoseconds
	latency   prometheus.Histogram
	started   atomic.Bool // whether seq is set
	seq       atomic.Uint64
}

func newDelivery(c *ClientConfig) *delivery {
	return &delivery{
		config: c,
		queue:  make(chan *Event, c.Buffer),
		ready:  make(chan struct{}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: metricsNamespace, Subsystem: clientSubsystem, Name: "handler_seconds",
			Help:        "Time that the handler took for an event.",
			Buckets:     prometheus.ExponentialBuckets(1e-6, 4, 12), // 1 µs to 4.2 s
			ConstLabels: prometheus.Labels{"worker": c.Worker},
		}),
	}
}

// setHandler has a handler called from the next event on.
func (d *delivery) setHandler(h EventHandler) {
	d.handler.Store(&h)
	d.setReady.Do(func() { close(d.ready) })
}

// run calls the handler, from when there is one until ctx is done.
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

// fail counts what went wrong in the handler, and logs it now and then.
func (d *delivery) fail(e *Event, err error) {
	args := []any{"worker", e.Worker, "rank", e.Rank, "seq", e.Seq, "kind", e.Kind.String(), "error", err}
	if p, ok := err.(*PanicError); ok { //nolint:errorlint // only the panic of this call is one
		d.panicked.Add(1)
		args = append(args, slog.String("stack", string(p.Stack)))
	} else {
		d.failed.Add(1)
	}
	now := time.Now()
	if now.Before(d.notice) {
		d.held++
		return
	}
	d.config.Logger.Error("handler failed", append(args, "held_back", d.held)...)
	d.notice, d.held = now.Add(noticeInterval), 0
}

// end counts what is left. Nobody reads or calls the handler any more.
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

// clientSink is the Sink, and the Lane, of a Client's one worker.
type clientSink struct {
	*delivery
	// stopping is closed when the Client is stopped, and lets go of who waits for
	// the handler.
	stopping <-chan struct{}
}

// AddWorker is called once: the worker never leaves.
func (s *clientSink) AddWorker(feed.Worker) feed.Lane { return s }

// RemoveWorker is never called.
func (s *clientSink) RemoveWorker(string, feed.RemoveReason) {}

// Batch puts a batch's events into the queue, and waits for room.
func (s *clientSink) Batch(b *feed.Batch) {
	for i := range b.Events {
		if !s.put(eventOf(s.config, b, i)) {
			s.discarded.Add(uint64(len(b.Events) - i))
			return
		}
	}
}

// Gap tells of a gap.
func (s *clientSink) Gap(g feed.Gap) { s.tell(gapEvent(s.config, g)) }

// Restarted tells of a restart.
func (s *clientSink) Restarted(r feed.Restart) {
	s.tell(s.event(EventRestarted, r.Rank, time.Unix(0, r.At)))
}

func (s *clientSink) event(kind EventKind, rank uint32, at time.Time) *Event {
	return &Event{Kind: kind, Worker: s.config.Worker, Model: s.config.Model, Rank: rank, IngestTime: at}
}

func (s *clientSink) tell(e *Event) {
	if !s.put(e) {
		s.discarded.Add(1)
	}
}

// put waits for room in the queue. It returns false once the Client is stopped.
func (s *clientSink) put(e *Event) bool {
	select {
	case <-s.stopping:
		return false
	default:
	}
	select {
	case s.queue <- e:
		return true
	case <-s.stopping:
		return false
	}
}

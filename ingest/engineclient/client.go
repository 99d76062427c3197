// Package engineclient reads one engine, for programs that use its events directly.
//
// A Client calls a Handler with each event of the engine once, in the engine's order. Lost batches are requested from the engine's replay
// socket, or reported as an EventGap. To read many engines as one stream, use package ingest, which this package is built on.
package engineclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/loglimit"
)

var (
	// ErrStarted is returned by Start after an earlier Start or Stop.
	ErrStarted = ingest.ErrStarted
	// ErrNotStarted is returned by WaitConnected and Reconnect before Start.
	ErrNotStarted = errors.New("client was not started")
	// ErrEnded is returned by WaitConnected and Reconnect after Stop, and after the context of Start is done.
	ErrEnded = config.ErrEnded
	// ErrClosed is returned by methods after Close.
	ErrClosed = errors.New("client is closed")
	// ErrNoReplay is returned by ReplayFrom if there is no replay socket.
	ErrNoReplay = errors.New("there is no replay socket")
)

var errNoHandler = errors.New("handler is nil")

// Client reads one engine and calls a handler with its events.
//
// Its methods are safe for concurrent use. The handler must not call Stop or Close, which wait for it.
type Client struct {
	config   Config
	delivery *delivery
	level    *slog.LevelVar
	metrics  *prometheus.Registry // the Client's own, without those of ingest

	replaysDone   atomic.Uint64 // calls of ReplayFrom
	replaysFailed atomic.Uint64
	replays       sync.WaitGroup // calls of ReplayFrom in progress

	closing context.Context // done when the Client is closed
	cancel  context.CancelCauseFunc

	mu    sync.Mutex // guards the fields below
	state state
	run   *run // nil before it is started
}

type state uint8

const (
	stateNew state = iota
	stateStarted
	stateStopped
	stateClosed
)

// run is the run of a Client from Start on. It remains after its end, for Stats.
type run struct {
	in   *ingest.Ingest
	stop context.CancelFunc
	done chan struct{} // closed when nothing is read or handled any more
	err  error         // why it ended; set before done is closed
}

// New checks the config and returns a Client, which does nothing before Start. The error is that of
// Config.Validate. If the handler is nil, events wait in the buffer until SetHandler is called.
func New(c Config, h Handler) (*Client, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("check config: %w", err)
	}
	client := &Client{config: c.withDefaults(), level: new(slog.LevelVar)}
	client.closing, client.cancel = context.WithCancelCause(context.Background())
	client.level.Set(c.LogLevel)
	client.config.Logger = slog.New(loglimit.NewHandler(leveled{client.config.Logger.Handler(), client.level}))
	client.delivery = &delivery{config: &client.config, queue: make(chan *Event, client.config.Buffer), ready: make(chan struct{})}
	client.metrics = client.newMetrics()
	if h != nil {
		client.delivery.setHandler(h)
	}
	return client, nil
}

// SetHandler replaces the handler from the next event on; a call in progress is not interrupted. If there was none, the handler is called
// with the buffered events first. SetHandler returns an error if the handler is nil, and ErrClosed after Close.
func (c *Client) SetHandler(h Handler) error {
	if h == nil {
		return errNoHandler
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == stateClosed {
		return ErrClosed
	}
	c.delivery.setHandler(h)
	return nil
}

// Config returns the config with its defaults.
func (c *Client) Config() Config { return c.config }

// Start connects in the background. It reads the batches that the engine still has, and then the batches that it publishes, until ctx is
// done or Stop is called. It returns ErrStarted after an earlier Start or Stop, ErrClosed after Close, and an error if the metrics cannot
// be registered, for example because another Client has the same Worker and Registerer.
func (c *Client) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case stateNew:
	case stateClosed:
		return ErrClosed
	default:
		return ErrStarted
	}
	if err := c.start(ctx); err != nil {
		return fmt.Errorf("start client of %s: %w", c.config.Worker, err)
	}
	c.state = stateStarted
	return nil
}

func (c *Client) start(ctx context.Context) error {
	cfg := c.config.ingest()
	unregister := func() {}
	if user := c.config.Metrics; user != nil {
		cfg.Metrics = prometheus.WrapRegistererWith(prometheus.Labels{"client": c.config.Worker}, user)
		if err := user.Register(c.metrics); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
		unregister = func() { user.Unregister(c.metrics) }
	}
	ctx, stop := context.WithCancel(ctx)
	in, err := ingest.New(cfg, lane{&c.config, func(e *Event) { c.delivery.put(ctx, e) }})
	if err != nil {
		stop()
		unregister()
		return err
	}
	r := &run{in: in, stop: stop, done: make(chan struct{})}
	c.run = r
	go func() {
		defer close(r.done)
		defer unregister()
		defer stop()
		var handler sync.WaitGroup
		handler.Go(func() { c.delivery.run(ctx) })
		r.err = in.Run(ctx)
		stop()
		handler.Wait()
		c.delivery.discardQueue()
		c.config.Logger.Info("client stopped", "worker", c.config.Worker, "discarded", c.delivery.discarded.Load())
	}()
	return nil
}

// Stop stops reading, and waits for the handler's call in progress: no call follows. Buffered events are discarded and counted. Stop may be
// called more than once, and before Start, which then fails. It returns the error that ended the reading, if any.
func (c *Client) Stop() error {
	c.mu.Lock()
	if c.state != stateClosed {
		c.state = stateStopped
	}
	r := c.run
	c.mu.Unlock()
	if r == nil {
		return nil
	}
	r.stop()
	<-r.done
	return r.err
}

// Close stops the Client as Stop does, ends the calls of ReplayFrom in progress with ErrClosed, and waits for both. After it the Client has
// no goroutine, open socket or registered metric. Close may be called more than once, and returns the error of Stop. After Close, Connected
// returns false, and all other methods that return an error return ErrClosed, except Stop and Close.
func (c *Client) Close() error {
	c.mu.Lock()
	c.state = stateClosed
	c.mu.Unlock()
	c.cancel(ErrClosed)
	err := c.Stop()
	c.replays.Wait()
	return err
}

// Connect starts the Client unless it was started, to run until Stop, and waits until there is a
// connection. If ctx is done first, the Client continues to connect.
func (c *Client) Connect(ctx context.Context) error {
	if err := c.Start(context.WithoutCancel(ctx)); err != nil && !errors.Is(err, ErrStarted) {
		return err
	}
	return c.WaitConnected(ctx)
}

// Connected reports whether there is a connection; see Stats.
func (c *Client) Connected() bool {
	r, err := c.current()
	return err == nil && r.connected()
}

// WaitConnected waits until there is a connection. It returns ErrNotStarted before Start, ErrEnded after
// Stop, ErrClosed after Close, and an error that wraps the cause of ctx if ctx is done first.
func (c *Client) WaitConnected(ctx context.Context) error {
	r, err := c.current()
	if err != nil {
		return err
	}
	return c.wait(ctx, r, r.connected)
}

// Reconnect closes the connection, opens another, and waits for it as WaitConnected does. If ctx is done
// first, the Client continues to connect. Batches published in between are requested from the replay
// socket; without one a gap is reported. Reconnect may have to wait for the handler.
func (c *Client) Reconnect(ctx context.Context) error {
	r, err := c.current()
	if err != nil {
		return err
	}
	closed := make(chan uint64, 1)
	go func() {
		before, _ := r.in.Reconnect(c.config.Worker)
		closed <- before
	}()
	select {
	case before := <-closed:
		return c.wait(ctx, r, func() bool { return r.connected() && c.Stats().Connections > before })
	case <-r.done:
		return c.ended()
	case <-ctx.Done():
		return c.notConnected(ctx)
	}
}

// wait polls every Config.PollInterval until a condition is true.
func (c *Client) wait(ctx context.Context, r *run, condition func() bool) error {
	poll := time.NewTicker(c.config.PollInterval)
	defer poll.Stop()
	for !condition() {
		select {
		case <-poll.C:
		case <-r.done:
			return c.ended()
		case <-ctx.Done():
			return c.notConnected(ctx)
		}
	}
	return nil
}

func (c *Client) notConnected(ctx context.Context) error {
	return fmt.Errorf("wait for a connection to %s: %w", c.config.connect(), context.Cause(ctx))
}

func (c *Client) ended() error {
	_, err := c.current()
	return err
}

// current returns the run, which may have ended; nil if there is none. The error is nil while the Client reads.
func (c *Client) current() (*run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state == stateClosed:
		return c.run, ErrClosed
	case c.run == nil && c.state == stateStopped:
		return nil, ErrEnded
	case c.run == nil:
		return nil, ErrNotStarted
	}
	select {
	case <-c.run.done:
		return c.run, ErrEnded
	default:
		return c.run, nil
	}
}

// source returns the status of the only source.
func (r *run) source() ingest.SourceStatus { return r.in.Sources()[0] }

func (r *run) connected() bool {
	state := r.source().State
	return state == ingest.SourceCatchingUp || state == ingest.SourceLive || state == ingest.SourceRepairing
}

// ReplayFrom requests the batches that the engine still has from a seq on, up to its newest, and calls h with each of their events once, in
// order. Batches that the engine does not send, or no longer has, are reported by an EventGap.
//
// ReplayFrom uses its own connection. It does not need Start, Stop does not end it but Close does, and it
// does not affect the other events. It returns nil after all batches were read. Otherwise it returns the
// error of h, or its panic as a PanicError; ErrNoReplay; ErrClosed; or why the engine does not reply.
func (c *Client) ReplayFrom(ctx context.Context, seq uint64, h Handler) (err error) {
	if c.config.replay() == "" {
		return fmt.Errorf("replay from %d: %w", seq, ErrNoReplay)
	}
	if h == nil {
		return errNoHandler
	}
	c.mu.Lock()
	if c.state == stateClosed {
		c.mu.Unlock()
		return ErrClosed
	}
	c.replays.Add(1)
	c.mu.Unlock()
	defer c.replays.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.closing, func() { cancel(ErrClosed) })
	defer stop()
	emit := func(e *Event) {
		if ctx.Err() != nil {
			return
		}
		if err := handle(ctx, h, e); err != nil {
			cancel(fmt.Errorf("handle replayed batch %d: %w", e.Seq, err))
		}
	}
	if err := ingest.ReplayFrom(ctx, c.config.ingest(), seq, lane{&c.config, emit}); err != nil {
		c.replaysFailed.Add(1)
		return err
	}
	c.replaysDone.Add(1)
	return nil
}

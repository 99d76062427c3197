// Package engineclient reads one engine, for programs with their own use for its events.
//
// Into a Client flow the engine's batches, out of it calls of a Handler: one event a call,
// in the engine's order, each once. What was lost on the way is requested from the
// engine's replay socket, or reported as an EventGap. For many engines in one stream see
// package ingest, on which this runs.
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
)

var (
	// ErrStarted is returned by Start when it was called before, or Stop was.
	ErrStarted = ingest.ErrStarted
	// ErrNotStarted is returned by WaitConnected and Reconnect before Start.
	ErrNotStarted = errors.New("client was not started")
	// ErrEnded is returned by WaitConnected and Reconnect once the Client has ended.
	ErrEnded = config.ErrEnded
	// ErrClosed is returned by the methods of a Client that was closed.
	ErrClosed = errors.New("client is closed")
	// ErrNoReplay is returned by ReplayFrom where there is no replay socket.
	ErrNoReplay = errors.New("there is no replay socket")
)

var errNoHandler = errors.New("handler is nil")

// Client reads one engine and calls a handler with its events.
//
// Its methods may be called from any goroutine. Stop and Close wait for the handler, and
// must not be called by it.
type Client struct {
	config   Config
	delivery *delivery
	level    *slog.LevelVar

	replaysDone   atomic.Uint64 // calls of ReplayFrom
	replaysFailed atomic.Uint64
	replays       sync.WaitGroup // calls of ReplayFrom in progress

	closing context.Context // done when the Client is closed
	cancel  context.CancelCauseFunc

	mu    sync.Mutex // guards all below
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

// run is a Client that was started. It stays when the Client has ended, for Stats.
type run struct {
	in   *ingest.Ingest
	stop context.CancelFunc
	done chan struct{} // closed when nothing is read or handled any more
	err  error         // why it ended; set before done is closed
}

// New checks the config and returns a Client, which does nothing before it is started. The
// error is that of Config.Validate. A nil handler has to be set later, by SetHandler;
// until then events wait as for a slow one.
func New(c Config, h Handler) (*Client, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("check config: %w", err)
	}
	client := &Client{config: c.withDefaults(), level: new(slog.LevelVar)}
	client.closing, client.cancel = context.WithCancelCause(context.Background())
	client.level.Set(c.LogLevel)
	client.config.Logger = withLevel(client.config.Logger, client.level)
	client.delivery = newDelivery(&client.config)
	if h != nil {
		client.delivery.setHandler(h)
	}
	return client, nil
}

// SetHandler replaces the handler from the next event on; a call in progress goes on.
// Where there was none, the events that wait come first: Config.Buffer at most, as the
// Client reads no more than that ahead of its handler. It returns an error where the
// handler is nil, and ErrClosed after Close.
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

// Start connects in the background, reads what the engine remembers, and then what it
// publishes, until ctx is done or Stop is called. It returns ErrStarted if it was called
// before, or Stop was, ErrClosed after Close, and an error where the metrics cannot be
// registered: another Client of that name may have them.
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
	unregister, err := c.register()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	cfg := c.config.ingest()
	if c.config.Metrics != nil {
		cfg.Metrics = prometheus.WrapRegistererWith(prometheus.Labels{"client": c.config.Worker}, c.config.Metrics)
	}
	in, err := ingest.New(cfg, &queueLane{c.delivery, ctx.Done()})
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
		c.delivery.end()
		c.config.Logger.Info("client stopped", "worker", c.config.Worker, "discarded", c.delivery.discarded.Load())
	}()
	return nil
}

// Stop ends the reading, and waits for it and for the handler's call in progress: no call
// follows. Events that wait are not handled, and counted as discarded. It may be called
// more than once, and before Start, which then fails. It returns why the reading failed,
// if it did.
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

// Close stops the Client as Stop does, ends the calls of ReplayFrom in progress with
// ErrClosed, and waits for both: when it returns, nothing of the Client runs, no socket is
// open, and no metric is registered. It may be called more than once, and returns what
// Stop does. After it every method but Stop, Stats, Config and those of the log level
// returns ErrClosed, or false.
func (c *Client) Close() error {
	c.mu.Lock()
	c.state = stateClosed
	c.mu.Unlock()
	c.cancel(ErrClosed)
	err := c.Stop()
	c.replays.Wait()
	return err
}

// Connect starts the Client, to run until Stop, unless it was started, and waits until
// there is a connection. If ctx is done before, the Client continues to try.
func (c *Client) Connect(ctx context.Context) error {
	c.mu.Lock()
	fresh := c.state == stateNew
	c.mu.Unlock()
	if fresh {
		if err := c.Start(context.WithoutCancel(ctx)); err != nil && !errors.Is(err, ErrStarted) {
			return err
		}
	}
	return c.WaitConnected(ctx)
}

// Connected reports whether there is a connection; see Stats.
func (c *Client) Connected() bool {
	r, err := c.current()
	return err == nil && r.connected()
}

// WaitConnected waits until there is a connection. It returns ErrNotStarted before Start,
// ErrEnded once the Client has ended, ErrClosed after Close, and an error that is that of
// ctx when ctx is done before.
func (c *Client) WaitConnected(ctx context.Context) error {
	r, err := c.current()
	if err != nil {
		return err
	}
	return c.wait(ctx, r, r.connected)
}

// Reconnect closes the connection, makes another one, and waits for it as WaitConnected
// does; when ctx is done before, the Client continues to try. What is published meanwhile
// is requested from the replay socket; where there is none a gap is reported. It may have
// to wait for the handler.
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
		return c.wait(ctx, r, func() bool { return r.connected() && r.stats(c.config.Worker).Connections > before })
	case <-r.done:
		return c.ended()
	case <-ctx.Done():
		return c.notConnected(ctx)
	}
}

// wait polls until a condition is true.
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

// current returns the run with nil, ErrEnded or ErrClosed, or ErrNotStarted.
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

// source returns the status of the source, of which there is one always.
func (r *run) source() ingest.SourceStatus { return r.in.Sources()[0] }

func (r *run) connected() bool { return connected(r.source().State) }

func (r *run) stats(worker string) ingest.WorkerStats {
	s, _ := r.in.Stats(worker)
	return s
}

// ReplayFrom requests the batches that the engine remembers from a seq on, up to its
// newest, and calls h with their events, in order and each once. Batches that the engine
// does not send, which includes those that it has forgotten, are reported by an EventGap.
//
// It has a connection of its own: it needs no Start, is ended by Close but not by Stop,
// and is independent of what the Client reads meanwhile. It returns nil once everything
// was read, and otherwise the error, or the panic as a PanicError, of h; ErrNoReplay;
// ErrClosed; or why the engine does not answer.
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
	lane := &handlerLane{config: &c.config, ctx: ctx, handler: h, cancel: cancel}
	if err := ingest.ReplayFrom(ctx, c.config.ingest(), seq, lane); err != nil {
		c.replaysFailed.Add(1)
		return err
	}
	c.replaysDone.Add(1)
	return nil
}

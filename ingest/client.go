package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
)

var (
	// ErrNotStarted is returned by WaitConnected and Reconnect before Start.
	ErrNotStarted = errors.New("client was not started")
	// ErrClosed is returned by the methods of a Client that was closed.
	ErrClosed = errors.New("client is closed")
)

var errNoHandler = errors.New("handler is nil: want one to call")

// Client reads one engine, and calls a handler with its events.
//
// It is an Ingest of one worker with one source, for a program that has its own
// use for the events: they come in the engine's order, each once, and what was
// lost on the way is fetched, or told as an EventGap. For many engines in one
// stream take an Ingest.
//
// Its methods may be called from any goroutine. Stop and Close, and none other, wait
// for the handler, and must not be called by it.
type Client struct {
	config   ClientConfig
	delivery *delivery
	level    *slog.LevelVar

	replaysDone   atomic.Uint64 // calls of ReplayFrom
	replaysFailed atomic.Uint64
	replays       sync.WaitGroup // calls of ReplayFrom under way

	mu    sync.Mutex // guards all below
	state clientState
	run   *clientRun // nil before it is started
	// cancels ends the calls of ReplayFrom under way.
	cancels map[*clientReplay]context.CancelCauseFunc
}

// clientState is where a Client is in its life, which it has one of.
type clientState uint8

const (
	clientNew clientState = iota
	clientStarted
	clientStopped
	clientClosed
)

// clientRun is what a Client has while it runs, and leaves.
type clientRun struct {
	in       *Ingest
	registry *clientRegistry
	stop     context.CancelFunc
	// renewals ask for a fresh connection. Each is told how many connections there
	// were before; one has room for that.
	renewals chan chan<- uint64
	done     chan struct{} // closed when nothing is read or handled any more
	err      error         // why it ended; set before done is closed
}

// NewClient checks the config and returns a Client, which does nothing before it is
// started. The error is that of ClientConfig.Validate. A nil handler is to be set
// later, by SetHandler: until then events wait as they do for a slow one.
func NewClient(c ClientConfig, h EventHandler) (*Client, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("check config: %w", err)
	}
	client := &Client{config: c.withDefaults(), level: new(slog.LevelVar), cancels: make(map[*clientReplay]context.CancelCauseFunc)}
	client.level.Set(c.LogLevel)
	client.config.Logger = withLevel(client.config.Logger, client.level)
	client.delivery = newDelivery(&client.config)
	if h != nil {
		client.delivery.setHandler(h)
	}
	return client, nil
}

// SetHandler has a handler called with all events from the next one on, in the place
// of the one before; a call under way goes on. Where there was none, the events that
// wait come first: ClientConfig.Buffer at most, as the Client reads no more than that
// ahead of its handler. It returns an error where the handler is nil, and ErrClosed
// after Close.
func (c *Client) SetHandler(h EventHandler) error {
	if h == nil {
		return errNoHandler
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == clientClosed {
		return ErrClosed
	}
	c.delivery.setHandler(h)
	return nil
}

// Config returns the config, with the defaults filled in.
func (c *Client) Config() ClientConfig { return c.config }

// Start connects in the background, reads what the engine remembers, and then what
// it publishes, until ctx is done or Stop is called. It returns ErrStarted if it
// was called before, or Stop was, ErrClosed after Close, and an error where the
// metrics can not be registered: another Client of that name may have them.
func (c *Client) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case clientNew:
	case clientClosed:
		return ErrClosed
	default:
		return ErrStarted
	}
	if err := c.start(ctx); err != nil {
		return fmt.Errorf("start client of %s: %w", c.config.Worker, err)
	}
	c.state = clientStarted
	return nil
}

func (c *Client) start(ctx context.Context) error {
	unregister, err := c.register()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	r := &clientRun{
		registry: newClientRegistry(&c.config),
		stop:     stop,
		renewals: make(chan chan<- uint64),
		done:     make(chan struct{}),
	}
	config := c.config.ingest()
	config.Metrics = r.registry
	r.in, err = New(config, &clientSink{c.delivery, ctx.Done()})
	if err != nil {
		stop()
		unregister()
		return err
	}
	c.run = r
	go func() {
		defer close(r.done)
		defer unregister()
		defer stop()
		var beside sync.WaitGroup
		beside.Go(func() { c.delivery.run(ctx) })
		beside.Go(func() { r.renew(ctx) })
		r.err = r.in.Run(ctx)
		stop()
		beside.Wait()
		c.delivery.end()
		c.config.Logger.Info("client stopped", "worker", c.config.Worker, "discarded", c.delivery.discarded.Load())
	}()
	return nil
}

// Stop ends the reading, and waits for it and for the handler's call under way: no
// call follows. Events that wait are not handled, and counted as discarded. It
// may be called more than once, and before Start, which then fails. It returns why
// the reading failed, if it did.
func (c *Client) Stop() error {
	c.mu.Lock()
	if c.state != clientClosed {
		c.state = clientStopped
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

// Close stops the Client as Stop does, ends the calls of ReplayFrom under way with
// ErrClosed, and waits for both: when it returns, nothing of the Client runs, no
// socket is open, and no metric is registered. It may be called more than once, and
// returns what Stop does. After it every method but Stop, Stats, Config and those of
// the log level returns ErrClosed, or false.
func (c *Client) Close() error {
	c.mu.Lock()
	c.state = clientClosed
	for _, cancel := range c.cancels {
		cancel(ErrClosed)
	}
	c.mu.Unlock()
	err := c.Stop()
	c.replays.Wait()
	return err
}

// Connect starts the Client, to run until Stop, unless it was started, and waits
// until there is a connection. If ctx is done before, the Client goes on trying.
func (c *Client) Connect(ctx context.Context) error {
	c.mu.Lock()
	fresh := c.state == clientNew
	c.mu.Unlock()
	if fresh {
		if err := c.Start(context.WithoutCancel(ctx)); err != nil && !errors.Is(err, ErrStarted) {
			return err
		}
	}
	return c.WaitConnected(ctx)
}

// Connected tells whether there is a connection; see ClientStats.
func (c *Client) Connected() bool {
	r, err := c.current()
	return err == nil && connected(r.source().State)
}

// WaitConnected waits until there is a connection. It returns ErrNotStarted before
// Start, ErrEnded once the Client has ended, ErrClosed after Close, and an error that is that of ctx when
// ctx, which may have a timeout, is done before.
func (c *Client) WaitConnected(ctx context.Context) error {
	r, err := c.current()
	if err != nil {
		return err
	}
	return c.wait(ctx, r, func() bool { return connected(r.source().State) })
}

// Reconnect closes the connection, makes a fresh one, and waits for it as
// WaitConnected does; when ctx is done before, the Client goes on trying. What is
// published meanwhile is fetched from the replay socket; where there is none a gap
// is told.
func (c *Client) Reconnect(ctx context.Context) error {
	r, err := c.current()
	if err != nil {
		return err
	}
	told := make(chan uint64, 1)
	var before uint64
	select {
	case r.renewals <- told:
	case <-r.done:
		return c.ended()
	case <-ctx.Done():
		return c.unconnected(ctx)
	}
	select {
	case before = <-told:
	case <-r.done:
		return c.ended()
	case <-ctx.Done():
		return c.unconnected(ctx)
	}
	return c.wait(ctx, r, func() bool { return connected(r.source().State) && r.connections() > before })
}

// wait waits until something is so, and looks for it now and then.
func (c *Client) wait(ctx context.Context, r *clientRun, so func() bool) error {
	look := time.NewTicker(c.config.PollInterval)
	defer look.Stop()
	for !so() {
		select {
		case <-look.C:
		case <-r.done:
			return c.ended()
		case <-ctx.Done():
			return c.unconnected(ctx)
		}
	}
	return nil
}

// unconnected is the error of who has waited in vain.
func (c *Client) unconnected(ctx context.Context) error {
	return fmt.Errorf("wait for a connection to %s: %w", c.config.connect(), context.Cause(ctx))
}

// ended is the error of what needs a Client that runs, where it has ended.
func (c *Client) ended() error {
	_, err := c.current()
	return err
}

// current returns what runs, ErrNotStarted, or what ran with ErrEnded or ErrClosed.
func (c *Client) current() (*clientRun, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state == clientClosed:
		return c.run, ErrClosed
	case c.run == nil && c.state == clientStopped:
		return nil, config.ErrEnded
	case c.run == nil:
		return nil, ErrNotStarted
	}
	select {
	case <-c.run.done:
		return c.run, config.ErrEnded
	default:
		return c.run, nil
	}
}

// source returns how the reading is doing. There is one source, always.
func (r *clientRun) source() SourceStatus { return r.in.Sources()[0] }

func (r *clientRun) connections() uint64 { return r.registry.read()["connections_total"] }

// renew closes the connection when it is asked to, until ctx is done, as if it had
// broken. The link makes another. It may have to wait for a batch that is handed
// on, and so for the handler.
func (r *clientRun) renew(ctx context.Context) {
	w := r.in.workers[0]
	for {
		select {
		case told := <-r.renewals:
			w.mu.Lock()
			told <- r.connections() // none is counted while the lock is held
			w.links[0].breakOff()
			w.mu.Unlock()
		case <-ctx.Done():
			return
		}
	}
}

package simulator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
)

// ErrClosed is returned by a Publisher that has been closed.
var ErrClosed = errors.New("publisher is closed")

// closeLinger bounds the time for sending the remaining messages.
const closeLinger = 200 * time.Millisecond

// Publisher owns the sockets of an engine, and publishes on request, correctly or with the faults
// of a network and of engines. It serves replay all the time. Its methods are safe for concurrent
// use, and take effect one after the other.
type Publisher struct {
	feed     *feed // used by goroutine serve only, except the wakeup and the counters
	endpoint string
	replay   string
	commands chan command
	closing  chan struct{}
	once     sync.Once
	done     chan struct{} // closed by serve after the sockets
	err      error         // set before done is closed
}

// command is an operation for the goroutine serve. Few are queued; then callers block.
type command struct {
	do   func() error
	done chan<- error
}

// PublisherConfig configures a Publisher. The zero value binds to a free port, without replay.
type PublisherConfig struct {
	SocketConfig
	BatchConfig
}

// NewPublisher returns a Publisher with its sockets bound. The caller closes it.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	enc, err := newEncoder(cfg.BatchConfig)
	if err != nil {
		return nil, fmt.Errorf("new publisher: %w", err)
	}
	s, err := openSockets(cfg.SocketConfig)
	if err != nil {
		return nil, fmt.Errorf("new publisher: %w", err)
	}
	p := &Publisher{
		feed:     &feed{sockets: s, encoder: enc, next: cfg.FirstSeq},
		endpoint: s.endpoint,
		replay:   s.replay,
		commands: make(chan command, 16),
		closing:  make(chan struct{}),
		done:     make(chan struct{}),
	}
	go p.serve()
	return p, nil
}

// Endpoint returns the endpoint that the PUB socket is bound to, with its actual port, or connects
// to.
func (p *Publisher) Endpoint() string { return p.endpoint }

// ReplayEndpoint returns the endpoint that the ROUTER socket is bound to, with its actual port; it
// is empty without replay.
func (p *Publisher) ReplayEndpoint() string { return p.replay }

// Publish sends a batch of these events with the next seq, which it returns, and buffers the batch
// for replay. Events that cannot be encoded are rejected with a *wire.EncodeError, and use no seq.
func (p *Publisher) Publish(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, true, true)
}

// Drop does what Publish does except sending: a message that the network dropped, and that replay
// returns.
func (p *Publisher) Drop(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, false, true)
}

// Forget does what Publish does except sending and buffering: a message that is lost permanently.
func (p *Publisher) Forget(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, false, false)
}

// PublishOnce does what Publish does except buffering: a message that no replay returns.
func (p *Publisher) PublishOnce(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, true, false)
}

func (p *Publisher) batch(events []wire.Event, send, remember bool) (seq uint64, err error) {
	err = p.run(func() error {
		b, err := p.feed.add(events, remember)
		if err != nil {
			return err
		}
		seq = b.seq
		if send {
			return p.feed.transmit(b)
		}
		return nil
	})
	return seq, err
}

// Subscribed returns once there are n subscriptions. A subscriber may have several.
func (p *Publisher) Subscribed(ctx context.Context, n int) error {
	err := p.feed.counters.wait(ctx, p.done, func(c counts) bool { return c.subscriptions >= n })
	if err != nil {
		return fmt.Errorf("wait for %d subscriptions: %w", n, err)
	}
	return nil
}

// Unsubscribed returns once there are no subscriptions.
func (p *Publisher) Unsubscribed(ctx context.Context) error {
	err := p.feed.counters.wait(ctx, p.done, func(c counts) bool { return c.subscriptions <= 0 })
	if err != nil {
		return fmt.Errorf("wait for no subscriptions: %w", err)
	}
	return nil
}

// Replayed returns once n replay requests have been answered in total.
func (p *Publisher) Replayed(ctx context.Context, n int) error {
	err := p.feed.counters.wait(ctx, p.done, func(c counts) bool { return c.replays >= n })
	if err != nil {
		return fmt.Errorf("wait for %d replays: %w", n, err)
	}
	return nil
}

// Requested returns once n replay requests have been received in total, answered or not.
func (p *Publisher) Requested(ctx context.Context, n int) error {
	err := p.feed.counters.wait(ctx, p.done, func(c counts) bool { return c.requests >= n })
	if err != nil {
		return fmt.Errorf("wait for %d requests for replay: %w", n, err)
	}
	return nil
}

// Replays returns the number of replay requests answered so far.
func (p *Publisher) Replays() int {
	c, _ := p.feed.counters.now()
	return c.replays
}

// Close closes the sockets, and waits for that. Published messages are sent within 200 ms, or
// dropped. Further calls return the same error.
func (p *Publisher) Close() error {
	p.once.Do(func() { close(p.closing) })
	p.feed.wakeup.wake()
	<-p.done
	return p.err
}

// run makes the goroutine serve run a function.
func (p *Publisher) run(do func() error) error {
	done := make(chan error, 1)
	select {
	case p.commands <- command{do, done}:
	case <-p.done:
		return ErrClosed
	}
	p.feed.wakeup.wake()
	select {
	case err := <-done:
		return err
	case <-p.done:
		return ErrClosed
	}
}

// serve owns the sockets until the Publisher is closed.
func (p *Publisher) serve() {
	defer close(p.done)
	var err error
	for err == nil {
		select {
		case <-p.closing:
			p.err = p.feed.close(closeLinger)
			return
		case c := <-p.commands:
			c.done <- c.do()
		default:
			err = p.feed.serve(-1)
		}
	}
	p.err = errors.Join(err, p.feed.close(0))
}

package simulator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/wire"
)

// ErrClosed is returned by a Publisher that has been closed.
var ErrClosed = errors.New("publisher is closed")

// closeLinger bounds the time for sending the remaining messages.
const closeLinger = 200 * time.Millisecond

// Publisher owns the sockets of an engine, and publishes batches on request, correctly or with faults of the network
// and the engine. It answers replay requests from NewPublisher to Close. Its methods are safe for concurrent use, and
// take effect one after the other.
type Publisher struct {
	feed     *feed // used by goroutine serve only, except wake and the counters
	endpoint string
	replay   string
	snapshot string
	commands chan command
	closing  chan struct{}
	once     sync.Once
	done     chan struct{} // closed by serve after the sockets
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
		feed:     newFeed(s, enc),
		endpoint: s.endpoint,
		replay:   s.replay,
		snapshot: s.snapshot,
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

// SnapshotEndpoint returns the endpoint that the socket for snapshots is bound to, with its actual port; it is empty
// without snapshots.
func (p *Publisher) SnapshotEndpoint() string { return p.snapshot }

// Publish sends a batch of these events with the next seq, which it returns, and buffers the batch
// for replay. See wire.Encoder for which events can be encoded.
func (p *Publisher) Publish(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, true, true)
}

// Drop does what Publish does, except that the network drops the message. Replay returns the batch.
func (p *Publisher) Drop(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, false, true)
}

// Lose assigns the next seq to a batch that is neither sent nor buffered.
func (p *Publisher) Lose(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, false, false)
}

// PublishUnbuffered does what Publish does without buffering the batch for replay.
func (p *Publisher) PublishUnbuffered(events ...wire.Event) (seq uint64, err error) {
	return p.batch(events, true, false)
}

func (p *Publisher) batch(events []wire.Event, send, buffer bool) (seq uint64, err error) {
	err = p.run(func() error {
		b := p.feed.add(events, buffer)
		seq = b.seq
		if send {
			p.feed.transmit(b)
		}
		return nil
	})
	return seq, err
}

// WaitSubscribed returns once there are at least n subscriptions. A subscriber may have several.
func (p *Publisher) WaitSubscribed(ctx context.Context, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d subscriptions", n), func(c counts) bool { return c.subscriptions >= n })
}

// WaitUnsubscribed returns once there are no subscriptions.
func (p *Publisher) WaitUnsubscribed(ctx context.Context) error {
	return p.wait(ctx, "no subscriptions", func(c counts) bool { return c.subscriptions <= 0 })
}

// WaitReplays returns once n replay requests have been answered in total.
func (p *Publisher) WaitReplays(ctx context.Context, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d replays", n), func(c counts) bool { return c.replays >= n })
}

// WaitReplayRequests returns once n replay requests have been received in total, answered or not.
func (p *Publisher) WaitReplayRequests(ctx context.Context, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d requests for replay", n), func(c counts) bool { return c.requests >= n })
}

// WaitSnapshots returns once n requests for a snapshot have been received in total, answered or not.
func (p *Publisher) WaitSnapshots(ctx context.Context, n int) error {
	return p.wait(ctx, fmt.Sprintf("%d requests for snapshots", n), func(c counts) bool { return c.snapshots >= n })
}

func (p *Publisher) wait(ctx context.Context, what string, enough func(counts) bool) error {
	if err := p.feed.counters.wait(ctx, p.done, enough); err != nil {
		return fmt.Errorf("wait for %s: %w", what, err)
	}
	return nil
}

// Replays returns the number of replay requests answered so far.
func (p *Publisher) Replays() int {
	c, _ := p.feed.counters.now()
	return c.replays
}

// Close closes the sockets. Messages that cannot be sent within 200 ms are dropped. It returns nil.
func (p *Publisher) Close() error {
	p.once.Do(func() { close(p.closing) })
	p.feed.wake()
	<-p.done
	return nil
}

// run calls do on the goroutine of serve, and returns its error.
func (p *Publisher) run(do func() error) error {
	done := make(chan error, 1)
	select {
	case p.commands <- command{do, done}:
	case <-p.done:
		return ErrClosed
	}
	p.feed.wake()
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
	defer p.feed.closePorts(closeLinger)
	for {
		select {
		case <-p.closing:
			return
		case c := <-p.commands:
			c.done <- c.do()
		default:
			p.feed.serve(-1)
		}
	}
}

package ingest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/wire"
)

const (
	// maxTransfers is how many replays are read at a time. An engine answers one from
	// the thread that publishes, and the replies are kept until they are applied.
	maxTransfers = 8
	// maxFirstRequests is how many sockets are waited for at a time that have never
	// answered, and firstReplyTimeout how long for each at most. They are apart from
	// the others, so that silent ones keep nobody from a repair.
	maxFirstRequests  = 32
	firstReplyTimeout = time.Second
	// transferShare is how long one replay is read while others wait. It goes on after
	// them.
	transferShare = 3 * time.Second
	// replayPause is how long an engine may say nothing once it answers: it sends all
	// in one go, of which its socket drops what goes beyond its high-water mark, the
	// end marker included. What is missing is then asked for again.
	replayPause = time.Second

	// How long a request waits for its turn, while live batches are held back. Before
	// first contact nothing is known of the engine, so that waiting costs least.
	firstRequestPatience = 10 * time.Second
	transferPatience     = 10 * time.Second
)

var (
	errReplayRefused = errors.New("nothing listens there")
	errReplaySilent  = errors.New("no answer")
	errReplayBusy    = errors.New("too many replays are in progress")
	// errReplayYielded ends a request for others' sake. It brought something.
	errReplayYielded = errors.New("interrupted: others are waiting")
	// errReplayOverrun ends a request whose replies came faster than they could be
	// applied.
	errReplayOverrun = errors.New("replies were dropped")
)

// replays asks engines' replay sockets, some at a time.
type replays struct {
	sockets sockets
	timeout time.Duration
	inbox   func(*transport.Socket) *inbox
	// A request of a socket that has answered before needs a transfer slot; any other
	// one of first, which it exchanges when the first reply has come. Both are FIFO.
	first, transfers *semaphore.Weighted
	// queued counts the requests that wait for a transfer slot.
	queued atomic.Int64
	// firstReply and firstPatience are firstReplyTimeout and firstRequestPatience.
	firstReply, firstPatience time.Duration
	inProgress                *prometheus.GaugeVec // by state
}

func newReplays(k sockets, timeout time.Duration, box func(*transport.Socket) *inbox) *replays {
	return &replays{
		sockets: k, timeout: timeout, inbox: box,
		first: semaphore.NewWeighted(maxFirstRequests), transfers: semaphore.NewWeighted(maxTransfers),
		firstReply: firstReplyTimeout, firstPatience: firstRequestPatience,
		inProgress: gauge("replays_in_progress", "Requests to replay sockets, by state: waiting for their turn, for the first reply, or being read.", "state"),
	}
}

// replayRequest is what a replay socket is asked.
type replayRequest struct {
	endpoint string
	from     uint64
	// responsive reports whether the socket has answered before.
	responsive bool
	// patience is how long to wait for a transfer slot.
	patience time.Duration
	// waited is called with how long the request has waited for a slot, and sent before it
	// is sent; both may be nil.
	waited func(time.Duration)
	sent   func()
}

// read asks an endpoint for the batches from a seq on, and calls each with those
// that come. It returns nil once the end marker came or each returned false.
//
// A socket of its own for each request keeps the replies to one from being taken for
// those of another, and finds out whether the engine can be reached.
func (r *replays) read(ctx context.Context, q replayRequest, each func(seq uint64, payload []byte) bool) error {
	slot, patience := r.transfers, q.patience
	if !q.responsive {
		slot, patience = r.first, r.firstPatience
	}
	turn, err := r.acquire(ctx, slot, patience, q.waited)
	if err != nil {
		return err
	}
	x := &exchange{replays: r, replayRequest: q, slot: turn}
	defer x.release()
	resolving, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	address, err := config.Resolve(resolving, q.endpoint)
	if err != nil {
		return err
	}
	c, err := r.sockets.dealer(address)
	if err != nil {
		return err
	}
	err = errors.Join(x.converse(ctx, c, each), c.close())
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("replay from %d: %w", q.from, err)
	}
	return nil
}

// slot is a turn that a request has, until it is released.
type slot struct {
	of    *semaphore.Weighted
	state prometheus.Gauge
}

func (s *slot) release() {
	if s != nil {
		s.state.Dec()
		s.of.Release(1)
	}
}

// acquire waits for a turn. It returns errReplayBusy where none comes in time.
func (r *replays) acquire(ctx context.Context, of *semaphore.Weighted, patience time.Duration, waited func(time.Duration)) (*slot, error) {
	state := r.inProgress.WithLabelValues("transferring")
	if of == r.first {
		state = r.inProgress.WithLabelValues("asking")
	}
	if !of.TryAcquire(1) {
		waiting := r.inProgress.WithLabelValues("waiting")
		waiting.Inc()
		if of == r.transfers {
			r.queued.Add(1)
			defer r.queued.Add(-1)
		}
		began := time.Now()
		bounded, cancel := context.WithTimeout(ctx, patience)
		err := of.Acquire(bounded, 1)
		cancel()
		waiting.Dec()
		if waited != nil {
			waited(time.Since(began))
		}
		if err != nil && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, errReplayBusy
		}
	}
	state.Inc()
	return &slot{of: of, state: state}, nil
}

// exchange is one request and its replies.
type exchange struct {
	*replays
	replayRequest
	slot     *slot
	since    time.Time // when the transfer slot was acquired
	answered bool
}

func (x *exchange) release() { x.slot.release() }

// begin exchanges the slot of a first request for one of a transfer.
func (x *exchange) begin(ctx context.Context) error {
	x.answered = true
	if !x.responsive {
		x.release()
		x.slot = nil
		var err error
		if x.slot, err = x.acquire(ctx, x.transfers, x.patience, x.waited); err != nil {
			return err
		}
	}
	x.since = time.Now()
	return nil
}

// yields reports whether others are to have the transfer slot.
func (x *exchange) yields() bool {
	return x.queued.Load() > 0 && time.Since(x.since) >= transferShare
}

func (x *exchange) converse(ctx context.Context, c *conn, each func(uint64, []byte) bool) error {
	stop := context.AfterFunc(ctx, c.socket.Interrupt)
	defer stop()
	refused := make(chan error, 1)
	go func() { refused <- c.refused() }()
	defer func() {
		c.monitor.Interrupt()
		<-refused
	}()
	if x.sent != nil {
		x.sent()
	}
	if err := c.socket.Send(nil, binary.BigEndian.AppendUint64(nil, x.from)); err != nil {
		return err
	}
	box := x.inbox(c.socket)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		box.drain()
	}()
	defer func() {
		c.socket.Interrupt()
		<-drained
		box.discard()
	}()
	silence := x.timeout
	if !x.responsive {
		silence = min(silence, x.firstReply)
	}
	for {
		until := time.Now().Add(silence)
		p, err := box.next(func() time.Time { return until })
		switch {
		case errors.Is(err, transport.ErrInterrupted) && ctx.Err() == nil:
			return errReplayRefused
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w for %v", errReplaySilent, silence)
		case err != nil:
			return err
		}
		more, err := x.replies(ctx, p, each)
		box.giveBack(p)
		if err != nil || !more {
			return err
		}
		silence = min(x.timeout, replayPause)
	}
}

// replies takes some replies, and reports whether more are wanted.
func (x *exchange) replies(ctx context.Context, p *parcel, each func(uint64, []byte) bool) (more bool, err error) {
	if !x.answered {
		if err := x.begin(ctx); err != nil {
			return false, err
		}
	}
	for i := range p.size() {
		m := p.batch.Message(i)
		if m.Count == 0 {
			return false, errReplayOverrun
		}
		if m.Count != len(m.Frames) {
			return false, fmt.Errorf("reply of %d frames: %w", m.Count, wire.ErrReply)
		}
		seq, payload, end, err := wire.ParseReply(m.Frames)
		if err != nil {
			return false, err
		}
		if end || !each(seq, payload) {
			return false, nil
		}
	}
	switch {
	case p.losses():
		return false, errReplayOverrun
	case x.yields():
		return false, errReplayYielded
	}
	return true, nil
}

// refused interrupts the socket where nobody takes its connection, and returns
// when the monitor is interrupted, or there is nothing more to see.
func (c *conn) refused() error {
	for {
		if err := c.monitor.Wait(); err != nil {
			return err
		}
		for {
			e, ok, err := c.monitor.Next()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			switch e.Kind {
			case transport.ConnectRetried, transport.Closed, transport.Disconnected, transport.HandshakeFailed:
				c.socket.Interrupt()
				return nil
			default: // it is being made, or stands
			}
		}
	}
}

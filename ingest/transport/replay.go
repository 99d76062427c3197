package transport

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
	"github.com/kvcast/kvcast/ingest/wire"
)

const (
	// maxTransfers is how many replays are read at a time. An engine answers one from the
	// thread that publishes, and the replies are buffered until they are applied.
	maxTransfers = 8
	// maxFirstRequests is how many sockets that have never answered are waited for at a
	// time, and firstReplyTimeout how long each at most. They have slots of their own, so
	// that silent ones keep no other engine from a repair.
	maxFirstRequests  = 32
	firstReplyTimeout = time.Second
	// transferShare is how long one replay is read while others wait. It is resumed after
	// them.
	transferShare = 3 * time.Second
	// replayPause is how long a reply may take that follows another. An engine sends all at
	// once, and its socket drops those beyond its high-water mark, with the end marker;
	// what is missing is requested again.
	replayPause = time.Second
	// slotPatience is how long a request waits for a slot.
	slotPatience = 10 * time.Second
)

// Errors of Requests.Replay.
var (
	// ErrReplayRefused: nothing listens at the endpoint.
	ErrReplayRefused = errors.New("nothing listens there")
	// ErrReplaySilent: no reply, or no further one, came in time.
	ErrReplaySilent = errors.New("no answer")
	// ErrReplayBusy: the request was not sent, as too many others are in progress.
	ErrReplayBusy = errors.New("too many replays are in progress")
	// ErrReplayYielded: the request was interrupted after some replies, as others wait.
	ErrReplayYielded = errors.New("interrupted: others are waiting")
	// ErrReplayOverrun: replies were dropped, as they came faster than they were applied.
	ErrReplayOverrun = errors.New("replies were dropped")
)

// Requests sends requests to replay sockets, a bounded number at a time. It is safe for
// concurrent use. Its exported fields must not change while requests are in progress.
type Requests struct {
	context *Context
	timeout time.Duration
	inbox   InboxConfig
	// A request to a socket that answered the last one needs a slot of transfers. Any other
	// needs one of first, which it exchanges when the first reply has come. Both are FIFO.
	first, transfers *semaphore.Weighted
	queued           atomic.Int64         // requests that wait for a transfer slot
	inProgress       *prometheus.GaugeVec // by state: waiting, asking, transferring

	// FirstReply is how long the first reply of a socket may take that did not answer the
	// last request, and FirstPatience how long such a request waits for a slot.
	FirstReply, FirstPatience time.Duration
}

// NewRequests returns Requests whose replies may each take timeout. inProgress has the
// label state.
func NewRequests(c *Context, timeout time.Duration, inbox InboxConfig, inProgress *prometheus.GaugeVec) *Requests {
	return &Requests{
		context: c, timeout: timeout, inbox: inbox, inProgress: inProgress,
		first: semaphore.NewWeighted(maxFirstRequests), transfers: semaphore.NewWeighted(maxTransfers),
		FirstReply: firstReplyTimeout, FirstPatience: slotPatience,
	}
}

// Request is a request for the batches from a seq on.
type Request struct {
	Endpoint string
	From     uint64
	// Responsive reports whether the socket answered the last request.
	Responsive bool
	// Patience is how long to wait for a transfer slot; 0 means 10 s.
	Patience time.Duration
	// Waited is called with how long the request has waited for a slot, and Sent before it
	// is sent; both may be nil.
	Waited func(time.Duration)
	Sent   func()
}

// Replay sends a request, and calls each with every batch of the replies until it returns
// false. It returns nil then, and when the end marker has come.
//
// Each request has a socket of its own, so that its replies cannot be confused with those
// to another one.
func (r *Requests) Replay(ctx context.Context, q Request, each func(seq uint64, payload []byte) bool) error {
	if q.Patience == 0 {
		q.Patience = slotPatience
	}
	slots, patience := r.transfers, q.Patience
	if !q.Responsive {
		slots, patience = r.first, r.FirstPatience
	}
	s, err := r.acquire(ctx, slots, patience, q.Waited)
	if err != nil {
		return err
	}
	x := &exchange{Requests: r, Request: q, slot: s}
	defer func() { x.slot.release() }()
	resolving, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	address, err := config.Resolve(resolving, q.Endpoint)
	if err != nil {
		return err
	}
	conn, err := r.context.dial(address)
	if err != nil {
		return err
	}
	err = errors.Join(x.run(ctx, conn, each), conn.Close())
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("replay from %d: %w", q.From, err)
	}
	return nil
}

// slot is held by a request until it is released; nil is none.
type slot struct {
	semaphore *semaphore.Weighted
	state     prometheus.Gauge
}

func (s *slot) release() {
	if s != nil {
		s.state.Dec()
		s.semaphore.Release(1)
	}
}

// acquire waits for a slot, and returns ErrReplayBusy where none is free in time.
func (r *Requests) acquire(ctx context.Context, slots *semaphore.Weighted, patience time.Duration, waited func(time.Duration)) (*slot, error) {
	state := r.inProgress.WithLabelValues("transferring")
	if slots == r.first {
		state = r.inProgress.WithLabelValues("asking")
	}
	if !slots.TryAcquire(1) {
		waiting := r.inProgress.WithLabelValues("waiting")
		waiting.Inc()
		if slots == r.transfers {
			r.queued.Add(1)
			defer r.queued.Add(-1)
		}
		began := time.Now()
		bounded, cancel := context.WithTimeout(ctx, patience)
		err := slots.Acquire(bounded, 1)
		cancel()
		waiting.Dec()
		if waited != nil {
			waited(time.Since(began))
		}
		if err != nil && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, ErrReplayBusy
		}
	}
	state.Inc()
	return &slot{semaphore: slots, state: state}, nil
}

// exchange is one request and its replies.
type exchange struct {
	*Requests
	Request
	slot     *slot
	since    time.Time // when the transfer slot was acquired
	answered bool
}

// run sends the request and reads the replies.
func (x *exchange) run(ctx context.Context, conn *Conn, each func(uint64, []byte) bool) error {
	stop := context.AfterFunc(ctx, conn.Socket.Interrupt)
	defer stop()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		conn.interruptOnFailure()
	}()
	defer func() {
		conn.Monitor.Interrupt()
		<-watched
	}()
	if x.Sent != nil {
		x.Sent()
	}
	if err := conn.Socket.Send(nil, binary.BigEndian.AppendUint64(nil, x.From)); err != nil {
		return err
	}
	inbox := NewInbox(conn, x.inbox)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		inbox.Drain()
	}()
	defer func() {
		conn.Socket.Interrupt()
		<-drained
		inbox.Discard()
	}()
	silence := x.timeout
	if !x.Responsive {
		silence = min(silence, x.FirstReply)
	}
	for {
		until := time.Now().Add(silence)
		c, err := inbox.Next(func() time.Time { return until })
		switch {
		case errors.Is(err, ErrInterrupted) && ctx.Err() == nil:
			return ErrReplayRefused
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w for %v", ErrReplaySilent, silence)
		case err != nil:
			return err
		}
		more, err := x.read(ctx, c, each)
		inbox.Recycle(c)
		if err != nil || !more {
			return err
		}
		silence = min(x.timeout, replayPause)
	}
}

// read reads some replies, and reports whether more are wanted.
func (x *exchange) read(ctx context.Context, c *Chunk, each func(uint64, []byte) bool) (more bool, err error) {
	if !x.answered {
		if err := x.startTransfer(ctx); err != nil {
			return false, err
		}
	}
	for i := range c.Len() {
		m := c.Batch.Message(i)
		if m.Count == 0 {
			return false, ErrReplayOverrun
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
	case c.Drops != nil:
		return false, ErrReplayOverrun
	case x.yields():
		return false, ErrReplayYielded
	}
	return true, nil
}

// yields reports whether the transfer is interrupted in favour of others.
func (x *exchange) yields() bool {
	return x.queued.Load() > 0 && time.Since(x.since) >= transferShare
}

// startTransfer exchanges the slot of a first request for one of a transfer.
func (x *exchange) startTransfer(ctx context.Context) error {
	x.answered = true
	if !x.Responsive {
		x.slot.release()
		x.slot = nil
		var err error
		if x.slot, err = x.acquire(ctx, x.transfers, x.Patience, x.Waited); err != nil {
			return err
		}
	}
	x.since = time.Now()
	return nil
}

// interruptOnFailure interrupts the socket when its connection fails. It returns then, and
// when the monitor is interrupted.
func (c *Conn) interruptOnFailure() {
	for c.Monitor.Wait() == nil {
		for {
			e, ok, err := c.Monitor.Next()
			if err != nil {
				return
			}
			if !ok {
				break
			}
			switch e.Kind {
			case ConnectRetried, Closed, Disconnected, HandshakeFailed:
				c.Socket.Interrupt()
				return
			default: // it is being made, or established
			}
		}
	}
}

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
	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// maxTransfers is how many replays are read at a time. An engine answers a request from
	// the thread that publishes, and the replies are buffered until they are applied.
	maxTransfers = 8
	// maxFirstRequests is how many sockets that did not answer the last request are waited
	// for at a time, and firstReplyTimeout how long each at most, doubled by each failure. These requests have slots
	// of their own, so that silent sockets do not delay the repairs of other engines.
	maxFirstRequests  = 32
	firstReplyTimeout = time.Second
	// delayFactor is how much longer replies may take than the time limits, as a multiple of how late goroutines run.
	delayFactor = 20
	// transferShare is how long one replay is read while others wait. The replay continues after them.
	transferShare = 3 * time.Second
	// replayPause is how long the next reply may take after the first one. An engine sends all at once, and its socket drops replies beyond
	// its high-water mark, with the end marker. Missing batches are requested again.
	replayPause = time.Second
	// slotPatience is how long a request waits for a slot.
	slotPatience = 10 * time.Second
)

// Errors of Requests.Replay.
var (
	// ErrReplayRefused means that nothing listens at the endpoint.
	ErrReplayRefused = errors.New("nothing listens there")
	// ErrReplayBroken means that the connection has ended before the end of the answer.
	ErrReplayBroken = errors.New("the connection has ended before the end of the answer")
	// ErrReplaySilent means that no reply, or no further one, came in time.
	ErrReplaySilent = errors.New("no answer")
	// ErrReplayBusy means that the request was not sent, because too many others are in progress.
	ErrReplayBusy = errors.New("too many replays are in progress")
	// ErrReplayYielded means that the request was interrupted after some replies, because others wait.
	ErrReplayYielded = errors.New("interrupted: others are waiting")
	// ErrReplayOverrun means that replies were dropped, because they came faster than they were applied.
	ErrReplayOverrun = errors.New("replies were dropped")
)

// Requests sends requests to replay sockets and for snapshots, a bounded number at a time. It is safe for
// concurrent use. Its exported fields must not change while requests are in progress.
type Requests struct {
	transport Transport
	timeout   time.Duration
	onDrop    func(n int)
	// A request to a socket that answered the last request needs a slot of transfers. Any
	// other needs a slot of first, and exchanges it when the first reply has come.
	first, transfers *slots
	snapshots        *slots
	waiting          prometheus.Gauge

	// FirstReply is how long the first reply of a socket may take that did not answer the
	// last request, doubled by each failure, and FirstPatience how long such a request waits for a slot.
	FirstReply, FirstPatience time.Duration
	// Delay returns how late goroutines run at present: on a busy machine, replies may take longer. The default returns 0.
	Delay func() time.Duration
	// Frames sends the requests for snapshots, whose frames have SnapshotBytes together at most. The default is MaxSnapshotBytes.
	Frames        FrameRequester
	SnapshotBytes int64
}

// NewRequests returns Requests whose replies may each take timeout. inProgress has the
// label state: waiting, asking, transferring or snapshot.
func NewRequests(t Transport, timeout time.Duration, onDrop func(n int), inProgress *prometheus.GaugeVec) *Requests {
	return &Requests{
		transport: t, timeout: timeout, onDrop: onDrop,
		first:      &slots{semaphore: semaphore.NewWeighted(maxFirstRequests), used: inProgress.WithLabelValues("asking")},
		transfers:  &slots{semaphore: semaphore.NewWeighted(maxTransfers), used: inProgress.WithLabelValues("transferring")},
		snapshots:  &slots{semaphore: semaphore.NewWeighted(maxSnapshots), used: inProgress.WithLabelValues("snapshot")},
		waiting:    inProgress.WithLabelValues("waiting"),
		FirstReply: firstReplyTimeout, FirstPatience: slotPatience, SnapshotBytes: MaxSnapshotBytes,
		Delay: func() time.Duration { return 0 },
	}
}

// slots is a FIFO semaphore of requests.
type slots struct {
	semaphore *semaphore.Weighted
	used      prometheus.Gauge
	queued    atomic.Int64 // requests that wait
}

func (s *slots) release() {
	s.used.Dec()
	s.semaphore.Release(1)
}

// Request is a request for the batches from a seq on.
type Request struct {
	Endpoint string
	From     uint64
	// Responsive reports whether the socket answered the last request, and Failures how many requests in a row brought nothing.
	Responsive bool
	Failures   int
	// Patience is how long to wait for a transfer slot; 0 means 10 s.
	Patience time.Duration
	// Waited is called with how long the request has waited for a slot, and Sent before it is sent; both may be nil.
	Waited func(time.Duration)
	Sent   func()
}

// Replay sends a request, and calls each with every batch of the replies until each returns
// false. It returns nil then, and after the end marker.
//
// Each request has a socket of its own, so that its replies cannot be confused with the replies to another request.
func (r *Requests) Replay(ctx context.Context, q Request, each func(seq uint64, payload []byte) bool) error {
	if q.Patience == 0 {
		q.Patience = slotPatience
	}
	x := &exchange{Requests: r, Request: q}
	slots, patience := r.transfers, q.Patience
	if !q.Responsive {
		slots, patience = r.first, r.FirstPatience
	}
	if err := x.acquire(ctx, slots, patience); err != nil {
		return err
	}
	defer x.release()
	return x.send(ctx, fmt.Sprintf("replay from %d", q.From), func(address string) (Receiver, error) {
		return r.transport.Request(address, r.onDrop, nil, binary.BigEndian.AppendUint64(nil, q.From))
	}, func(receiver Receiver) error { return x.run(ctx, receiver, each) })
}

// exchange is one request and its replies.
type exchange struct {
	*Requests
	Request
	slots    *slots    // the semaphore of the acquired slot; nil without a slot
	since    time.Time // when the transfer slot was acquired
	answered bool
}

// send sends a request to the address of the endpoint, and reads the replies. what is added to errors of the replies.
func (x *exchange) send(ctx context.Context, what string, open func(address string) (Receiver, error), read func(Receiver) error) error {
	resolving, cancel := context.WithTimeout(ctx, x.timeout)
	defer cancel()
	address, err := config.Resolve(resolving, x.Endpoint)
	if err != nil {
		return err
	}
	if x.Sent != nil {
		x.Sent()
	}
	receiver, err := open(address)
	if err != nil {
		return err
	}
	err = errors.Join(read(receiver), receiver.Close())
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// acquire waits for a slot. It returns ErrReplayBusy if none is free in time.
func (x *exchange) acquire(ctx context.Context, s *slots, patience time.Duration) error {
	if !s.semaphore.TryAcquire(1) {
		s.queued.Add(1)
		err := x.wait(ctx, s.semaphore, patience)
		s.queued.Add(-1)
		if err != nil {
			return err
		}
	}
	s.used.Inc()
	x.slots = s
	return nil
}

// wait waits for a slot of a semaphore. It returns ErrReplayBusy if none is free in time.
func (x *exchange) wait(ctx context.Context, s *semaphore.Weighted, patience time.Duration) error {
	if s.TryAcquire(1) {
		return nil
	}
	began := time.Now()
	x.waiting.Inc()
	bounded, cancel := context.WithTimeout(ctx, patience)
	err := s.Acquire(bounded, 1)
	cancel()
	x.waiting.Dec()
	if x.Waited != nil {
		x.Waited(time.Since(began))
	}
	switch {
	case ctx.Err() != nil && err != nil:
		return ctx.Err()
	case err != nil:
		return ErrReplayBusy
	}
	return nil
}

// release releases the acquired slot, if there is one.
func (x *exchange) release() {
	if x.slots != nil {
		x.slots.release()
		x.slots = nil
	}
}

// run reads the replies.
func (x *exchange) run(ctx context.Context, r Receiver, each func(uint64, []byte) bool) error {
	stop := context.AfterFunc(ctx, r.Interrupt)
	defer stop()
	silence := x.patience()
	until := time.Now().Add(silence)
	ended := ErrReplayRefused // why, if the connection has ended
	for {
		c, err := r.Next(func() time.Time { return until })
		switch {
		case errors.Is(err, ErrEnded):
			return ended
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w for %v", ErrReplaySilent, silence)
		case err != nil:
			return err
		}
		for _, e := range c.Events {
			switch {
			case e.Kind == Disconnected && e.Err != nil:
				ended = fmt.Errorf("%w: %w", ErrReplayBroken, e.Err)
			case e.Kind != Failed:
				ended = ErrReplayBroken
			}
		}
		if len(c.Messages) > 0 || c.Drops != nil {
			more, err := x.read(ctx, c, each)
			if err != nil || !more {
				r.Recycle(c)
				return err
			}
			silence = x.extended(min(x.timeout, replayPause))
			until = time.Now().Add(silence)
		}
		r.Recycle(c)
	}
}

// patience returns how long the first reply may take.
func (x *exchange) patience() time.Duration {
	if x.Responsive {
		return x.extended(x.timeout)
	}
	return x.extended(min(x.timeout, x.FirstReply<<min(x.Failures, 10)))
}

// extended returns a time limit on a machine that is as busy as this one.
func (x *exchange) extended(limit time.Duration) time.Duration { return limit + delayFactor*x.Delay() }

// read reads some replies, and reports whether more are wanted.
func (x *exchange) read(ctx context.Context, c *Chunk, each func(uint64, []byte) bool) (more bool, err error) {
	if !x.answered {
		if err := x.startTransfer(ctx); err != nil {
			return false, err
		}
	}
	for _, m := range c.Messages {
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
	case x.mustYield():
		return false, ErrReplayYielded
	}
	return true, nil
}

// mustYield reports whether the transfer has used its share while others wait.
func (x *exchange) mustYield() bool {
	return x.transfers.queued.Load() > 0 && time.Since(x.since) >= transferShare
}

// startTransfer exchanges the slot of a first request for a transfer slot.
func (x *exchange) startTransfer(ctx context.Context) error {
	x.answered = true
	if !x.Responsive {
		x.release()
		if err := x.acquire(ctx, x.transfers, x.Patience); err != nil {
			return err
		}
	}
	x.since = time.Now()
	return nil
}

package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
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
	// DelayFactor is how much longer peers may take than the time limits, as a multiple of how late goroutines run.
	DelayFactor = 20
	// transferShare is how long one replay is read while others wait, and slowShare how long one that brings less than minTransferRate bytes a
	// second. The replay continues after them.
	transferShare   = 3 * time.Second
	slowShare       = transferShare / 6
	minTransferRate = 64 << 10
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
	// Sockets of engines that kvcast connects to, and those that peers name, have slots of their own.
	engines, peers replaySlots
	snapshots      *slots
	waiting        prometheus.Gauge

	// FirstReply is how long the first reply of a socket may take that did not answer the
	// last request, doubled by each failure, and FirstPatience how long such a request waits for a slot.
	FirstReply, FirstPatience time.Duration
	// Delay returns how late goroutines run at present: on a busy machine, replies may take longer. The default returns 0.
	Delay func() time.Duration
	// Frames sends the requests for snapshots, whose frames have SnapshotBytes together at most. The default is MaxSnapshotBytes.
	Frames        FrameRequester
	SnapshotBytes int64
	// Peers sends the requests to sockets that peers name. The default is that of all others.
	Peers Transport
}

// replaySlots are the slots of requests to replay sockets. A request to a socket that answered the last request needs a slot of transfers.
// Any other needs a slot of first, and exchanges it when the first reply has come.
type replaySlots struct{ first, transfers *slots }

// NewRequests returns Requests whose replies may each take timeout. inProgress has the
// label state: waiting, asking, transferring or snapshot.
func NewRequests(t Transport, timeout time.Duration, onDrop func(n int), inProgress *prometheus.GaugeVec) *Requests {
	asking, transferring := inProgress.WithLabelValues("asking"), inProgress.WithLabelValues("transferring")
	return &Requests{
		transport: t, timeout: timeout, onDrop: onDrop, Peers: t,
		engines:    replaySlots{newSlots(maxFirstRequests, asking), newSlots(maxTransfers, transferring)},
		peers:      replaySlots{newSlots(maxFirstRequests, asking), newSlots(maxTransfers, transferring)},
		snapshots:  newSlots(maxSnapshots, inProgress.WithLabelValues("snapshot")),
		waiting:    inProgress.WithLabelValues("waiting"),
		FirstReply: firstReplyTimeout, FirstPatience: slotPatience, SnapshotBytes: MaxSnapshotBytes,
		Delay: func() time.Duration { return 0 },
	}
}

// slots are places for requests. Of those that wait, that of the address with the fewest comes next.
type slots struct {
	shares *budget.Shares
	used   prometheus.Gauge
}

func newSlots(n int64, used prometheus.Gauge) *slots {
	return &slots{budget.NewShares(budget.New("", n), n), used}
}

// Request is a request for the batches from a seq on.
type Request struct {
	Endpoint string
	From     uint64
	// Peer is the address of the peer that has named the endpoint; not valid if kvcast connects to the engine.
	Peer netip.Prefix
	// Responsive reports whether the socket answered the last request, and Failures how many requests in a row brought nothing.
	Responsive bool
	Failures   int
	// Patience is how long to wait for a transfer slot; 0 means 10 s.
	Patience time.Duration
	// Waited is called with how long the request has waited for a slot, and Sent before it is sent; both may be nil. They are called again
	// if the request waits or is sent again.
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
	x := &exchange{Requests: r, Request: q, of: &r.engines}
	t := r.transport
	if q.Peer.IsValid() {
		x.of, t = &r.peers, r.Peers
	}
	slots, patience := x.of.transfers, q.Patience
	if !q.Responsive {
		slots, patience = x.of.first, r.FirstPatience
	}
	if err := x.acquire(ctx, slots, patience); err != nil {
		return err
	}
	defer x.release()
	for {
		err := x.send(ctx, fmt.Sprintf("replay from %d", q.From), func(address string) (Receiver, error) {
			return t.Request(address, r.onDrop, nil, binary.BigEndian.AppendUint64(nil, q.From))
		}, func(receiver Receiver) error { return x.run(ctx, receiver, each) })
		if !errors.Is(err, errNoTransferSlot) {
			return err
		}
		x.release()
		x.Responsive = true
		if err := x.acquire(ctx, x.of.transfers, q.Patience); err != nil {
			return err
		}
	}
}

// errNoTransferSlot is the error of a first request that was answered while there was no transfer slot: it is sent again when there is one. The
// connection and the replies would take memory meanwhile.
var errNoTransferSlot = errors.New("there is no transfer slot")

// exchange is one request and its replies.
type exchange struct {
	*Requests
	Request
	of       *replaySlots
	slots    *slots    // of the acquired slot; nil without a slot
	since    time.Time // when the first reply came, with a transfer slot
	bytes    int       // of the replies
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
	if s.shares.Reserve(x.Peer, 1) != nil {
		if err := x.wait(ctx, patience, func(ctx context.Context) error { return s.shares.Acquire(ctx, x.Peer, 1) }); err != nil {
			return err
		}
	}
	s.used.Inc()
	x.slots = s
	return nil
}

// wait waits until acquire has acquired something. It returns ErrReplayBusy if it has not in time.
func (x *exchange) wait(ctx context.Context, patience time.Duration, acquire func(context.Context) error) error {
	began := time.Now()
	x.waiting.Inc()
	bounded, cancel := context.WithTimeout(ctx, patience)
	err := acquire(bounded)
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
		x.slots.used.Dec()
		x.slots.shares.Release(x.Peer, 1)
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
		check := time.Now().Add(transferShare)
		c, err := r.Next(func() time.Time {
			if check.Before(until) {
				return check
			}
			return until
		})
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(until):
			if x.slots == x.of.transfers && x.of.transfers.shares.Waiting() > 0 {
				return ErrReplayYielded
			}
			continue
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
			more, err := x.read(c, each)
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
func (x *exchange) extended(limit time.Duration) time.Duration { return limit + DelayFactor*x.Delay() }

// read reads some replies, and reports whether more are wanted.
func (x *exchange) read(c *Chunk, each func(uint64, []byte) bool) (more bool, err error) {
	if !x.answered {
		if !x.transfers() {
			return false, errNoTransferSlot
		}
		x.answered, x.since = true, time.Now()
	}
	for _, m := range c.Messages {
		if m.Count == 0 {
			return false, ErrReplayOverrun
		}
		if m.Count != len(m.Frames) {
			return false, fmt.Errorf("reply of %d frames: %w", m.Count, wire.ErrReply)
		}
		x.bytes += m.Bytes()
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

// mustYield reports whether the transfer has used its share, or is slow, while another waits for its slot.
func (x *exchange) mustYield() bool {
	took := time.Since(x.since)
	slow := took >= slowShare && float64(x.bytes) < took.Seconds()*minTransferRate
	return (slow || took >= transferShare) && x.of.transfers.shares.Waiting() > 0
}

// transfers reports whether the request has a transfer slot, for which it exchanges the slot of a first request.
func (x *exchange) transfers() bool {
	if x.slots == x.of.transfers {
		return true
	}
	if x.of.transfers.shares.Reserve(x.Peer, 1) != nil {
		return false
	}
	x.release()
	x.of.transfers.used.Inc()
	x.slots = x.of.transfers
	return true
}

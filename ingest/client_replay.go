package ingest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// ErrNoReplay is returned by ReplayFrom where there is no replay socket.
var ErrNoReplay = errors.New("there is no replay socket")

// replayHold is how many replies an engine keeps for who reads them slowly: it
// drops what is more without a word.
const replayHold = 1000

// ReplayFrom asks the engine's replay socket for the batches that it remembers from
// a seq on, up to its newest, and calls h with their events, in order and each
// once. Batches that the engine does not give are told by an EventGap, which
// includes those that it has forgotten.
//
// It has a connection of its own: it needs no Start, is ended by Close but not by
// Stop, and what the Client reads meanwhile, and calls its own handler with, goes on
// beside it. It returns nil once all there is was read, and otherwise the error, or
// the panic as a PanicError, of h; ErrNoReplay; ErrClosed; or why the engine does not
// answer.
func (c *Client) ReplayFrom(ctx context.Context, seq uint64, h EventHandler) (err error) {
	if c.config.replay() == "" {
		return fmt.Errorf("replay from %d: %w", seq, ErrNoReplay)
	}
	if h == nil {
		return errNoHandler
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &clientReplay{config: &c.config, handler: h, next: seq}
	if err := c.beginReplay(r, cancel); err != nil {
		return err
	}
	defer c.endReplay(r)
	zctx, err := zmq4.NewContext()
	if err != nil {
		return fmt.Errorf("create ZeroMQ context: %w", err)
	}
	k := sockets{zctx: zctx, reconnectMin: c.config.ReconnectMin, reconnectMax: c.config.ReconnectMax}
	batches := sync.Pool{New: newBatch}
	blockSize := wire.BlockSize{Tokens: c.config.BlockSize, Configured: c.config.BlockSize != 0}
	r.rules = wire.NewRules(&blockSize)
	err = errors.Join(r.run(ctx, newReplays(k, c.config.ReplayTimeout, func(s *zmqio.Socket) *inbox {
		return newInbox(s, nil, &batches, func(int) {})
	})), zctx.Term())
	if err != nil {
		c.replaysFailed.Add(1)
		return err
	}
	c.replaysDone.Add(1)
	return nil
}

// beginReplay has Close cancel a replay, and wait for its end.
func (c *Client) beginReplay(r *clientReplay, cancel context.CancelCauseFunc) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == clientClosed {
		return ErrClosed
	}
	c.cancels[r] = cancel
	c.replays.Add(1)
	return nil
}

func (c *Client) endReplay(r *clientReplay) {
	c.mu.Lock()
	delete(c.cancels, r)
	c.mu.Unlock()
	c.replays.Done()
}

// clientReplay is what ReplayFrom has read so far. One goroutine has it.
type clientReplay struct {
	config  *ClientConfig
	handler EventHandler
	decoder wire.Decoder
	rules   *wire.Rules
	counts  wire.Counts

	// next is the seq that is due, and begun tells that one has come before it;
	// ended that there can be no next one.
	next  uint64
	begun bool
	ended bool
	// after is the seq that came last time in the place of next, where holed says
	// so.
	after uint64
	holed bool
	// failures are the asks in a row that brought nothing new.
	failures int

	// Of the ask under way: how many replies came, whether any was new, whether it
	// was ended at a hole, and what the handler returned.
	replies  int
	progress bool
	hole     bool
	err      error
}

// run asks until there is nothing more to be had.
//
//  1. An ask ends at a hole, and the next one goes on from there. If the same seq
//     comes again in the place of the one asked for, those between are lost.
//  2. So are they after maxFailures asks that brought nothing, each with another
//     hole.
//  3. An ask that was interrupted is followed by another as long as asks bring
//     something.
//  4. An ask that brought as many as the engine keeps may have lost its last
//     replies, and is followed by another too.
func (r *clientReplay) run(ctx context.Context, asks *replays) error {
	for {
		r.replies, r.progress, r.hole = 0, false, false
		q := replayRequest{endpoint: r.config.replay(), from: r.next, responsive: true}
		err := asks.read(ctx, q, func(seq uint64, payload []byte) bool {
			r.replies++
			return r.take(ctx, seq, payload)
		})
		switch {
		case r.err != nil:
			return r.err
		case ctx.Err() != nil:
			return fmt.Errorf("replay from %d: %w", r.next, context.Cause(ctx))
		case r.progress:
			r.failures = 0
		default:
			r.failures++
		}
		switch {
		case r.ended:
			return nil
		case err != nil && !r.progress:
			return err
		case err == nil && !r.hole && r.replies < replayHold:
			return nil
		}
	}
}

// take takes the next reply, and tells whether more are wanted. None is once ctx is
// done, though more may have come.
func (r *clientReplay) take(ctx context.Context, seq uint64, payload []byte) bool {
	if ctx.Err() != nil {
		return false
	}
	if seq < r.next {
		return true
	}
	now := time.Now()
	if seq > r.next {
		if (!r.holed || r.after != seq) && r.failures < maxFailures {
			r.after, r.holed, r.hole = seq, true, true
			return false
		}
		why := feed.GapReplayIncomplete
		if !r.begun {
			why = feed.GapReplayForgotten
		}
		r.lose(ctx, now, rangeBetween(r.next, seq), why)
	}
	r.begun, r.progress, r.holed = true, true, false
	a := newArrival(&r.decoder, nil, seq, payload)
	if a.err != nil {
		r.config.Logger.Warn("replayed batch rejected", "worker", r.config.Worker, "seq", seq, "error", a.err)
		r.lose(ctx, now, seqRange{}.through(seq), feed.GapReplayIncomplete)
	} else {
		r.batch(ctx, now, &a)
	}
	r.next = seq + 1
	r.ended = seq == math.MaxUint64
	return r.err == nil && !r.ended
}

func (r *clientReplay) batch(ctx context.Context, now time.Time, a *arrival) {
	b := feed.Batch{Rank: a.batch.Rank, Seq: a.seq, IngestTime: now.UnixNano()}
	r.rules.Admit(a.batch, b.Rank, &r.counts)
	b.Events = a.batch.Events
	if a.batch.HasTime {
		b.EngineTime = unixNano(a.batch.Time)
	}
	for i := range b.Events {
		r.call(ctx, eventOf(r.config, &b, i))
	}
}

// lose tells of batches that are lost.
func (r *clientReplay) lose(ctx context.Context, now time.Time, missing seqRange, why feed.GapReason) {
	r.rules.SkipRaw(missing.count)
	r.call(ctx, gapEvent(r.config, feed.Gap{
		Reason: why, FirstSeq: missing.first, LastSeq: missing.last, Missed: missing.count, At: now.UnixNano(),
	}))
}

// call calls the handler, unless it has failed.
func (r *clientReplay) call(ctx context.Context, e *Event) {
	if r.err != nil {
		return
	}
	if err := handle(ctx, r.handler, e); err != nil {
		r.err = fmt.Errorf("handle replayed batch %d: %w", e.Seq, err)
	}
}

package ingest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// DefaultReplayTimeout is how long a replay socket may say nothing.
const DefaultReplayTimeout = 5 * time.Second

// maxReplays is how many replays are read at a time. An engine answers one from
// the thread that publishes, and the replies are kept until they are applied.
const maxReplays = 8

const (
	// replayHWM is how many replies libzmq keeps: as many as an engine remembers, so
	// that it does not drop any because its reader is slow.
	replayHWM = 10_000
	// replayTurn is how many replies are taken at a time.
	replayTurn = 64
	// replayPause is how long an engine may say nothing once it answers: it sends all
	// in one go, of which its socket drops what goes beyond its high-water mark, the
	// end marker included. What is missing is then asked for again.
	replayPause = time.Second
)

var (
	errReplayRefused = errors.New("nothing listens there")
	errReplaySilent  = errors.New("no answer")
)

// replays asks engines' replay sockets, some at a time.
type replays struct {
	sockets sockets
	timeout time.Duration
	slots   chan struct{}
}

func newReplays(k sockets, timeout time.Duration) *replays {
	return &replays{sockets: k, timeout: timeout, slots: make(chan struct{}, maxReplays)}
}

// read asks an endpoint for the batches from a seq on, and calls each with those
// that come. It returns nil once the end marker came or each returned false. It
// waits for its turn, and then for an answer no longer than the timeout.
//
// A socket of its own for each ask keeps the replies to one from being taken for
// those of another, and finds out whether the engine can be reached.
func (r *replays) read(ctx context.Context, endpoint string, from uint64, each func(seq uint64, payload []byte) bool) error {
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	resolving, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	address, err := resolve(resolving, endpoint)
	if err != nil {
		return err
	}
	c, err := r.sockets.dealer(address)
	if err != nil {
		return err
	}
	err = errors.Join(r.converse(ctx, c, from, each), c.close())
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("replay from %d: %w", from, err)
	}
	return nil
}

func (r *replays) converse(ctx context.Context, c *conn, from uint64, each func(uint64, []byte) bool) error {
	stop := context.AfterFunc(ctx, c.socket.Interrupt)
	defer stop()
	refused := make(chan error, 1)
	go func() { refused <- c.refused() }()
	defer func() {
		c.monitor.Interrupt()
		<-refused
	}()
	if err := c.socket.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return err
	}
	b := zmqio.NewBatch(replayTurn)
	defer b.Release()
	for silence := r.timeout; ; silence = min(r.timeout, replayPause) {
		if err := c.socket.SetDeadline(time.Now().Add(silence)); err != nil {
			return err
		}
		switch err := c.socket.Wait(); {
		case errors.Is(err, zmqio.ErrInterrupted) && ctx.Err() == nil:
			return errReplayRefused
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w for %v", errReplaySilent, silence)
		case err != nil:
			return err
		}
		n, err := c.socket.Receive(b)
		if err != nil {
			return err
		}
		for i := range n {
			m := b.Message(i)
			if m.Count != len(m.Frames) {
				return fmt.Errorf("reply of %d frames: %w", m.Count, wire.ErrReply)
			}
			seq, payload, end, err := wire.ParseReply(m.Frames)
			if err != nil {
				return err
			}
			if end || !each(seq, payload) {
				return nil
			}
		}
	}
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
			case zmqio.ConnectRetried, zmqio.Closed, zmqio.Disconnected, zmqio.HandshakeFailed:
				c.socket.Interrupt()
				return nil
			default: // it is being made, or stands
			}
		}
	}
}

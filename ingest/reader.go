package ingest

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/ingest/wire"
)

// maxTurn is how many messages of a socket are read before the others have
// their turn.
const maxTurn = 64

// feed is what a socket's messages go to.
type feed interface {
	message(*intake, *message)
	stop()
}

// intake is what a reader lends to the feeds that it calls. Nothing of it
// leaves the goroutine.
type intake struct {
	decoder wire.Decoder
	counts  wire.Counts
	out     Batch
	now     func() time.Time
}

// reader is one goroutine that reads many sockets. All of a worker are read by
// the same one, so the worker's lane has one caller and decoded batches stay
// where they are. A lane that blocks holds up all of the reader's sockets;
// libzmq keeps up to receiveHWM messages of each meanwhile. Beyond that the
// engine's end drops messages once its own buffers are full, which is noticed as
// a gap.
type reader struct {
	intake
	poller *zmq4.Poller
	feeds  map[*zmq4.Socket]feed

	// control wakes the reader from its poll; wake is its other end, which is not
	// the reader's to use.
	control  *zmq4.Socket
	wake     *zmq4.Socket
	stopping atomic.Bool
}

// newReader returns a reader without sockets. On an error nothing is left open.
func newReader(zctx *zmq4.Context, index int) (*reader, error) {
	r := &reader{
		intake: intake{now: time.Now},
		poller: zmq4.NewPoller(),
		feeds:  make(map[*zmq4.Socket]feed),
	}
	var err error
	if r.control, r.wake, err = newPair(zctx, fmt.Sprintf("inproc://reader-%d", index)); err != nil {
		return nil, err
	}
	r.poller.Add(r.control, zmq4.POLLIN)
	return r, nil
}

// add gives the reader a socket to read, and to close. Not once it runs.
func (r *reader) add(s *zmq4.Socket, f feed) {
	r.feeds[s] = f
	r.poller.Add(s, zmq4.POLLIN)
}

// load is how many sockets it reads.
func (r *reader) load() int { return len(r.feeds) }

// run reads until it is stopped, then closes the sockets.
func (r *reader) run() error {
	err := r.read()
	return errors.Join(err, r.close())
}

func (r *reader) read() error {
	var m message
	for !r.stopping.Load() {
		ready, err := r.poller.Poll(-1)
		if err != nil {
			return fmt.Errorf("poll sockets: %w", err)
		}
		for _, p := range ready {
			if err := r.turn(p.Socket, &m); err != nil {
				return err
			}
		}
	}
	return nil
}

// turn reads what a socket has, up to maxTurn messages.
func (r *reader) turn(s *zmq4.Socket, m *message) error {
	f := r.feeds[s]
	if f == nil { // the control socket: stopping is set
		return nil
	}
	for range maxTurn {
		if r.stopping.Load() {
			return nil
		}
		got, err := m.receive(s)
		if err != nil || !got {
			return err
		}
		f.message(&r.intake, m)
	}
	return nil
}

// stop ends run. It returns at once.
func (r *reader) stop() error {
	r.stopping.Store(true)
	_, err := r.wake.SendBytes(nil, zmq4.DONTWAIT)
	// A reader that failed has no socket left to take it.
	if err != nil && !errors.Is(err, errWouldBlock) {
		return fmt.Errorf("wake reader: %w", err)
	}
	return nil
}

// close closes the reader's sockets. Not while it runs, except by itself.
func (r *reader) close() error {
	var errs []error
	for s, f := range r.feeds {
		f.stop()
		errs = append(errs, s.Close())
	}
	clear(r.feeds)
	return errors.Join(append(errs, r.control.Close())...)
}

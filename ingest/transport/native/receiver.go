package native

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// ErrInterrupted is returned by Next after Interrupt, once what has arrived was returned.
var ErrInterrupted = errors.New("receiver was interrupted")

// EventKind is the kind of an Event of a connection.
type EventKind uint8

// The kinds.
const (
	// Connected: the handshake is complete.
	Connected EventKind = iota + 1
	// Disconnected: a connection has ended that was Connected. All its messages precede it.
	Disconnected
	// Failed: a connection was not made.
	Failed
)

// Event is an event of a connection.
type Event struct {
	Kind EventKind
	// Conn identifies the connection within its Receiver: 1, 2, 3 and so on.
	Conn int
	// Err is why a connection has ended or failed.
	Err error
}

// Message is a message of an established connection.
type Message struct {
	// Frames are the first four frames, or fewer where there are fewer. They are valid until
	// the chunk is recycled, and must not be changed.
	Frames [][]byte
	// Count is the number of all frames.
	Count int
}

// Chunk is what one read of a connection brought: messages, or one event.
type Chunk struct {
	// Conn is the connection of the messages, and Peer its address; invalid for ipc.
	Conn     int
	Peer     netip.Addr
	Messages []Message
	Event    Event // Kind is 0 if there is none

	owner   *conn
	leaving bool             // the event is the last of an accepted connection
	buffer  *[readBytes]byte // of the frames; nil if they have memory of their own
	frames  [][]byte         // backs all Message.Frames
}

var chunks = sync.Pool{New: func() any { return new(Chunk) }}

// append appends a message.
func (c *Chunk) append(e *zmtp.Event) {
	kept := min(e.Count, zmtp.KeptFrames)
	from := len(c.frames)
	c.frames = append(c.frames, e.Frames[:kept]...)
	c.Messages = append(c.Messages, Message{Count: e.Count, Frames: c.frames[from:len(c.frames):len(c.frames)]})
}

// Receiver is a socket: the messages of its connections, in the order in which each connection
// delivered them, with the events of the connections.
//
// Nothing is dropped. A connection has two chunks at most that were not recycled; until then it
// is not read, and TCP's flow control stops the peer.
type Receiver struct {
	transport *Transport
	session   zmtp.Config
	reads     *semaphore.Weighted // of read buffers
	ctx       context.Context     // of the goroutines
	cancel    context.CancelFunc
	done      sync.WaitGroup

	mu    sync.Mutex // guards all below
	queue []*Chunk
	err   error // why nothing follows the queue; nil before

	wake chan struct{}

	timer *time.Timer // of Next
}

func (t *Transport) newReceiver(c zmtp.Config, reads *semaphore.Weighted) *Receiver {
	c.Limits = t.config.Limits
	r := &Receiver{transport: t, session: c, reads: reads, wake: make(chan struct{}, 1)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// push appends a chunk to the queue.
func (r *Receiver) push(c *Chunk) {
	r.mu.Lock()
	r.queue = append(r.queue, c)
	r.mu.Unlock()
	r.Wake()
}

// eventChunk returns a chunk with an event.
func eventChunk(e Event) *Chunk {
	c := chunks.Get().(*Chunk)
	c.Conn, c.Event = e.Conn, e
	return c
}

// end lets Next return an error after the queue.
func (r *Receiver) end(err error) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
	}
	r.mu.Unlock()
	r.Wake()
}

// Wake has Next ask for its deadline again.
func (r *Receiver) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Next waits for the next chunk, which must be given to Recycle. It returns
// os.ErrDeadlineExceeded when the time that deadline returns has passed; the zero time means
// never. One goroutine may call it.
func (r *Receiver) Next(deadline func() time.Time) (*Chunk, error) {
	for {
		c, err := r.pop()
		if c != nil || err != nil {
			return c, err
		}
		var due <-chan time.Time
		if at := deadline(); !at.IsZero() {
			wait := time.Until(at)
			if wait <= 0 {
				return nil, os.ErrDeadlineExceeded
			}
			if r.timer == nil {
				r.timer = time.NewTimer(wait)
			} else {
				r.timer.Reset(wait)
			}
			due = r.timer.C
		}
		select {
		case <-r.wake:
		case <-due:
		}
	}
}

func (r *Receiver) pop() (*Chunk, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return nil, r.err
	}
	c := r.queue[0]
	r.queue[0] = nil
	if r.queue = r.queue[1:]; len(r.queue) == 0 {
		r.queue = nil
	}
	return c, nil
}

// Recycle releases the memory of a chunk, and lets its connection read on.
func (r *Receiver) Recycle(c *Chunk) {
	if c.buffer != nil {
		readBuffers.Put(c.buffer)
		r.reads.Release(1)
	}
	if c.owner != nil {
		<-c.owner.inFlight
	}
	if c.leaving {
		r.transport.connections.remove(c.Peer)
	}
	clear(c.Messages)
	clear(c.frames)
	*c = Chunk{Messages: c.Messages[:0], frames: c.frames[:0]}
	chunks.Put(c)
}

// Interrupt ends the connections. Next returns what has arrived before, and then
// ErrInterrupted.
func (r *Receiver) Interrupt() {
	r.cancel()
	r.end(ErrInterrupted)
}

// Close ends the connections, and waits for that.
func (r *Receiver) Close() {
	r.Interrupt()
	r.done.Wait()
	for {
		c, _ := r.pop()
		if c == nil {
			return
		}
		r.Recycle(c)
	}
}

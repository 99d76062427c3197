package native

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// chunk is a transport.Chunk: what one read of a connection brought, messages or one event.
type chunk struct {
	transport.Chunk
	owner   *conn
	leaving *conn            // the accepted connection whose last event this is
	buffer  *[readBytes]byte // of the frames; nil if it is large
	large   []byte           // of the frames of a large message
	claim   *ledger.Claim    // of large
	frames  [][]byte         // backs the frames of Messages
}

var chunks = sync.Pool{New: func() any {
	c := new(chunk)
	c.Private = c
	return c
}}

// newChunk returns a chunk for messages of a connection.
func newChunk(owner *conn) *chunk {
	c := chunks.Get().(*chunk)
	c.owner = owner
	return c
}

// append appends a message of owner.
func (c *chunk) append(e *zmtp.Event) {
	from := len(c.frames)
	c.frames = append(c.frames, e.Frames[:min(e.Count, zmtp.KeptFrames)]...)
	c.Messages = append(c.Messages, transport.Message{
		Count: e.Count, More: e.More, Frames: c.frames[from:len(c.frames):len(c.frames)], Conn: c.owner.id, Peer: c.owner.peer,
	})
}

// eventChunk returns a chunk with an event.
func eventChunk(e transport.Event) *chunk {
	c := chunks.Get().(*chunk)
	c.Events = append(c.Events, e)
	return c
}

// Receiver implements transport.Receiver.
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
	queue []*chunk
	err   error // why nothing follows the queue; nil before

	wake chan struct{}
	pipe *pipe // instead of wake if the receiver binds: two descriptors for all its connections
}

func (t *Transport) newReceiver(c zmtp.Config, reads *semaphore.Weighted) *Receiver {
	c.Limits = t.config.Limits
	r := &Receiver{transport: t, session: c, reads: reads, wake: make(chan struct{}, 1)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// push appends a chunk to the queue.
func (r *Receiver) push(c *chunk) {
	r.mu.Lock()
	r.queue = append(r.queue, c)
	r.mu.Unlock()
	r.Wake()
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

// Wake implements transport.Receiver.
func (r *Receiver) Wake() {
	if r.pipe != nil {
		r.pipe.wake()
		return
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Next implements transport.Receiver.
func (r *Receiver) Next(deadline func() time.Time) (*transport.Chunk, error) {
	if r.pipe == nil {
		return transport.Await(r.wake, deadline, r.pop)
	}
	for {
		if c, err := r.pop(); c != nil || err != nil {
			return c, err
		}
		at := deadline()
		if !at.IsZero() && !time.Now().Before(at) {
			return nil, os.ErrDeadlineExceeded
		}
		if err := r.pipe.wait(at); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, fmt.Errorf("wait for messages: %w", err)
		}
	}
}

func (r *Receiver) pop() (*transport.Chunk, error) {
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
	return &c.Chunk, nil
}

// Recycle implements transport.Receiver: the connection reads on.
func (r *Receiver) Recycle(released *transport.Chunk) {
	c := released.Private.(*chunk)
	if c.buffer != nil {
		readBuffers.Put(c.buffer)
		r.reads.Release(1)
	}
	if c.claim != nil {
		release(c.large)
		r.transport.larges.Release(c.claim)
	}
	if c.owner != nil {
		<-c.owner.inFlight
	}
	if c.leaving != nil {
		r.transport.connections.remove(c.leaving)
	}
	clear(c.Messages)
	clear(c.Events)
	clear(c.frames)
	*c = chunk{Chunk: transport.Chunk{Messages: c.Messages[:0], Events: c.Events[:0], Private: c}, frames: c.frames[:0]}
	chunks.Put(c)
}

// Interrupt implements transport.Receiver.
func (r *Receiver) Interrupt() {
	r.cancel()
	r.end(transport.ErrInterrupted)
}

// Close implements transport.Receiver.
func (r *Receiver) Close() error {
	r.Interrupt()
	r.done.Wait()
	for {
		c, _ := r.pop()
		if c == nil {
			break
		}
		r.Recycle(c)
	}
	if r.pipe != nil {
		r.pipe.close()
	}
	return nil
}

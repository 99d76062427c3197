package enginegrpc

import (
	"context"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
)

const (
	// maxQueued and maxQueuedBytes bound the messages that wait to be processed. One message may be larger.
	maxQueued      = 64
	maxQueuedBytes = 1 << 20
)

// Receiver implements transport.Receiver.
type Receiver struct {
	memory *ledger.Ledger
	ctx    context.Context // of the call
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu     sync.Mutex // guards all below
	queue  []*transport.Chunk
	queued int   // chunks that were not recycled
	bytes  int   // of their messages
	err    error // why nothing follows the queue; nil before

	wake chan struct{} // receives a value when there is something to read
	room chan struct{} // receives a value when there is more room
}

// push appends a chunk to the queue once there is room. It returns false if the Receiver was interrupted before.
func (r *Receiver) push(c *transport.Chunk) bool {
	size := bytesOf(c)
	for !r.pushNow(c, size) {
		select {
		case <-r.room:
		case <-r.ctx.Done():
			return false
		}
	}
	r.Wake()
	return true
}

func bytesOf(c *transport.Chunk) (n int) {
	for _, m := range c.Messages {
		n += m.Bytes()
	}
	return n
}

func (r *Receiver) pushNow(c *transport.Chunk, size int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if size > 0 && r.queued > 0 && (r.queued >= maxQueued || r.bytes+size > maxQueuedBytes) {
		return false
	}
	r.queue = append(r.queue, c)
	r.queued, r.bytes = r.queued+1, r.bytes+size
	return true
}

// pushEvent appends an event to the queue. There is always room for those of a call.
func (r *Receiver) pushEvent(e transport.Event) {
	r.push(&transport.Chunk{Events: []transport.Event{e}})
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
func (r *Receiver) Wake() { notify(r.wake) }

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Next implements transport.Receiver.
func (r *Receiver) Next(deadline func() time.Time) (*transport.Chunk, error) {
	return transport.Await(r.wake, deadline, r.pop)
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
	return c, nil
}

// Recycle implements transport.Receiver: the call is read on.
func (r *Receiver) Recycle(c *transport.Chunk) {
	r.mu.Lock()
	r.queued, r.bytes = r.queued-1, r.bytes-bytesOf(c)
	r.mu.Unlock()
	r.release(c)
	notify(r.room)
}

// release releases the memory of a chunk.
func (r *Receiver) release(c *transport.Chunk) {
	if claim, ok := c.Private.(*ledger.Claim); ok {
		r.memory.Release(claim)
		c.Private = nil
	}
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
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.queue {
		r.release(c)
	}
	r.queue = nil
	return nil
}

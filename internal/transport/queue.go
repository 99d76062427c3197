package transport

import (
	"context"
	"sync"
	"time"
)

const (
	// maxQueued and maxQueuedBytes bound the messages of a Queue that wait to be processed. One message may be larger.
	maxQueued      = 64
	maxQueuedBytes = 1 << 20
)

// Queue implements Receiver for messages that a goroutine of the process makes. Its methods are safe for concurrent use, except for those of
// Receiver that are not.
type Queue struct {
	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup
	free   func(*Chunk)

	mu     sync.Mutex // guards all below
	queue  []*Chunk
	queued int   // chunks that were not recycled
	bytes  int   // of their messages
	err    error // why nothing follows the queue; nil before

	wake chan struct{} // receives a value when there is something to read
	room chan struct{} // receives a value when there is more room
}

// NewQueue returns an empty Queue. free is called for each chunk that is not used any more; nil: nothing is. The caller must close the Queue.
func NewQueue(free func(*Chunk)) *Queue {
	q := &Queue{free: free, wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q
}

// Context ends when receiving ends.
func (q *Queue) Context() context.Context { return q.ctx }

// Go runs a goroutine, for whose end Close waits.
func (q *Queue) Go(run func()) { q.done.Go(run) }

// Push appends a chunk once there is room. If receiving ends before, it frees the chunk and returns false.
func (q *Queue) Push(c *Chunk) bool {
	size := bytesOf(c)
	for !q.pushNow(c, size) {
		select {
		case <-q.room:
		case <-q.ctx.Done():
			q.release(c)
			return false
		}
	}
	q.Wake()
	return true
}

func bytesOf(c *Chunk) (n int) {
	for _, m := range c.Messages {
		n += m.Bytes()
	}
	return n
}

func (q *Queue) pushNow(c *Chunk, size int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if size > 0 && q.queued > 0 && (q.queued >= maxQueued || q.bytes+size > maxQueuedBytes) {
		return false
	}
	q.queue = append(q.queue, c)
	q.queued, q.bytes = q.queued+1, q.bytes+size
	return true
}

// PushEvent appends an event. There is always room for the few of a connection.
func (q *Queue) PushEvent(e Event) { q.Push(&Chunk{Events: []Event{e}}) }

// End lets Next return an error after what was pushed. The first error counts.
func (q *Queue) End(err error) {
	q.mu.Lock()
	if q.err == nil {
		q.err = err
	}
	q.mu.Unlock()
	q.Wake()
}

// Wake implements Receiver.
func (q *Queue) Wake() { notify(q.wake) }

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Next implements Receiver.
func (q *Queue) Next(deadline func() time.Time) (*Chunk, error) {
	return Await(q.wake, deadline, q.pop)
}

func (q *Queue) pop() (*Chunk, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		return nil, q.err
	}
	c := q.queue[0]
	q.queue[0] = nil
	if q.queue = q.queue[1:]; len(q.queue) == 0 {
		q.queue = nil
	}
	return c, nil
}

// Recycle implements Receiver: there is room for other chunks.
func (q *Queue) Recycle(c *Chunk) {
	q.mu.Lock()
	q.queued, q.bytes = q.queued-1, q.bytes-bytesOf(c)
	q.mu.Unlock()
	q.release(c)
	notify(q.room)
}

func (q *Queue) release(c *Chunk) {
	if q.free != nil {
		q.free(c)
	}
}

// Interrupt implements Receiver.
func (q *Queue) Interrupt() {
	q.cancel()
	q.End(ErrInterrupted)
}

// Close implements Receiver. It waits for the goroutines.
func (q *Queue) Close() error {
	q.Interrupt()
	q.done.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, c := range q.queue {
		q.release(c)
	}
	q.queue = nil
	return nil
}

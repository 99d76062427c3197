package transport

import (
	"errors"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
)

// Bounds of what is received and waits to be processed.
const (
	// maxInboxMessages and maxInboxBytes are those of one socket: as many batches as an
	// engine replays by default.
	maxInboxMessages = 10_000
	maxInboxBytes    = 64 << 20
	// connectionShare is the part of an inbox, 1/4, that one connection may fill where a
	// socket has several, so that one that floods leaves room for the others.
	connectionShare = 4
	// batchSize is how many messages a chunk has at most, and batchOverhead about what
	// libzmq's and Go's descriptions of so many take.
	batchSize     = 64
	batchOverhead = 32 << 10
	// inboxReserve is what each inbox may hold whatever the others hold: a batch's worth.
	inboxReserve = 2 << 20
	// maxIdleUsages is how many connections without waiting messages are counted before
	// they are forgotten.
	maxIdleUsages = 1024
)

// Pool has the memory of batches that inboxes share. The zero Pool is ready.
type Pool struct{ batches sync.Pool }

func (p *Pool) get() *Batch {
	if b, ok := p.batches.Get().(*Batch); ok {
		return b
	}
	return NewBatch(batchSize)
}

func (p *Pool) put(b *Batch) {
	b.Release()
	p.batches.Put(b)
}

// InboxConfig is the configuration of an Inbox.
type InboxConfig struct {
	// Budget bounds the bytes of all inboxes together, beside a reserve of 2 MiB each;
	// nil means unlimited.
	Budget *budget.Budget
	// Pool is shared by inboxes.
	Pool *Pool
	// PerConnection reports whether the socket has several connections, of which each may
	// fill a quarter of the inbox. The events of the connections then come with the chunks.
	PerConnection bool
	// OnDrop is called with the number of messages that were dropped; nil for nothing.
	OnDrop func(n int)
}

// Inbox drains a socket into a bounded buffer, in a goroutine of its own: see Drain.
// libzmq must never stop reading a connection, as it does at a high-water mark: when such a
// connection then fails, libzmq 4.3 ends the process (assertion _io_error). So the sockets
// have no high-water mark, and are drained whether or not the messages are processed. A
// message that does not fit is dropped, and its Chunk says so; the missing batches are
// repaired like any other gap.
type Inbox struct {
	socket  *Socket
	monitor *Monitor // nil unless per connection
	InboxConfig

	// What waits: the drain adds, the reader subtracts. They share no lock for it, as a
	// drain under load would keep the reader from it.
	messages atomic.Int64
	bytes    atomic.Int64
	usages   map[int]*usage // by file descriptor, where per connection; the drain's

	order sync.Mutex // held from receiving messages or events until they are added; before mu
	mu    sync.Mutex // guards all below
	// chunks are those that wait, the first one first.
	chunks []*Chunk
	err    error // why draining ended; nil before
	wake   chan struct{}
	timer  *time.Timer // the reader's
}

// usage is what waits of one connection.
type usage struct{ messages, bytes atomic.Int64 }

// Chunk is some messages in the order in which they arrived, and what happened between
// and after them.
type Chunk struct {
	// Batch has the messages. One that was dropped has no frames. It is nil where there
	// are none.
	Batch *Batch
	// Events are the events of connections, where the inbox is per connection.
	Events []ChunkEvent
	// Drops are the messages that were dropped after those of Batch; nil where none were.
	Drops *Drops

	filling         bool // the drain is adding messages
	messages, bytes int64
	byConnection    map[*usage]*tally
}

type tally struct{ messages, bytes int64 }

// ChunkEvent is an event of a connection before the message of index Before arrived.
type ChunkEvent struct {
	Event
	Before int
}

// Len returns how many messages there are, with those dropped among them.
func (c *Chunk) Len() int {
	if c.Batch == nil {
		return 0
	}
	return c.Batch.Len()
}

// NewInbox returns the inbox of a connection's socket.
func NewInbox(c *Conn, cfg InboxConfig) *Inbox {
	b := &Inbox{socket: c.Socket, InboxConfig: cfg, wake: make(chan struct{}, 1), usages: make(map[int]*usage)}
	if cfg.PerConnection {
		b.monitor = c.Monitor
	}
	if b.OnDrop == nil {
		b.OnDrop = func(int) {}
	}
	return b
}

// Drain reads the socket until it is interrupted or fails. It is the only user of the
// socket meanwhile.
func (b *Inbox) Drain() {
	for {
		err := b.socket.Wait()
		interrupted := errors.Is(err, ErrInterrupted)
		for more := err == nil || interrupted; more; { // what was received is kept
			var failed error
			if more, failed = b.receive(); failed != nil {
				err = failed
			}
		}
		if err != nil {
			b.end(err)
			return
		}
	}
}

// receive receives what there is, up to a batch, and reports whether there may be more.
func (b *Inbox) receive() (more bool, err error) {
	b.order.Lock()
	defer b.order.Unlock()
	c, batch := b.lastChunk()
	before := batch.Len()
	_, err = b.socket.ReceiveMore(batch)
	more = err == nil && batch.Full()
	b.admit(c, batch, before)
	return more, err
}

// lastChunk returns the last chunk and its batch if that has room, so that messages that
// arrive one by one share a batch; otherwise nil and an empty batch.
func (b *Inbox) lastChunk() (*Chunk, *Batch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.chunks); n > 0 {
		if c := b.chunks[n-1]; c.Batch != nil && c.Drops == nil && !c.Batch.Full() {
			c.filling = true
			return c, c.Batch
		}
	}
	return nil, b.Pool.get()
}

// admit adds the messages of a batch from an index on to its chunk, or to a new one where
// that is nil, and drops those that do not fit.
func (b *Inbox) admit(c *Chunk, batch *Batch, from int) {
	waiting := c != nil
	if !waiting {
		c = &Chunk{}
	}
	c.Events = b.appendEvents(c.Events, from)
	dropped := 0
	for i := from; i < batch.Len(); i++ {
		m := batch.Message(i)
		size := 0
		for _, f := range m.Frames {
			size += len(f)
		}
		if c.bytes == 0 {
			size += batchOverhead
		}
		if !b.reserve(c, m.FD, int64(size)) {
			c.drops().add(m)
			batch.Drop(i)
			dropped++
		}
	}
	if dropped > 0 {
		b.OnDrop(dropped)
	}
	b.put(c, batch, waiting)
}

func (c *Chunk) drops() *Drops {
	if c.Drops == nil {
		c.Drops = new(Drops)
	}
	return c.Drops
}

// put gives a chunk its batch, and appends it unless it waits already. Drops without
// messages are merged into the chunk before.
func (b *Inbox) put(c *Chunk, batch *Batch, waiting bool) {
	if c.messages == 0 {
		b.Pool.put(batch)
		batch = nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c.Batch, c.filling = batch, false
	n := len(b.chunks)
	switch {
	case waiting:
	case c.messages > 0, len(c.Events) > 0:
		b.chunks = append(b.chunks, c)
	case c.Drops == nil:
		return
	case n > 0 && b.chunks[n-1].Drops != nil:
		b.chunks[n-1].Drops.merge(c.Drops)
		return
	default:
		b.chunks = append(b.chunks, c)
	}
	b.Wake()
}

// AddEvents adds the events of connections that happened while no messages arrived.
func (b *Inbox) AddEvents() {
	b.order.Lock()
	defer b.order.Unlock()
	events := b.appendEvents(nil, 0)
	if len(events) == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.chunks); n > 0 && b.chunks[n-1].messages == 0 && b.chunks[n-1].Drops == nil {
		b.chunks[n-1].Events = append(b.chunks[n-1].Events, events...)
	} else {
		b.chunks = append(b.chunks, &Chunk{Events: events})
	}
	b.Wake()
}

// appendEvents appends the monitor's events, which happened before the message at an
// index. An error of the monitor is left to its other reader.
func (b *Inbox) appendEvents(all []ChunkEvent, before int) []ChunkEvent {
	for b.monitor != nil {
		e, ok, err := b.monitor.Next()
		if err != nil || !ok {
			break
		}
		if e.Kind == Accepted || e.Kind == Disconnected {
			all = append(all, ChunkEvent{e, before})
		}
	}
	return all
}

// reserve counts a message for a chunk. It reports false where there is no room for it.
func (b *Inbox) reserve(c *Chunk, fd int, size int64) bool {
	if b.messages.Load() >= maxInboxMessages || b.bytes.Load()+size > maxInboxBytes {
		return false
	}
	var u *usage
	if b.PerConnection {
		u = b.usageOf(fd)
		if u.messages.Load() >= maxInboxMessages/connectionShare || u.bytes.Load()+size > maxInboxBytes/connectionShare {
			return false
		}
	}
	after := b.bytes.Add(size)
	over := beyondReserve(after) - beyondReserve(after-size)
	if !b.Budget.Take(over) {
		// The reader may have subtracted meanwhile: then less is beyond the reserve now.
		after = b.bytes.Add(-size)
		b.Budget.Release(beyondReserve(after+size) - beyondReserve(after) - over)
		return false
	}
	b.messages.Add(1)
	c.messages++
	c.bytes += size
	if u != nil {
		u.messages.Add(1)
		u.bytes.Add(size)
		c.count(u, size)
	}
	return true
}

// count adds a message to the chunk's part of a connection's usage.
func (c *Chunk) count(u *usage, size int64) {
	if c.byConnection == nil {
		c.byConnection = make(map[*usage]*tally)
	}
	t := c.byConnection[u]
	if t == nil {
		t = new(tally)
		c.byConnection[u] = t
	}
	t.messages++
	t.bytes += size
}

// beyondReserve is the part of an inbox's bytes that counts for the budget.
func beyondReserve(bytes int64) int64 { return max(0, bytes-inboxReserve) }

// usageOf returns the usage of a connection.
func (b *Inbox) usageOf(fd int) *usage {
	u := b.usages[fd]
	if u == nil {
		if len(b.usages) >= maxIdleUsages {
			maps.DeleteFunc(b.usages, func(_ int, u *usage) bool { return u.messages.Load() == 0 })
		}
		u = new(usage)
		b.usages[fd] = u
	}
	return u
}

// end records why draining ended, and wakes the reader.
func (b *Inbox) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	b.Wake()
}

// Wake has Next ask for its deadline again.
func (b *Inbox) Wake() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Next waits for the next chunk, which has to be given to Recycle. It returns
// os.ErrDeadlineExceeded when the time that deadline returns has passed; a zero time means
// no deadline. Once draining has ended and no chunk is left, it returns the error that
// ended it. One goroutine may call it.
func (b *Inbox) Next(deadline func() time.Time) (*Chunk, error) {
	for {
		c, err := b.pop()
		if c != nil || err != nil {
			return c, err
		}
		var due <-chan time.Time
		if at := deadline(); !at.IsZero() {
			wait := time.Until(at)
			if wait <= 0 {
				return nil, os.ErrDeadlineExceeded
			}
			if b.timer == nil {
				b.timer = time.NewTimer(wait)
			} else {
				b.timer.Reset(wait)
			}
			due = b.timer.C
		}
		select {
		case <-b.wake:
		case <-due:
		}
	}
}

// pop removes the first chunk; nil where there is none, or messages are being added to it.
func (b *Inbox) pop() (*Chunk, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.chunks) == 0 {
		return nil, b.err
	}
	c := b.chunks[0]
	if c.filling {
		return nil, nil
	}
	b.chunks[0] = nil
	if b.chunks = b.chunks[1:]; len(b.chunks) == 0 {
		b.chunks = nil
	}
	return c, nil
}

// Recycle releases the memory of a chunk.
func (b *Inbox) Recycle(c *Chunk) {
	if c.Batch == nil {
		return
	}
	b.Pool.put(c.Batch)
	c.Batch = nil
	after := b.bytes.Add(-c.bytes)
	b.Budget.Release(beyondReserve(after+c.bytes) - beyondReserve(after))
	b.messages.Add(-c.messages)
	for u, t := range c.byConnection {
		u.bytes.Add(-t.bytes)
		u.messages.Add(-t.messages)
	}
}

// Discard releases all chunks. Draining has ended.
func (b *Inbox) Discard() {
	for {
		c, _ := b.pop()
		if c == nil {
			return
		}
		b.Recycle(c)
	}
}

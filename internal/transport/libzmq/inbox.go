//go:build cgo

package libzmq

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

// Bounds of an inbox.
const (
	// maxInboxMessages and maxInboxBytes are the bounds of one socket: as many batches as an engine replays by default.
	maxInboxMessages = 10_000
	maxInboxBytes    = 64 << 20
	// One of several connections of a socket may fill 1/connectionShare of the inbox.
	connectionShare = 4
	// batchSize is how many messages a chunk has at most, and batchOverhead approximately
	// how many bytes libzmq and Go need for a chunk without its frames.
	batchSize     = 64
	batchOverhead = 32 << 10
	// inboxReserve is the number of bytes of each inbox that do not count for the budget: more than a batch has.
	inboxReserve = 2 << 20
)

// inbox is a bounded buffer of the messages of a socket. One goroutine calls drain, another one Next.
//
// libzmq must never stop reading a connection, as it does at a high-water mark: if the connection then fails, libzmq 4.3 ends the process
// (assertion _io_error). So the sockets have no high-water mark, and drain reads them even if Next is not called. A message that does not
// fit is dropped and recorded in its chunk. The missing batches are repaired like any other gap.
type inbox struct {
	socket *Socket
	budget *budget.Budget
	pool   *pool
	onDrop func(n int)
	wake   chan struct{}
	// bound reports whether the socket is bound. Each connection may then fill a quarter of the inbox.
	bound bool
	// nextEvent returns the next event of a connection; ok is false if there is none now. It is called with mu locked.
	nextEvent func() (e transport.Event, ok bool)

	// order is locked from receiving messages or events until they are in chunks. It is locked before mu.
	order sync.Mutex

	mu     sync.Mutex // guards all below
	chunks []*chunk   // oldest first
	usage  usage
	// connections are the usages of connections with messages, by file descriptor, if the socket is bound.
	connections map[int]usage
	// end is the end of the only connection, which interrupts drain; its kind is 0 before.
	end transport.Event
	// failure is the monitor's error; nil if there is none. It ends drain.
	failure error
	err     error // why drain has ended; nil before
}

// chunk is a transport.Chunk with its memory.
type chunk struct {
	transport.Chunk
	batch           *Batch // nil if there are no messages
	filling         bool   // drain is adding messages
	messages, bytes int    // of the messages that were not dropped
}

// pool has the memory of batches.
type pool struct{ batches sync.Pool }

func (p *pool) get() *Batch {
	if b, ok := p.batches.Get().(*Batch); ok {
		return b
	}
	return NewBatch(batchSize)
}

func (p *pool) put(b *Batch) {
	b.Release()
	p.batches.Put(b)
}

func newChunk(b *Batch) *chunk {
	c := &chunk{batch: b}
	c.Private = c
	return c
}

// usage counts messages and bytes in an inbox.
type usage struct {
	messages, bytes int
	peer            netip.Addr // of a connection with messages
}

func (u usage) add(messages, bytes int) usage {
	return usage{u.messages + messages, u.bytes + bytes, u.peer}
}

// fits reports whether the usage is within a part of the bounds of an inbox.
func (u usage) fits(part int) bool {
	return u.messages <= maxInboxMessages/part && u.bytes <= maxInboxBytes/part
}

// budgeted returns the bytes that count for the budget.
func (u usage) budgeted() int64 { return int64(max(0, u.bytes-inboxReserve)) }

// drain reads the socket until it is interrupted or fails, and returns why. Nothing else may use the socket meanwhile.
func (b *inbox) drain() error {
	for {
		err := b.socket.Wait()
		interrupted := errors.Is(err, transport.ErrInterrupted)
		for more := err == nil || interrupted; more; { // messages that arrived before are kept
			var failed error
			if more, failed = b.receive(); failed != nil {
				err = failed
			}
		}
		if err != nil {
			return err
		}
	}
}

// finish lets Next return an error after the chunks, because drain has ended with one.
func (b *inbox) finish(err error) {
	b.mu.Lock()
	if b.err = err; errors.Is(err, transport.ErrInterrupted) && b.end.Kind != 0 {
		b.addEvent(b.end)
		b.err = transport.ErrEnded
	} else if b.failure != nil {
		b.err = b.failure
	}
	b.mu.Unlock()
	b.Wake()
}

// receive adds messages to a chunk, and reports whether there may be more.
func (b *inbox) receive() (more bool, err error) {
	b.order.Lock()
	defer b.order.Unlock()
	c, isNew := b.fillingChunk()
	before := c.batch.Len()
	err = b.socket.Receive(c.batch)
	more = err == nil && c.batch.Full()
	b.mu.Lock()
	b.appendEvents(c, before) // they include the events of the messages' connections
	dropped := b.admit(c, before)
	c.filling = false
	if c.messages == 0 {
		b.pool.put(c.batch)
		c.batch = nil
	}
	if isNew {
		b.append(c)
	}
	b.mu.Unlock()
	if dropped > 0 && b.onDrop != nil {
		b.onDrop(dropped)
	}
	b.Wake()
	return more, err
}

// fillingChunk returns the last chunk if that has room, so that messages that arrive one by one share a batch, or a new one.
func (b *inbox) fillingChunk() (c *chunk, isNew bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c = b.last(); c == nil || c.batch == nil || c.Drops != nil || c.batch.Full() {
		return newChunk(b.pool.get()), true
	}
	c.filling = true
	return c, false
}

// last returns the last chunk; nil if there is none.
func (b *inbox) last() *chunk {
	if len(b.chunks) == 0 {
		return nil
	}
	return b.chunks[len(b.chunks)-1]
}

// admit counts the messages of a chunk from an index on, and drops messages that do not fit. The caller holds mu.
func (b *inbox) admit(c *chunk, from int) (dropped int) {
	messages := c.batch.Messages()
	for i := from; i < len(messages); i++ {
		m := &messages[i]
		if !b.reserve(c, i, m) {
			if c.Drops == nil {
				c.Drops = new(transport.Drops)
			}
			c.Drops.Add(*m)
			c.batch.Drop(i)
			dropped++
		}
	}
	return dropped
}

// reserve counts the message of a chunk at an index, and sets its peer. It reports false if there is no room.
func (b *inbox) reserve(c *chunk, i int, m *transport.Message) bool {
	size := m.Bytes()
	connection := b.connections[m.Conn].add(1, size)
	if b.bound && !connection.fits(connectionShare) {
		return false
	}
	if c.bytes == 0 {
		size += batchOverhead
	}
	after := b.usage.add(1, size)
	if !after.fits(1) || !b.budget.Reserve(after.budgeted()-b.usage.budgeted()) {
		return false
	}
	b.usage = after
	c.bytes += size
	c.messages++
	if b.bound {
		if connection.messages == 1 {
			connection.peer = c.batch.peer(i)
		}
		m.Peer = connection.peer
		b.connections[m.Conn] = connection
	}
	return true
}

// append appends a chunk if there is anything in it. Drops without messages or events are
// merged into the drops of the chunk before. The caller holds mu.
func (b *inbox) append(c *chunk) {
	last := b.last()
	switch {
	case c.messages > 0 || len(c.Events) > 0:
		b.chunks = append(b.chunks, c)
	case c.Drops == nil:
	case last != nil && last.Drops != nil:
		last.Drops.Merge(c.Drops)
	default:
		b.chunks = append(b.chunks, c)
	}
}

// addEvents adds the events of connections that happened while no messages arrived.
func (b *inbox) addEvents() {
	b.order.Lock()
	defer b.order.Unlock()
	b.mu.Lock()
	for e, ok := b.nextEvent(); ok; e, ok = b.nextEvent() {
		b.addEvent(e)
	}
	b.mu.Unlock()
	b.Wake()
}

// appendEvents appends the events of connections to a chunk. The caller holds mu.
func (b *inbox) appendEvents(c *chunk, before int) {
	for e, ok := b.nextEvent(); ok; e, ok = b.nextEvent() {
		e.Before = before
		c.Events = append(c.Events, e)
	}
}

// addEvent adds an event after all messages. The caller holds mu.
func (b *inbox) addEvent(e transport.Event) {
	c := b.eventChunk()
	c.Events = append(c.Events, e)
}

// eventChunk returns the last chunk if it has events alone, or a new one. The caller holds mu.
func (b *inbox) eventChunk() *chunk {
	if c := b.last(); c != nil && c.batch == nil && c.Drops == nil {
		return c
	}
	c := newChunk(nil)
	b.chunks = append(b.chunks, c)
	return c
}

func (b *inbox) Wake() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *inbox) Next(deadline func() time.Time) (*transport.Chunk, error) {
	return transport.Await(b.wake, deadline, b.pop)
}

// pop removes the first chunk. It returns nil if there is none, or if messages are being added to it.
func (b *inbox) pop() (*transport.Chunk, error) {
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
	if c.batch != nil {
		c.Messages = c.batch.Messages()
	}
	return &c.Chunk, nil
}

func (b *inbox) Recycle(released *transport.Chunk) {
	c := released.Private.(*chunk)
	if c.batch == nil {
		return
	}
	b.mu.Lock()
	after := b.usage.add(-c.messages, -c.bytes)
	b.budget.Release(b.usage.budgeted() - after.budgeted())
	b.usage = after
	for _, m := range c.Messages {
		if !b.bound || m.Count == 0 { // dropped
			continue
		}
		u := b.connections[m.Conn].add(-1, -m.Bytes())
		b.connections[m.Conn] = u
		if u.messages == 0 {
			delete(b.connections, m.Conn)
		}
	}
	b.mu.Unlock()
	b.pool.put(c.batch)
	c.batch, c.Messages = nil, nil
}

// discard releases all chunks. drain must have ended.
func (b *inbox) discard() {
	for {
		c, _ := b.pop()
		if c == nil {
			return
		}
		b.Recycle(c)
	}
}

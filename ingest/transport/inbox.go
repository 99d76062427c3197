package transport

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/budget"
)

// Bounds of an Inbox.
const (
	// maxInboxMessages and maxInboxBytes are the bounds of one socket: as many batches as
	// an engine replays by default.
	maxInboxMessages = 10_000
	maxInboxBytes    = 64 << 20
	// connectionShare is the part of an inbox, 1/4, that one connection may fill if a
	// socket has several. The rest is left for the other connections.
	connectionShare = 4
	// inboxReserve is the number of bytes of each inbox that do not count for the budget:
	// more than a batch has.
	inboxReserve = 2 << 20
)

// InboxConfig is the configuration of an Inbox.
type InboxConfig struct {
	// Budget bounds the bytes of all inboxes together, except for the first 2 MiB of each;
	// nil means unlimited.
	Budget *budget.Budget
	// Pool is shared by inboxes.
	Pool *Pool
	// PerConnection reports whether the socket has several connections. Each may then fill
	// a quarter of the inbox, and chunks have the events of the connections.
	PerConnection bool
	// OnDrop is called with the number of messages that were dropped; nil for nothing.
	OnDrop func(n int)
}

// Inbox is a bounded buffer of the messages of a socket. One goroutine calls Drain, another
// one Next.
//
// libzmq must never stop reading a connection, as it does at a high-water mark: if the
// connection then fails, libzmq 4.3 ends the process (assertion _io_error). So the sockets
// have no high-water mark, and Drain reads them even if Next is not called. A message that
// does not fit is dropped and recorded in its Chunk. The missing batches are repaired like
// any other gap.
type Inbox struct {
	socket  *Socket
	monitor *Monitor // nil unless per connection
	config  InboxConfig
	wake    chan struct{}

	// order is locked from receiving messages or events until they are in chunks. It is
	// locked before mu.
	order sync.Mutex

	mu     sync.Mutex // guards all below
	chunks []*Chunk   // oldest first
	usage  usage
	// connections are the usages of connections with messages, by file descriptor, if the
	// inbox is per connection.
	connections map[int]usage
	err         error // why Drain ended; nil before
}

// usage counts messages and bytes in an inbox.
type usage struct{ messages, bytes int }

func (u usage) add(messages, bytes int) usage {
	return usage{u.messages + messages, u.bytes + bytes}
}

// fits reports whether the usage is within a part of the bounds of an inbox.
func (u usage) fits(part int) bool {
	return u.messages <= maxInboxMessages/part && u.bytes <= maxInboxBytes/part
}

// budgeted returns the bytes that count for the budget.
func (u usage) budgeted() int64 { return int64(max(0, u.bytes-inboxReserve)) }

// NewInbox returns the inbox of a connection's socket.
func NewInbox(c *Conn, config InboxConfig) *Inbox {
	b := &Inbox{socket: c.Socket, config: config, wake: make(chan struct{}, 1), connections: make(map[int]usage)}
	if config.PerConnection {
		b.monitor = c.Monitor
	}
	return b
}

// Drain reads the socket until it is interrupted or fails. Nothing else may use the socket
// meanwhile.
func (b *Inbox) Drain() {
	for {
		err := b.socket.Wait()
		interrupted := errors.Is(err, ErrInterrupted)
		for more := err == nil || interrupted; more; { // messages that arrived before are kept
			var failed error
			if more, failed = b.receive(); failed != nil {
				err = failed
			}
		}
		if err != nil {
			b.mu.Lock()
			b.err = err
			b.mu.Unlock()
			b.Wake()
			return
		}
	}
}

// receive adds messages to a chunk, and reports whether there may be more.
func (b *Inbox) receive() (more bool, err error) {
	b.order.Lock()
	defer b.order.Unlock()
	c, isNew := b.fillingChunk()
	before := c.Len()
	err = b.socket.Receive(c.Batch)
	more = err == nil && c.Batch.Full()
	c.Events = b.appendEvents(c.Events, before)
	b.mu.Lock()
	dropped := b.admit(c, before)
	c.filling = false
	if c.messages == 0 {
		b.config.Pool.put(c.Batch)
		c.Batch = nil
	}
	if isNew {
		b.append(c)
	}
	b.mu.Unlock()
	if dropped > 0 && b.config.OnDrop != nil {
		b.config.OnDrop(dropped)
	}
	b.Wake()
	return more, err
}

// fillingChunk returns the last chunk if that has room, so that messages that arrive one by
// one share a batch, or a new one.
func (b *Inbox) fillingChunk() (c *Chunk, isNew bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c = b.last(); c == nil || c.Batch == nil || c.Drops != nil || c.Batch.Full() {
		return &Chunk{Batch: b.config.Pool.get()}, true
	}
	c.filling = true
	return c, false
}

// last returns the last chunk; nil if there is none.
func (b *Inbox) last() *Chunk {
	if len(b.chunks) == 0 {
		return nil
	}
	return b.chunks[len(b.chunks)-1]
}

// admit counts the messages of a chunk from an index on, and drops messages that do not fit.
// The caller holds mu.
func (b *Inbox) admit(c *Chunk, from int) (dropped int) {
	for i := from; i < c.Len(); i++ {
		m := c.Batch.Message(i)
		if !b.reserve(c, m) {
			if c.Drops == nil {
				c.Drops = new(Drops)
			}
			c.Drops.add(m)
			c.Batch.Drop(i)
			dropped++
		}
	}
	return dropped
}

// reserve counts a message of a chunk. It reports false if there is no room.
func (b *Inbox) reserve(c *Chunk, m Message) bool {
	size := m.bytes()
	connection := b.connections[m.FD].add(1, size)
	if b.config.PerConnection && !connection.fits(connectionShare) {
		return false
	}
	if c.bytes == 0 {
		size += batchOverhead
	}
	after := b.usage.add(1, size)
	if !after.fits(1) || !b.config.Budget.Reserve(after.budgeted()-b.usage.budgeted()) {
		return false
	}
	b.usage = after
	c.bytes += size
	c.messages++
	if b.config.PerConnection {
		b.connections[m.FD] = connection
	}
	return true
}

// append appends a chunk if there is anything in it. Drops without messages or events are
// merged into the drops of the chunk before. The caller holds mu.
func (b *Inbox) append(c *Chunk) {
	last := b.last()
	switch {
	case c.messages > 0 || len(c.Events) > 0:
		b.chunks = append(b.chunks, c)
	case c.Drops == nil:
	case last != nil && last.Drops != nil:
		last.Drops.merge(c.Drops)
	default:
		b.chunks = append(b.chunks, c)
	}
}

// AddEvents adds the events of connections that happened while no messages arrived.
func (b *Inbox) AddEvents() {
	b.order.Lock()
	defer b.order.Unlock()
	events := b.appendEvents(nil, 0)
	b.mu.Lock()
	if last := b.last(); last != nil && last.Batch == nil && last.Drops == nil {
		last.Events = append(last.Events, events...)
	} else {
		b.append(&Chunk{Events: events})
	}
	b.mu.Unlock()
	b.Wake()
}

// appendEvents appends the monitor's events, which happened before the message at an
// index. An error of the monitor is returned by Monitor.Wait as well.
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

// Wake makes Next call its deadline function again.
func (b *Inbox) Wake() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// Next waits for the next chunk, which the caller must pass to Recycle. It returns
// os.ErrDeadlineExceeded when the time that deadline returns has passed; a zero time means
// no deadline. After Drain has ended and no chunk is left, it returns the error that ended
// Drain.
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
			due = time.After(wait)
		}
		select {
		case <-b.wake:
		case <-due:
		}
	}
}

// pop removes the first chunk. It returns nil if there is none, or if messages are being
// added to it.
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
	b.mu.Lock()
	after := b.usage.add(-c.messages, -c.bytes)
	b.config.Budget.Release(b.usage.budgeted() - after.budgeted())
	b.usage = after
	for i := 0; b.config.PerConnection && i < c.Len(); i++ {
		m := c.Batch.Message(i)
		if m.Count == 0 { // dropped
			continue
		}
		u := b.connections[m.FD].add(-1, -m.bytes())
		b.connections[m.FD] = u
		if u.messages == 0 {
			delete(b.connections, m.FD)
		}
	}
	b.mu.Unlock()
	b.config.Pool.put(c.Batch)
	c.Batch = nil
}

// Discard releases all chunks. Drain must have ended.
func (b *Inbox) Discard() {
	for {
		c, _ := b.pop()
		if c == nil {
			return
		}
		b.Recycle(c)
	}
}

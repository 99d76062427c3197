package transport

import "sync"

const (
	// batchSize is how many messages a chunk has at most.
	batchSize = 64
	// batchOverhead is approximately how many bytes libzmq and Go need for a chunk without
	// its frames.
	batchOverhead = 32 << 10
)

// Chunk is some messages of an Inbox in the order in which they arrived, and what happened
// between and after them.
type Chunk struct {
	// Batch has the messages; nil if there are none. A dropped message has no frames.
	Batch *Batch
	// Events are the events of connections, if the inbox is per connection.
	Events []ChunkEvent
	// Drops are the messages that were dropped after the messages of Batch; nil if there are
	// none.
	Drops *Drops

	filling         bool // Drain is adding messages
	messages, bytes int  // of the messages that were not dropped
}

// ChunkEvent is an event of a connection before the message of index Before arrived.
type ChunkEvent struct {
	Event
	Before int
}

// Len returns the number of messages, the dropped ones included.
func (c *Chunk) Len() int {
	if c.Batch == nil {
		return 0
	}
	return c.Batch.Len()
}

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

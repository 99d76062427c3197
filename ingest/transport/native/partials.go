package native

import (
	"container/list"
	"sync"
)

// partials bounds the memory of messages that have arrived in part. When it is exhausted, the
// connections whose messages are incomplete for the longest time are evicted: a message of an
// engine is complete within milliseconds, and one that a peer withholds never is.
type partials struct {
	limit int64

	mu    sync.Mutex // guards all below
	used  int64
	order *list.List // of *partial, the oldest first
}

// partial is the account of one connection. Its owner must not copy it.
type partial struct {
	evict func() // called at most once, in any goroutine; must not block

	// The mutex of partials guards these. The owner may read bytes without it.
	bytes   int64
	element *list.Element // nil while bytes is 0
	evicted bool
}

func newPartials(limit int64) *partials { return &partials{limit: limit, order: list.New()} }

// resize sets the bytes of a connection. 0 ends its incomplete message.
func (p *partials) resize(c *partial, bytes int64) {
	if bytes == c.bytes {
		return // the owner alone changes it
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used += bytes - c.bytes
	c.bytes = bytes
	switch {
	case bytes == 0:
		if c.element != nil {
			p.order.Remove(c.element)
			c.element = nil
		}
		return
	case c.element == nil:
		c.element = p.order.PushBack(c)
	}
	excess := p.used - p.limit
	for e := p.order.Front(); e != nil && excess > 0; e = e.Next() {
		oldest := e.Value.(*partial)
		excess -= oldest.bytes // until its owner has closed it, it is counted
		if !oldest.evicted {
			oldest.evicted = true
			oldest.evict()
		}
	}
}

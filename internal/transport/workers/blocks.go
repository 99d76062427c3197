package workers

import (
	"container/list"
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// blockBytes is the memory of a block, with its parts of the map and the list, without the name of its adapter: 181 bytes of a million blocks.
const blockBytes = 192

// block is a block that a worker has announced.
type block struct {
	feed.Content
	announced time.Time // last
	// disputed reports whether several contents were announced under its hash: it does not count as held.
	disputed bool
}

func (b *block) bytes() int64 { return int64(blockBytes + len(b.LoRA)) }

// limit bounds the memory of blocks. It is implemented by budget.Budget.
type limit interface {
	Reserve(bytes int64) bool
	Release(bytes int64)
}

// blocks are the blocks that workers have announced, the oldest first. It is pure, and not safe for concurrent use.
type blocks struct {
	maxAge time.Duration
	limit  limit
	all    map[uint64]*list.Element // of *block, by hash
	byAge  list.List
}

func newBlocks(maxAge time.Duration, l limit) *blocks {
	return &blocks{maxAge: maxAge, limit: l, all: make(map[uint64]*list.Element)}
}

// store records that a block was announced. isNew reports whether the pool holds it now and did not before. gone are the hashes of blocks
// that it does not hold any more: the oldest, to make room, or the block itself if it was announced with another content before.
func (b *blocks) store(c feed.Content, now time.Time) (isNew bool, gone []uint64) {
	if e, ok := b.all[c.Hash]; ok {
		at := e.Value.(*block)
		at.announced = now
		b.byAge.MoveToBack(e)
		if at.disputed || at.Content == c {
			return false, nil
		}
		at.disputed = true
		return false, []uint64{c.Hash}
	}
	next := &block{Content: c, announced: now}
	for !b.limit.Reserve(next.bytes()) {
		oldest := b.byAge.Front()
		if oldest == nil {
			return false, gone
		}
		gone = b.forget(oldest, gone)
	}
	b.all[c.Hash] = b.byAge.PushBack(next)
	return true, gone
}

// held returns the blocks that the pool holds, the oldest first.
func (b *blocks) held() (all []feed.Content) {
	for e := b.byAge.Front(); e != nil; e = e.Next() {
		if at := e.Value.(*block); !at.disputed {
			all = append(all, at.Content)
		}
	}
	return all
}

// remove records that a block was removed, and returns whether the pool held it.
func (b *blocks) remove(hash uint64) bool {
	e, ok := b.all[hash]
	return ok && len(b.forget(e, nil)) > 0
}

// expire forgets the blocks that are older than maxAge, and returns the hashes of those that the pool held.
func (b *blocks) expire(now time.Time) (gone []uint64) {
	for e := b.byAge.Front(); e != nil && now.Sub(e.Value.(*block).announced) > b.maxAge; e = b.byAge.Front() {
		gone = b.forget(e, gone)
	}
	return gone
}

// close forgets all blocks.
func (b *blocks) close() {
	for e := b.byAge.Front(); e != nil; e = b.byAge.Front() {
		b.forget(e, nil)
	}
}

// forget forgets a block, and appends its hash if the pool held it.
func (b *blocks) forget(e *list.Element, gone []uint64) []uint64 {
	at := e.Value.(*block)
	b.byAge.Remove(e)
	delete(b.all, at.Hash)
	b.limit.Release(at.bytes())
	if !at.disputed {
		gone = append(gone, at.Hash)
	}
	return gone
}

package index

import (
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/encode"
	"github.com/kvcast/kvcast/internal/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// encode yields the blocks of a copy, each after its parent, and reports whether to continue:
//
//  1. From each block that is not visited it follows the parents up to one that is, or that the copy does not have. It
//     marks them, so that a cycle of parents ends.
//  2. It encodes these blocks from the top down. Consecutive blocks are one event if they differ only in their hashes.
func (c *rankCopy) encode(worker string, rank uint32, yield func([]byte) bool) bool {
	c.link()
	e := &snapshotEncoder{c: c, worker: worker, rank: rank, yield: yield}
	var chain []uint32 // from the bottom up
	for i := range c.blocks {
		chain = chain[:0]
		for n := uint32(i); c.blocks[n].flags&flagVisited == 0; n = uint32(c.blocks[n].parent) {
			b := &c.blocks[n]
			b.flags |= flagVisited
			if chain = append(chain, n); b.flags&flagLinked == 0 {
				break
			}
		}
		for k := len(chain) - 1; k >= 0; k-- {
			if !e.add(chain[k]) {
				return false
			}
		}
	}
	return e.flush() && e.send()
}

// link replaces each block's parent hash by the parent's number, if the copy has the parent.
func (c *rankCopy) link() {
	if len(c.blocks) == 0 {
		return
	}
	size := uint(bits.Len(uint(len(c.blocks)))) + 1 // a quarter to a half of the slots are used
	c.numbers = make([]uint32, 1<<size)
	mask := uint64(1)<<size - 1
	for i := range c.blocks {
		at := hashtable.Hash(c.blocks[i].hash) & mask
		for c.numbers[at] != 0 {
			at = (at + 1) & mask
		}
		c.numbers[at] = uint32(i) + 1
	}
	for i := range c.blocks {
		b := &c.blocks[i]
		if b.flags&flagParent == 0 {
			continue
		}
		for at := hashtable.Hash(b.parent) & mask; c.numbers[at] != 0; at = (at + 1) & mask {
			if n := c.numbers[at] - 1; c.blocks[n].hash == b.parent {
				b.parent = uint64(n)
				b.flags |= flagLinked
				break
			}
		}
	}
	c.numbers = nil
}

// snapshotEncoder puts blocks into events, and events into pieces.
type snapshotEncoder struct {
	c      *rankCopy
	worker string
	rank   uint32
	run    encode.Stored // the event that is being built
	last   uint32        // the run's last block
	buf    []byte
	yield  func([]byte) bool
}

// add adds a block of the copy, and reports whether to continue.
func (e *snapshotEncoder) add(n uint32) bool {
	b := &e.c.blocks[n]
	hashed := b.flags&flagTokens != 0
	if !e.continues(b) {
		if !e.flush() {
			return false
		}
		a := e.c.attrs[b.attr]
		e.run.LoRA, e.run.BlockSize, e.run.HasParent = a.lora, a.blockSize, b.flags&flagParent != 0
		if e.run.Parent = b.parent; b.flags&flagLinked != 0 {
			e.run.Parent = e.c.blocks[b.parent].hash
		}
	}
	e.last = n
	e.run.BlockHashes = append(e.run.BlockHashes, b.hash)
	if hashed {
		e.run.TokensHashes = append(e.run.TokensHashes, b.tokens)
	}
	return true
}

// continues reports whether a block belongs to the same event as the block before.
func (e *snapshotEncoder) continues(b *copiedBlock) bool {
	if n := len(e.run.BlockHashes); n == 0 || n == snapshotRun || b.flags&flagLinked == 0 || uint32(b.parent) != e.last {
		return false
	}
	last := &e.c.blocks[e.last]
	return b.attr == last.attr && b.tiers == last.tiers && (b.flags^last.flags)&flagTokens == 0
}

// flush ends the event, and adds it once for each tier that holds its blocks.
func (e *snapshotEncoder) flush() bool {
	if len(e.run.BlockHashes) == 0 {
		return true
	}
	if len(e.buf) == 0 {
		e.buf = newPiece()
		e.buf = protowire.AppendTag(e.buf, kvcastv1.SnapshotBlocksWorkerField, protowire.BytesType)
		e.buf = protowire.AppendString(e.buf, e.worker)
	}
	for tier := range NumTiers {
		if e.c.blocks[e.last].tiers&(1<<tier) != 0 {
			head := encode.Head{Rank: e.rank, Tier: kvcastv1.Tier(tier + 1)}
			e.buf = encode.AppendStored(e.buf, kvcastv1.SnapshotBlocksEventsField, head, &e.run)
		}
	}
	e.run.BlockHashes, e.run.TokensHashes = e.run.BlockHashes[:0], e.run.TokensHashes[:0]
	return len(e.buf) < snapshotBytes || e.send()
}

// send ends the piece.
func (e *snapshotEncoder) send() bool {
	if len(e.buf) == 0 {
		return true
	}
	piece := e.buf
	e.buf = nil
	return e.yield(piece)
}

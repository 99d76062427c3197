package index

import (
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/hashtable"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// encode yields the blocks of a copy, each after its parent, and reports whether to continue:
//
//  1. It sorts the blocks by their places, so that most blocks follow their parents.
//  2. From each block that is not visited it follows the parents up to one that is, or that the copy does not have. It
//     marks them, so that a cycle of parents ends.
//  3. It encodes these blocks from the top down. Consecutive blocks are one event if they differ only in their hashes.
func (c *rankCopy) encode(worker string, rank uint32, yield func([]byte) bool) bool {
	c.sort()
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

// placed is a block to sort.
type placed struct {
	place uint64
	block uint32
}

// digitBits is the size of a digit of the radix sort.
const digitBits = 11

// sort sorts the blocks by place: a radix sort of their indexes, from the least significant digit on, and then one move of each block.
func (c *rankCopy) sort() {
	order, next := make([]placed, len(c.blocks)), make([]placed, len(c.blocks))
	most := uint64(0)
	for i := range c.blocks {
		order[i] = placed{c.blocks[i].place, uint32(i)}
		most = max(most, c.blocks[i].place)
	}
	for shift := 0; most>>shift != 0; shift += digitBits {
		var starts [1 << digitBits]uint32
		for _, p := range order {
			starts[p.place>>shift&(1<<digitBits-1)]++
		}
		start := uint32(0)
		for digit, n := range starts {
			starts[digit], start = start, start+n
		}
		for _, p := range order {
			at := &starts[p.place>>shift&(1<<digitBits-1)]
			next[*at] = p
			*at++
		}
		order, next = next, order
	}
	sorted := make([]copiedBlock, len(c.blocks))
	for i, p := range order {
		sorted[i] = c.blocks[p.block]
	}
	c.blocks = sorted
	if c.idsAt == nil {
		return
	}
	idsAt := make([]uint32, len(c.idsAt))
	for i, p := range order {
		idsAt[i] = c.idsAt[p.block]
	}
	c.idsAt = idsAt
}

// link replaces each block's parent hash by the parent's index, if the copy has the parent.
func (c *rankCopy) link() {
	byHash := c.byHash()
	for i := range c.blocks {
		b := &c.blocks[i]
		switch {
		case b.flags&flagParent == 0:
		case i > 0 && c.blocks[i-1].hash == b.parent:
			b.parent = uint64(i - 1)
			b.flags |= flagLinked
		default:
			if n, ok := byHash.find(c, b.parent); ok {
				b.parent = uint64(n)
				b.flags |= flagLinked
			}
		}
	}
}

// blockNumbers finds the blocks of a copy by hash, with linear probing. An element is the index of a block plus one, or
// 0. Its length is a power of two.
type blockNumbers []uint32

// byHash returns the indexes of all blocks by hash.
func (c *rankCopy) byHash() blockNumbers {
	t := make(blockNumbers, 2<<bits.Len(uint(len(c.blocks)))) // a quarter to a half are used
	for i := range c.blocks {
		at := t.home(c.blocks[i].hash)
		for t[at] != 0 {
			at = (at + 1) & (len(t) - 1)
		}
		t[at] = uint32(i) + 1
	}
	return t
}

func (t blockNumbers) home(hash uint64) int { return int(hashtable.Hash(hash)) & (len(t) - 1) }

func (t blockNumbers) find(c *rankCopy, hash uint64) (_ uint32, ok bool) {
	for at := t.home(hash); t[at] != 0; at = (at + 1) & (len(t) - 1) {
		if n := t[at] - 1; c.blocks[n].hash == hash {
			return n, true
		}
	}
	return 0, false
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
	if !e.continues(n) {
		if !e.flush() {
			return false
		}
		a := e.c.attrs.At(b.attr)
		e.run.LoRA, e.run.BlockSize, e.run.HasParent = a.LoRA, a.BlockSize, b.flags&flagParent != 0
		if e.run.Parent = b.parent; b.flags&flagLinked != 0 {
			e.run.Parent = e.c.blocks[b.parent].hash
		}
	}
	e.last = n
	e.run.BlockHashes = append(e.run.BlockHashes, b.hash)
	if hashed {
		e.run.TokensHashes = append(e.run.TokensHashes, b.tokens)
	}
	e.run.TokenIDs = append(e.run.TokenIDs, e.c.idsOf(n)...)
	return true
}

// continues reports whether a block belongs to the same event as the block before.
func (e *snapshotEncoder) continues(next uint32) bool {
	b := &e.c.blocks[next]
	if n := len(e.run.BlockHashes); n == 0 || n == snapshotRun || len(e.run.TokenIDs) >= maxRunIDs || b.flags&flagLinked == 0 || uint32(b.parent) != e.last {
		return false
	}
	last := &e.c.blocks[e.last]
	return b.attr == last.attr && b.tiers == last.tiers && (b.flags^last.flags)&flagTokens == 0 &&
		(e.c.idsOf(next) == nil) == (e.c.idsOf(e.last) == nil)
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
	e.run.BlockHashes, e.run.TokensHashes, e.run.TokenIDs = e.run.BlockHashes[:0], e.run.TokensHashes[:0], e.run.TokenIDs[:0]
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

package pipeline

import (
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// snapshotRun is the maximum number of blocks in an event of a snapshot.
	snapshotRun = 1024
	// snapshotBytes is the approximate size of a snapshot's pieces.
	snapshotBytes = 64 << 10
)

// pieces recycles the memory of sent pieces until the garbage collector frees it.
var pieces = sync.Pool{New: func() any { return new([pieceBytes]byte) }}

// pieceBytes is the size of a piece and of the event that makes the piece exceed snapshotBytes.
const pieceBytes = snapshotBytes + snapshotRun*18

func newPiece() []byte { return pieces.Get().(*[pieceBytes]byte)[:0] }

// reusePiece returns a piece to the pool, unless the piece had to grow.
func reusePiece(piece []byte) {
	if cap(piece) == pieceBytes {
		pieces.Put((*[pieceBytes]byte)(piece[:pieceBytes]))
	}
}

// ancestry is the path from a block up to an ancestor whose parent is absent or already marked.
type ancestry struct {
	chain   []uint32 // from the bottom up
	next    uint32   // parent of the top block
	after   int      // the ancestry that has the top block's parent and is encoded first; or -1
	encoded bool
}

// ancestries are inStep ancestries that are built together.
type ancestries struct {
	c     *tableCopy
	all   [inStep]ancestry
	n     int
	first uint32 // number of the first ancestry
}

// encode yields the blocks, each after its parent:
//
//  1. From inStep blocks that are not marked it follows the parents up and marks them, so that a
//     cycle ends an ancestry. The ancestries advance in turn, so that their cache misses overlap.
//  2. It encodes each ancestry from the top down, after the ancestry that has the top block's
//     parent. An ancestry is one event, or several if its blocks differ in the events' common
//     fields.
func (c *tableCopy) encode(worker string, h eventHead, yield func([]byte) bool) bool {
	return c.encodeFrom(0, worker, h, yield)
}

// encodeFrom is encode with ancestries numbered from first on.
func (c *tableCopy) encodeFrom(first uint32, worker string, h eventHead, yield func([]byte) bool) bool {
	c.link()
	e := &snapshotEncoder{c: c, worker: worker, head: h, yield: yield}
	up := &ancestries{c: c, first: first}
	for first, part := range c.parts {
		for i := range part {
			if !part[i].Used() || part[i].Value.flags&flagEncoded != 0 {
				continue
			}
			if up.begin(first + uint32(i)); up.n == inStep && !up.finish(e) {
				return false
			}
		}
	}
	return up.finish(e) && e.flush() && e.send()
}

// begin begins an ancestry at a block.
func (s *ancestries) begin(i uint32) {
	up := &s.all[s.n]
	up.chain, up.after, up.encoded = up.chain[:0], -1, false
	s.n++
	s.mark(s.n-1, i)
}

// mark adds a block to ancestry k, and reports whether the block's parent is in the copy.
func (s *ancestries) mark(k int, i uint32) bool {
	up, b := &s.all[k], &s.c.at(i).Value
	b.flags |= flagEncoded | blockFlags((s.first+uint32(k))<<ancestryShift)
	up.chain = append(up.chain, i)
	up.next = uint32(b.parent)
	return b.flags&flagLinked != 0
}

// finish completes the ancestries and encodes them.
func (s *ancestries) finish(e *snapshotEncoder) bool {
	var going [inStep]int
	n := 0
	for k := range s.n {
		if s.c.at(s.all[k].chain[0]).Value.flags&flagLinked != 0 {
			going[n] = k
			n++
		}
	}
	for n > 0 {
		var flags [inStep]blockFlags
		for j := range n {
			flags[j] = s.c.at(s.all[going[j]].next).Value.flags // load all blocks first, so that cache misses overlap
		}
		still := 0
		for j := range n {
			k := going[j]
			up := &s.all[k]
			f := flags[j] | s.c.at(up.next).Value.flags // this loop may have marked the block
			if f&flagEncoded != 0 {
				if by := (uint32(f>>ancestryShift) - s.first) & ancestryMask; by < inStep {
					up.after = int(by)
				}
			} else if s.mark(k, up.next) {
				going[still] = k
				still++
			}
		}
		n = still
	}
	for k := range s.n {
		if !s.encodeChain(k, e) {
			return false
		}
	}
	s.first += inStep
	s.n = 0
	return true
}

// ancestryMask is the largest number of an ancestry; the next number is 0. Ancestries that had the
// same number before are encoded.
const ancestryMask = 1<<(32-ancestryShift) - 1

// encodeChain encodes ancestry k, after the ancestry that has its top block's parent.
func (s *ancestries) encodeChain(k int, e *snapshotEncoder) bool {
	up := &s.all[k]
	if up.encoded {
		return true
	}
	up.encoded = true // before the recursion, since parents may form a cycle
	if up.after >= 0 && !s.encodeChain(up.after, e) {
		return false
	}
	for i := len(up.chain) - 1; i >= 0; i-- {
		if !e.add(up.chain[i]) {
			return false
		}
	}
	return true
}

// snapshotEncoder puts blocks into events, and events into pieces.
type snapshotEncoder struct {
	c      *tableCopy
	worker string
	head   eventHead
	run    run
	// last is the block that was added last, attr is the slot of the run's attributes.
	last, attr uint32
	buf        []byte
	yield      func([]byte) bool
}

// add adds a block of the copy, and reports whether to continue.
func (e *snapshotEncoder) add(i uint32) bool {
	b, r := &e.c.at(i).Value, &e.run
	hashed := b.flags&flagTokensHash != 0
	joins := !r.empty() && b.flags&flagLinked != 0 && uint32(b.parent) == e.last && b.attr == e.attr && hashed == r.key.hashed && len(r.hashes) < snapshotRun
	if !joins {
		if !e.flush() {
			return false
		}
		a, parent := e.c.attrs[b.attr], b.parent
		if b.flags&flagLinked != 0 {
			parent = e.c.at(uint32(parent)).Key()
		}
		r.key = runKey{kind: wire.KindStored, lora: a.LoRA, blockSize: a.BlockSize, hashed: hashed}
		r.parent, r.hasParent = parent, b.flags&flagParent != 0
		e.attr = b.attr
	}
	e.last = i
	r.hashes = append(r.hashes, e.c.at(i).Key())
	if hashed {
		r.tokensHashes = append(r.tokensHashes, b.tokensHash)
	}
	return true
}

// flush ends the event.
func (e *snapshotEncoder) flush() bool {
	if e.run.empty() {
		return true
	}
	if len(e.buf) == 0 {
		e.buf = newPiece()
		e.buf = protowire.AppendTag(e.buf, kvcastv1.SnapshotBlocksWorkerField, protowire.BytesType)
		e.buf = protowire.AppendString(e.buf, e.worker)
	}
	e.buf = appendStored(e.buf, kvcastv1.SnapshotBlocksEventsField, e.head, &e.run)
	e.run.reset()
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

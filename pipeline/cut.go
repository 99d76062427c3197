package pipeline

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Cut is what a worker held at one entry, or nearly: some blocks are as they
// were at a later one. Whoever applies the worker's entries after Seq has its
// state exactly, since applying an event twice changes nothing.
type Cut struct {
	// Seq is that of the last entry that all of the cut includes.
	Seq uint64
	// Worker is its record at Seq.
	Worker *kvcastv1.SnapshotWorker
	// Blocks yields what it holds as encoded kvcast.v1.SnapshotBlocks, of some
	// 64 KiB each, a parent before its children where it is held. The memory is
	// the caller's. It takes the worker's lane for short turns while it is read,
	// and ends early when the context does. A table is copied while it is read;
	// where others are, so that there is no room, it waits for theirs.
	Blocks iter.Seq[[]byte]
}

// Workers returns the names of the workers that a filter takes, in order.
func (p *Pipeline) Workers(match func(worker, model string) bool) []string {
	var names []string
	for _, l := range p.matching(match) {
		names = append(names, l.worker)
	}
	return names
}

// Cut begins to read what a worker holds in the tiers given. ok is false where
// there is no such worker, or no longer.
func (p *Pipeline) Cut(ctx context.Context, worker string, tiers journal.Tiers) (c Cut, ok bool, err error) {
	p.mu.Lock()
	l := p.lanes[worker]
	p.mu.Unlock()
	if l == nil {
		return Cut{}, false, nil
	}
	l.mu.Lock()
	if l.gone {
		l.mu.Unlock()
		return Cut{}, false, nil
	}
	receipt := l.entry.appended
	record := l.record()
	ranks := slices.Sorted(maps.Keys(l.ranks))
	l.mu.Unlock()
	seq, err := receipt.Wait(ctx)
	if err != nil {
		return Cut{}, false, fmt.Errorf("cut worker %s: %w", worker, err)
	}
	return Cut{Seq: seq, Worker: record, Blocks: func(yield func([]byte) bool) {
		for _, rank := range ranks {
			for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
				if tiers&journal.TierBit(uint8(tier)) == 0 {
					continue
				}
				if !p.tellTable(ctx, l, place{rank, tier}, yield) {
					return
				}
			}
		}
	}}, true, nil
}

// tellTable yields what a table holds, from a copy that it has room for.
func (p *Pipeline) tellTable(ctx context.Context, l *Lane, at place, yield func([]byte) bool) bool {
	bytes := l.tableBytes(at)
	if p.copies.take(ctx, bytes) != nil {
		return false
	}
	defer p.copies.give(bytes)
	table := l.copyTable(ctx, at)
	return ctx.Err() == nil && table.encode(l.worker, eventHead{rank: at.rank, tier: at.tier}, yield)
}

// tableBytes is what a copy of a table takes.
func (l *Lane) tableBytes(at place) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.table(at)
	if t == nil {
		return 0
	}
	slots := 0
	for s := range t.blocks.segments() {
		slots += len(s.slots)
	}
	return slots * int(unsafe.Sizeof(block{}))
}

// record is the worker's record as it is now.
func (l *Lane) record() *kvcastv1.SnapshotWorker {
	added := proto.CloneOf(l.added)
	added.Ranks = l.rankNames()
	r := &kvcastv1.SnapshotWorker{Worker: l.worker, Added: added, LastEventId: l.lastEventID}
	for _, rank := range added.GetRanks() {
		if s := l.ranks[rank]; s != nil && s.incomplete {
			r.IncompleteRanks = append(r.IncompleteRanks, rank)
		}
	}
	return r
}

// rankNames returns the ranks that were configured or heard of, in order.
func (l *Lane) rankNames() []uint32 {
	names := slices.AppendSeq(slices.Clone(l.added.GetRanks()), maps.Keys(l.ranks))
	slices.Sort(names)
	return slices.Compact(names)
}

// copyTable copies a table in short turns. Between two of them it may change; the
// entries since the first turn tell how.
func (l *Lane) copyTable(ctx context.Context, at place) *tableCopy {
	c := &tableCopy{attrs: make(map[*segment][]attrSlot)}
	last, attrs := -1, []attrSlot(nil)
	l.turns(ctx, at, func(turn int, t *table, s *segment) {
		if turn != last {
			last, attrs = turn, slices.Clone(t.attrs.slots)
		}
		s = s.clone()
		c.blocks.addSegment(s)
		c.attrs[s] = attrs
	})
	c.blocks.fill()
	return c
}

// tableCopy is a copy of a table, to be put in order.
type tableCopy struct {
	blocks blocks
	// attrs are those that each segment's blocks had when it was copied: slots are
	// used again.
	attrs map[*segment][]attrSlot
}

const (
	// snapshotRun is the most blocks in an event of a snapshot.
	snapshotRun = 1024
	// snapshotBytes is about the size of the pieces that a snapshot is sent in.
	snapshotBytes = 64 << 10
)

// encode yields the blocks, each after its parent:
//
//  1. From each block not yet told it climbs to the first ancestor that is there
//     and has not been told, marking its way, so that a circle ends the climb.
//  2. What it came by, from the top down, is a chain: each block's parent is the
//     one before it. It is told as one event, or as several where the blocks
//     differ in what an event says once for all.
func (c *tableCopy) encode(worker string, h eventHead, yield func([]byte) bool) bool {
	if c.blocks.len() == 0 {
		return true
	}
	e := &snapshotEncoder{worker: worker, head: h, yield: yield}
	var chain []*block
	var attrs []attr
	for s := range c.blocks.segments() {
		for i := range s.slots {
			b := &s.slots[i]
			if b.flags&flagHeld == 0 || b.flags&flagTold != 0 {
				continue
			}
			chain, attrs = chain[:0], attrs[:0]
			for in := s; ; {
				b.flags |= flagTold
				chain, attrs = append(chain, b), append(attrs, c.attrs[in][b.attr].attr)
				if b.flags&flagParent == 0 {
					break
				}
				up, k, ok := c.blocks.find(b.parent)
				if !ok || up.slots[k].flags&flagTold != 0 {
					break
				}
				in, b = up, &up.slots[k]
			}
			for k := len(chain) - 1; k >= 0; k-- {
				if !e.add(chain[k], attrs[k]) {
					return false
				}
			}
		}
	}
	return e.flush() && e.send()
}

// snapshotEncoder puts blocks into events, and events into pieces.
type snapshotEncoder struct {
	worker string
	head   eventHead
	run    run
	buf    []byte
	yield  func([]byte) bool
}

// add adds a block, and tells whether more is wanted.
func (e *snapshotEncoder) add(b *block, a attr) bool {
	key := runKey{kind: wire.KindStored, lora: a.lora, blockSize: a.blockSize, hashed: b.flags&flagTokensHash != 0}
	hasParent := b.flags&flagParent != 0
	r := &e.run
	joins := !r.empty() && r.key == key && hasParent && b.parent == r.last() && len(r.hashes) < snapshotRun
	if !joins {
		if !e.flush() {
			return false
		}
		r.start(key, b.parent, hasParent)
	}
	r.hashes = append(r.hashes, b.hash)
	if key.hashed {
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
		e.buf = make([]byte, 0, snapshotBytes+snapshotRun*18)
		e.buf = protowire.AppendTag(e.buf, snapshotWorker, protowire.BytesType)
		e.buf = protowire.AppendString(e.buf, e.worker)
	}
	e.buf = appendStored(e.buf, snapshotEvents, e.head, &e.run)
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

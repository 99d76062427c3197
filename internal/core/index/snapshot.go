package index

import (
	"context"
	"iter"
	"math"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/internal/core/index/radix"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Snapshot is the state of a worker after one entry. Some blocks may be of later entries. The state is exact after
// applying the entries after Seq, since events may be applied twice.
type Snapshot struct {
	// Seq is the seq of the last entry that the snapshot includes completely.
	Seq uint64
	// Worker is the worker's record at Seq.
	Worker *kvcastv1.SnapshotWorker
	// TokenIDs makes Blocks include the token ids that the index retains.
	TokenIDs bool

	index *Index
}

// Snapshot begins a snapshot of a worker; ok is false if the worker does not exist.
func (x *Index) Snapshot(name string) (s Snapshot, ok bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.workers[name]
	if w == nil {
		return Snapshot{}, false
	}
	return Snapshot{Seq: x.seq, Worker: w.record(), index: x}, true
}

// record returns the worker's current record.
func (w *worker) record() *kvcastv1.SnapshotWorker {
	added := &kvcastv1.WorkerAdded{Model: w.model}
	if w.added != nil {
		added = proto.CloneOf(w.added)
	}
	added.BlockSize, added.Ranks = w.blockSize, nil
	s := &kvcastv1.SnapshotWorker{Worker: w.name, Added: added, LastEventId: w.lastEventID}
	for _, r := range w.ranks {
		added.Ranks = append(added.Ranks, r.number)
		if r.all != 0 {
			s.IncompleteRanks = append(s.IncompleteRanks, r.number)
		}
		if r.gaps != 0 || r.all != 0 || r.groupsOmitted || r.groups() != nil {
			s.Ranks = append(s.Ranks, &kvcastv1.SnapshotRank{
				DpRank: r.number, Reasons: r.all.List(), TierReasons: tierReasons(&r.reasons, &r.chunks), Detail: r.detail, Gaps: r.gaps, MissedBatches: r.missedBatches, GroupsOmitted: r.groupsOmitted,
				Groups: r.groups(),
			})
		}
	}
	return s
}

// Blocks yields encoded kvcast.v1.SnapshotBlocks of some 64 KiB each, with the blocks in some tiers, parents before their children. It
// copies one rank at a time, in some 120 bytes a block, and holds up the index's writer for less than a millisecond at a time. The caller
// owns the yielded memory, and may return it with Reuse. Blocks ends early when the context is done.
func (s *Snapshot) Blocks(ctx context.Context, tiers kvblock.Tiers) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for _, number := range s.Worker.GetAdded().GetRanks() {
			if !s.rankBlocks(ctx, number, tiers, yield) {
				return
			}
		}
	}
}

// RankBlocks is Blocks for one rank.
func (s *Snapshot) RankBlocks(ctx context.Context, rank uint32, tiers kvblock.Tiers) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) { s.rankBlocks(ctx, rank, tiers, yield) }
}

func (s *Snapshot) rankBlocks(ctx context.Context, rank uint32, tiers kvblock.Tiers, yield func([]byte) bool) bool {
	c := s.copyRank(ctx, rank, tiers)
	return ctx.Err() == nil && c.encode(s.Worker.GetWorker(), rank, yield) && s.groupBlocks(ctx, rank, tiers, yield)
}

// rankCopy is a copy of the blocks of a rank. Blocks are identified by their index in blocks.
type rankCopy struct {
	blocks []copiedBlock
	attrs  attribute.Interner // without salts
	// ids are token ids, if they are wanted. idsAt has for each block the index in ids plus one; 0 if it has none.
	ids   []uint32
	idsAt []uint32
}

// copiedBlock is a block of a copy.
type copiedBlock struct {
	hash, tokens uint64
	place        uint64 // see radix.Block
	// parent is the parent's block hash, or its number if flagLinked is set.
	parent uint64
	attr   uint32
	tiers  uint8
	flags  copyFlags
}

type copyFlags uint8

const (
	flagParent copyFlags = 1 << iota
	flagTokens
	flagLinked  // the parent is in the copy
	flagVisited // the block is encoded, or in the chain that is being encoded
)

// copyRank copies the blocks of a rank in some tiers, part by part. The rank may change between two parts; the journal
// has entries with the changes.
func (s *Snapshot) copyRank(ctx context.Context, number uint32, tiers kvblock.Tiers) *rankCopy {
	c := &rankCopy{attrs: attribute.NewInterner(nil)}
	var part []radix.Block
	for from, first := uint64(0), true; first || from != 0 && ctx.Err() == nil; first = false {
		part, from = s.scan(number, from, part[:0], uint8(tiers>>1), c)
		for i := range part {
			if b := &part[i]; b.Tiers&uint8(tiers>>1) != 0 {
				c.add(b, uint8(tiers>>1))
			}
		}
	}
	return c
}

// addIDs adds the token ids of a block that is added next.
func (c *rankCopy) addIDs(x *radix.Index, b *radix.Block) {
	at, before := uint32(0), len(c.ids)
	if uint64(before) < math.MaxUint32 {
		c.ids = x.AppendTokenIDs(c.ids, b)
	}
	if len(c.ids)-before == int(b.BlockSize) && b.BlockSize > 0 {
		at = uint32(before) + 1
	} else {
		c.ids = c.ids[:before]
	}
	c.idsAt = append(c.idsAt, at)
}

// idsOf returns the token ids of a block; nil if it has none.
func (c *rankCopy) idsOf(n uint32) []uint32 {
	if c.idsAt == nil || c.idsAt[n] == 0 {
		return nil
	}
	from := int(c.idsAt[n]) - 1
	return c.ids[from : from+int(c.attrs.At(c.blocks[n].attr).BlockSize)]
}

// scan reads a part of a rank, and adds the token ids of the blocks in some tiers.
func (s *Snapshot) scan(number uint32, from uint64, part []radix.Block, tiers uint8, c *rankCopy) (_ []radix.Block, next uint64) {
	x := s.index
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(s.Worker.GetWorker(), number)
	if r == nil { // the worker was removed
		return part, 0
	}
	if c.blocks == nil {
		most := uint64(0)
		for tier := range NumTiers {
			blocks, _ := r.blocks.Digest(tier)
			most = max(most, blocks)
		}
		c.blocks = make([]copiedBlock, 0, most+most/64)
	}
	part, next = x.blocks.Scan(r.blocks, from, part)
	if !s.TokenIDs || !x.blocks.RetainsTokenIDs() {
		return part, next
	}
	for i := range part {
		if b := &part[i]; b.Tiers&tiers != 0 {
			c.addIDs(x.blocks, b)
		}
	}
	return part, next
}

func (c *rankCopy) add(b *radix.Block, tiers uint8) {
	copied := copiedBlock{hash: b.Hash, tokens: b.Tokens, place: b.Place, parent: b.Parent, tiers: b.Tiers & tiers}
	if b.HasParent {
		copied.flags |= flagParent
	}
	if b.HasTokens {
		copied.flags |= flagTokens
	}
	copied.attr, _ = c.attrs.Acquire(attribute.Set{LoRA: b.LoRA, BlockSize: b.BlockSize})
	c.blocks = append(c.blocks, copied)
}

const (
	// snapshotRun is the maximum number of blocks in an event of a snapshot.
	snapshotRun = 1024
	// maxRunIDs is the number of token ids beyond which an event of a snapshot has no further block.
	maxRunIDs = 16 << 10
	// snapshotBytes is the approximate size of a snapshot's pieces.
	snapshotBytes = 64 << 10
	// pieceBytes is the size of a piece and of the events that make the piece exceed snapshotBytes.
	pieceBytes = snapshotBytes + NumTiers*snapshotRun*18
)

// pieces recycles the memory of sent pieces until the garbage collector frees it.
var pieces = sync.Pool{New: func() any { return new([pieceBytes]byte) }}

func newPiece() []byte { return pieces.Get().(*[pieceBytes]byte)[:0] }

// Reuse takes back the memory of a piece that Blocks has yielded. Calling it is optional.
func (*Snapshot) Reuse(piece []byte) {
	if cap(piece) == pieceBytes { // otherwise the piece had to grow
		pieces.Put((*[pieceBytes]byte)(piece[:pieceBytes]))
	}
}

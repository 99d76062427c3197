package index

import (
	"context"
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// groupBlocks yields the blocks of all attention groups of a rank but the main group, and reports whether to continue.
func (s *Snapshot) groupBlocks(ctx context.Context, number uint32, tiers kvblock.Tiers, yield func([]byte) bool) bool {
	for tier := range numGroupTiers {
		if !tiers.Has(kvblock.Tier(tier + 1)) {
			continue
		}
		e := &groupEncoder{worker: s.Worker.GetWorker(), head: encode.Head{Rank: number, Tier: kvcastv1.Tier(tier + 1)}, yield: yield}
		for from, more := uint64(0), true; more && ctx.Err() == nil; more = from != 0 {
			if from = s.scanGroups(number, tier, from, e); !e.send(snapshotRun) {
				return false
			}
		}
		if ctx.Err() != nil || !e.send(1) {
			return false
		}
	}
	return true
}

// scanGroups reads a part of the blocks of a rank in a tier.
func (s *Snapshot) scanGroups(number uint32, tier int, from uint64, e *groupEncoder) (next uint64) {
	x := s.index
	x.mu.RLock()
	defer x.mu.RUnlock()
	r := x.findRank(s.Worker.GetWorker(), number)
	if r == nil || r.attention == nil { // the worker was removed, or its engine restarted
		return 0
	}
	segment, next := r.attention.held[tier].SegmentAt(from)
	for i := range segment.Len() {
		b := segment.At(i)
		if b == nil || b.Cursor() < from {
			continue
		}
		for mask := b.Value; mask != 0; mask &= mask - 1 {
			group := bits.TrailingZeros64(mask)
			e.hashes[group] = append(e.hashes[group], b.Key())
		}
	}
	return next
}

// groupEncoder puts blocks of attention groups into events.
type groupEncoder struct {
	worker string
	head   encode.Head
	hashes [hybrid.MaxGroups][]uint64
	yield  func([]byte) bool
}

// send yields the blocks of groups of which there are at least some number, and reports whether to continue.
func (e *groupEncoder) send(least int) bool {
	var piece []byte
	for group, hashes := range e.hashes {
		if len(hashes) < least {
			continue
		}
		if piece == nil {
			piece = protowire.AppendTag(newPiece(), kvcastv1.SnapshotBlocksWorkerField, protowire.BytesType)
			piece = protowire.AppendString(piece, e.worker)
		}
		piece = encode.AppendGroup(piece, kvcastv1.SnapshotBlocksEventsField, e.head, kvcastv1.RouterEventGroupStoredField, uint32(group), hashes)
		e.hashes[group] = hashes[:0]
	}
	return piece == nil || e.yield(piece)
}

package pipeline

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// maxEvicted is the number of blocks that evicted has: those that device memory loses in some batches, in 16 KiB.
const maxEvicted = 2048

// evicted has the blocks of a rank that device memory has lost lately, and no other tier holds. A connector announces a copy some time after it was made.
type evicted struct {
	hashes [maxEvicted]uint64
	inputs [maxEvicted]bool // whether the block may have inputs beside its tokens and adapter
	n      int              // added so far
}

func (e *evicted) add(hash uint64, inputs bool) {
	e.hashes[e.n%maxEvicted], e.inputs[e.n%maxEvicted] = hash, inputs
	e.n++
}

// find returns whether a block may have had further inputs; ok is false if it is not known.
func (e *evicted) find(hash uint64) (inputs, ok bool) {
	if e == nil {
		return false, false
	}
	for i := e.n - 1; i >= max(0, e.n-maxEvicted); i-- {
		if e.hashes[i%maxEvicted] == hash {
			return e.inputs[i%maxEvicted], true
		}
	}
	return false, false
}

// lost records that device memory has lost a block, if copies may be announced.
func (r *rankState) lost(hash uint64, inputs bool) {
	if r.used&^(1<<kvblock.TierDevice) == 0 {
		return
	}
	for _, t := range r.tables {
		if t.has(hash) {
			return
		}
	}
	if r.evicted == nil {
		r.evicted = new(evicted)
	}
	r.evicted.add(hash, inputs)
}

// untold reports what a store of copies does not tell: the salts and images of blocks that no tier holds, and that device memory has not held lately. It returns
// whether a block had such inputs, so that its content is not that of its tokens.
func (l *Lane) untold(b *feed.Batch, e *wire.Event) (isUnknown bool) {
	if l.pending.key.kind == wire.KindRemoved {
		l.flush(flushUnmergeable) // which the store would do as well
	}
	lost := l.rank(b.Rank).evicted
	for _, hash := range e.BlockHashes {
		if l.names(b, hash) {
			continue
		}
		inputs, ok := lost.find(hash)
		isUnknown = isUnknown || inputs
		if !ok {
			l.doubt(b, feed.Doubt{
				Reason: feed.GapConnectorTier, Tiers: 1 << e.Tier, Detail: "a store tells neither salts nor images of blocks that device memory has not held lately",
			})
		}
	}
	return isUnknown
}

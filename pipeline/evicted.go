package pipeline

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// maxEvicted is the number of blocks that evicted has: those that device memory loses in some batches, in 18 KiB.
const maxEvicted = 2048

// evicted has the blocks of a rank that device memory has lost lately, and no other tier holds. A connector announces a copy some time after it was made.
type evicted struct {
	hashes [maxEvicted]uint64
	flags  [maxEvicted]uint8 // flagInputs and flagSalted of the block
	n      int               // added so far
}

func (e *evicted) add(hash uint64, flags blockFlags) {
	e.hashes[e.n%maxEvicted], e.flags[e.n%maxEvicted] = hash, uint8(flags&(flagInputs|flagSalted))
	e.n++
}

// find returns what a block may have had beside its tokens and adapter; ok is false if it is not known.
func (e *evicted) find(hash uint64) (flags blockFlags, ok bool) {
	if e == nil {
		return 0, false
	}
	for i := e.n - 1; i >= max(0, e.n-maxEvicted); i-- {
		if e.hashes[i%maxEvicted] == hash {
			return blockFlags(e.flags[i%maxEvicted]), true
		}
	}
	return 0, false
}

// hasCopies reports whether copies of blocks may be announced.
func (r *rankState) hasCopies() bool {
	return r.used&^(1<<kvblock.TierDevice) != 0 || r.evicted != nil
}

// lostAll records that device memory has lost its blocks, of which some are remembered.
func (r *rankState) lostAll() {
	t, n := r.tables[kvblock.TierDevice], 0
	if t == nil || !r.hasCopies() {
		return
	}
	r.tables[kvblock.TierDevice] = nil // so that it does not hold them
	for b := range t.blocks.table.All() {
		if r.lost(b.Key(), b.Value.flags); n == maxEvicted {
			break
		}
		n++
	}
	r.tables[kvblock.TierDevice] = t
}

// lost records that device memory has lost a block, whose flags are given.
func (r *rankState) lost(hash uint64, flags blockFlags) {
	for _, t := range r.tables {
		if t.has(hash) {
			return
		}
	}
	if r.evicted == nil {
		r.evicted = new(evicted)
	}
	r.evicted.add(hash, flags)
}

// untold reports what a store of copies does not tell: the salts and images of blocks that no tier holds, and that device memory has not held lately. It returns
// whether a block had such inputs, so that its content is not that of its tokens. A salt may be known from an earlier store.
func (l *Lane) untold(b *feed.Batch, e *wire.Event) (isUnknown bool) {
	if l.pending.key.kind == wire.KindRemoved {
		l.flush(flushUnmergeable) // which the store would do as well
	}
	lost := l.rank(b.Rank).evicted
	for _, hash := range e.BlockHashes {
		if l.names(b, hash) {
			continue
		}
		had, ok := lost.find(hash)
		isUnknown = isUnknown || had&flagInputs != 0 || had&flagSalted != 0 && e.CacheSalt == ""
		if !ok {
			l.doubt(b, feed.Doubt{
				Reason: feed.GapConnectorTier, Tiers: 1 << e.Tier, Detail: "a store tells neither salts nor images of blocks that device memory has not held lately",
			})
			return isUnknown // the tier is in doubt, whatever the other blocks are, and each takes up to maxEvicted steps
		}
	}
	return isUnknown
}

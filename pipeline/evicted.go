package pipeline

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// maxEvicted is the number of blocks that evicted has: those that device memory loses in some batches, in 18 KiB.
const maxEvicted = 2048

// evicted is a ring of the last blocks that were removed from device memory, without those that another tier holds. A connector announces a copy some time after
// it was made, so that the store of a copy can follow the remove of its block.
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

// recordCleared adds the blocks of device memory to evicted, as many as it can have, before the table is dropped.
func (r *rankState) recordCleared() {
	t, n := r.tables[kvblock.TierDevice], 0
	if t == nil || !r.hasCopies() {
		return
	}
	r.tables[kvblock.TierDevice] = nil // so that it does not hold them
	for b := range t.blocks.table.All() {
		if r.recordRemoved(b.Key(), b.Value.flags); n == maxEvicted {
			break
		}
		n++
	}
	r.tables[kvblock.TierDevice] = t
}

// recordRemoved adds a block that was removed from device memory to evicted, with its flags, unless another tier holds it.
func (r *rankState) recordRemoved(hash uint64, flags blockFlags) {
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

// doubtCopies examines a store of copies that does not contain the salts and images of its blocks. If a block is neither held nor in evicted, it is not known
// whether it has any: doubtCopies reports a doubt. It returns whether a block is known to have some that the store lacks: its tokens are then not its whole
// content.
func (l *Lane) doubtCopies(b *feed.Batch, e *wire.Event) (isUnknown bool) {
	if l.pending.key.kind == wire.KindRemoved {
		l.flush(flushUnmergeable) // which the store would do as well
	}
	removed := l.rank(b.Rank).evicted
	for _, hash := range e.BlockHashes {
		if l.names(b, hash) {
			continue
		}
		had, ok := removed.find(hash)
		isUnknown = isUnknown || had&flagInputs != 0 || had&flagSalted != 0 && e.CacheSalt == ""
		if !ok {
			l.doubt(b, feed.Doubt{
				Reason: feed.GapConnectorTier, Tiers: 1 << e.Tier, Detail: "a store has neither salts nor images, and device memory has not held its blocks lately",
			})
			return isUnknown // the tier is in doubt, whatever the other blocks are, and each takes up to maxEvicted steps
		}
	}
	return isUnknown
}

package radix

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// Remove removes blocks of a rank from a tier. It ignores blocks that the tier does not hold.
func (x *Index) Remove(r *Rank, tier int, hashes []uint64) {
	bit, released := r.bits[tier], stretch{} // the tree still has the stretch
	if len(hashes) > 1 {
		r.table.Prefetch(hashes)
	}
	for _, hash := range hashes {
		e := r.table.Find(hash)
		if e == nil || !e.Value.tag.has(bit) {
			continue
		}
		t := &e.Value.tag
		if at := t.place(); t.isPlaced() && !released.extend(at.stretch()) {
			x.tree.release(released, r.number, bit)
			released = at.stretch()
		}
		r.blocks[tier]--
		r.digests[tier] ^= kvblock.Digest(hash)
		if *t &^= tag(bit); t.has(r.live) {
			continue
		}
		if t.has(r.stale) && t.isPlaced() {
			x.tree.releaseRun(t.place().run, r.number, r.stale)
		}
		r.drop(e)
	}
	x.tree.release(released, r.number, bit)
}

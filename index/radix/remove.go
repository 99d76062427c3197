package radix

import (
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/hashtable"
)

// Remove removes blocks of a rank from a tier. It ignores blocks that the tier does not hold.
func (x *Index) Remove(r *Rank, tier int, hashes []uint64) {
	for _, hash := range hashes {
		seg, i, ok := r.table.Find(hash)
		if !ok || seg.Tags[i]&tierBit(tier) == 0 {
			continue
		}
		if seg.Tags[i].hasPlace() {
			x.tree.release(seg.Slots[i].Value.at, newHolder(r.number, tier))
		}
		r.forget(tier, seg, i)
	}
}

// ClearTier removes all blocks of a rank from a tier. It visits all blocks of the rank.
func (x *Index) ClearTier(r *Rank, tier int) {
	if r.blocks[tier] == 0 {
		return
	}
	h := newHolder(r.number, tier)
	for s := range r.table.Segments() {
		x.hashes = x.hashes[:0]
		for i := range s.Slots {
			if tag := s.Tags[i]; s.Slots[i].Used() && tag&tierBit(tier) != 0 {
				x.hashes = append(x.hashes, s.Slots[i].Key())
				if tag.hasPlace() {
					x.tree.releaseRun(s.Slots[i].Value.at, h)
				}
			}
		}
		for _, hash := range x.hashes {
			seg, i, _ := r.table.Find(hash)
			r.forget(tier, seg, i)
		}
	}
}

// forget removes a block from a tier in the table. The tree does not have it any more.
func (r *Rank) forget(tier int, seg *hashtable.Segment[slot, tag], i int) {
	tag := &seg.Tags[i]
	r.blocks[tier]--
	r.digests[tier] ^= wire.BlockDigest(seg.Slots[i].Key())
	if *tag &^= tierBit(tier); *tag&allTiers != 0 {
		return
	}
	if *tag&tagOrphan != 0 {
		r.orphans.remove(seg.Slots[i].Value.at.offset)
	}
	r.attrs.Release(tag.attr())
	r.table.Delete(seg, i)
}

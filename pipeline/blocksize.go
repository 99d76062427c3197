package pipeline

import (
	"maps"
	"slices"

	"github.com/kvcast/kvcast/ingest/wire"
)

// replaceBlockSize removes the blocks of all ranks that have another size: the engine's
// stores have shown that these are partial blocks, which are no prefix of a request.
// There are as many as came before its first whole block, as a rule few.
func (l *Lane) replaceBlockSize(size uint32) {
	l.flush(flushUnmergeable)
	for _, name := range slices.Sorted(maps.Keys(l.ranks)) {
		r := l.ranks[name]
		for tier, t := range &r.tables {
			if t == nil {
				continue
			}
			gone := t.takeOtherSizes(size)
			l.tableBlocks.Release(int64(len(gone)))
			for part := range slices.Chunk(gone, l.cfg.MaxBlocks) {
				l.emitRemoved(name, wire.Tier(tier), part)
			}
			if tr := l.tracker(name); tr != nil {
				tr.expel(gone)
			}
		}
	}
}

// takeOtherSizes takes out the blocks that are known to have another size, and returns
// them in order.
func (t *table) takeOtherSizes(size uint32) (gone []uint64) {
	other := func(a attr) bool { return a.blockSize != 0 && a.blockSize != size }
	if !slices.ContainsFunc(t.attrs.slots, func(s attrSlot) bool { return other(s.attr) }) {
		return nil
	}
	for s := range t.blocks.table.Segments() {
		for i := range s.Slots {
			if b := &s.Slots[i]; b.Used() && other(t.attrs.slots[b.Value.attr].attr) {
				gone = append(gone, b.Key())
			}
		}
	}
	slices.Sort(gone)
	for _, hash := range gone {
		t.remove(hash, takeAll)
	}
	return gone
}

// expel takes away the blocks that routers know by some hashes, which are in order,
// whoever holds them. Routers are told by others.
func (t *tracker) expel(firsts []uint64) {
	if len(firsts) == 0 {
		return
	}
	defer t.refund()
	for ref := t.oldest; ref != 0; {
		b := t.blocks.at(ref)
		next := b.newer
		if _, gone := slices.BinarySearch(firsts, b.first); gone {
			for b.names != 0 {
				t.erase(b.names)
			}
			for b.idle != 0 {
				t.erase(b.idle)
			}
			t.forget(ref)
		}
		ref = next
	}
}

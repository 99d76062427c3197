package radix

import (
	"iter"
	"math"
	"slices"
)

// holdings are the holdings of a run, ascending by rank, then from. Those of a rank do not overlap, and adjacent ones differ in their
// tiers. A change moves limits.chunk of them at most, however many ranks hold parts of the run: otherwise, engines that hold every other block
// of a run could make each change of it take as long as a thousand of others.
type holdings struct {
	few  []holding // all, unless there are many
	many *chunks
}

// chunks are holdings, in chunks in order. There is one at least, and none is empty.
type chunks struct{ all []chunk }

type chunk struct {
	holdings []holding
	to       uint32 // the greatest of the holdings
}

// cursor is where a holding is, or would be inserted.
type cursor struct{ chunk, item int }

func (h *holdings) empty() bool { return len(h.few) == 0 && h.many == nil }

// all returns the holdings in order.
func (h *holdings) all() iter.Seq[*holding] {
	return func(yield func(*holding) bool) {
		for at := (cursor{}); ; at = h.next(at) {
			if e := h.at(at); e == nil || !yield(e) {
				return
			}
		}
	}
}

// len returns the number of holdings.
func (h *holdings) len() (n int) {
	if h.many == nil {
		return len(h.few)
	}
	for i := range h.many.all {
		n += len(h.many.all[i].holdings)
	}
	return n
}

// inChunk returns the holdings of the chunk that has a cursor.
func (h *holdings) inChunk(i int) []holding {
	if h.many == nil {
		return h.few
	}
	return h.many.all[i].holdings
}

// find returns the cursor of the holding of a rank that has a block, or the one at which to insert it. It is not the first of a chunk unless it is the
// first of all.
func (h *holdings) find(rank, offset uint32) (at cursor, ok bool) {
	all := h.few
	if h.many != nil {
		at.chunk = h.many.find(rank, offset)
		all = h.many.all[at.chunk].holdings
	}
	low, high := 0, len(all)
	for low < high {
		middle := int(uint(low+high) / 2)
		if all[middle].isUpTo(rank, offset) {
			low = middle + 1
		} else {
			high = middle
		}
	}
	if at.item = low; low > 0 {
		if e := &all[low-1]; e.rank == rank && offset < uint32(e.to) {
			at.item--
			return at, true
		}
	}
	return at, false
}

// isUpTo reports whether a holding is that of a rank with a block, or before it.
func (e *holding) isUpTo(rank, offset uint32) bool {
	return e.rank < rank || e.rank == rank && uint32(e.from) <= offset
}

// find returns the last chunk whose first holding is that of a rank with a block, or before it; otherwise the first.
func (c *chunks) find(rank, offset uint32) int {
	low, high := 1, len(c.all)
	for low < high {
		middle := int(uint(low+high) / 2)
		if c.all[middle].holdings[0].isUpTo(rank, offset) {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low - 1
}

// at returns the holding at a cursor; nil at the end.
func (h *holdings) at(c cursor) *holding {
	if all := h.inChunk(c.chunk); c.item < len(all) {
		return &all[c.item]
	}
	if h.many == nil || c.chunk+1 == len(h.many.all) {
		return nil
	}
	return &h.many.all[c.chunk+1].holdings[0]
}

// next returns the cursor after that of a holding.
func (h *holdings) next(c cursor) cursor {
	if h.many != nil && c.item >= len(h.inChunk(c.chunk)) {
		c = cursor{c.chunk + 1, 0}
	}
	return cursor{c.chunk, c.item + 1}
}

// before returns the cursor of the holding before a cursor; ok is false at the first.
func (h *holdings) before(c cursor) (_ cursor, ok bool) {
	if c.item > 0 {
		return cursor{c.chunk, c.item - 1}, true
	}
	if c.chunk == 0 {
		return c, false
	}
	return cursor{c.chunk - 1, len(h.many.all[c.chunk-1].holdings) - 1}, true
}

// replace replaces the next n holdings from a cursor on. A chunk has most holdings at most.
func (h *holdings) replace(most int, at cursor, n int, with ...holding) {
	if h.many == nil {
		if h.few = slices.Replace(h.few, at.item, at.item+n, with...); len(h.few) > most {
			h.many = &chunks{all: []chunk{{holdings: h.few}}}
			h.few = nil
			h.many.balance(most, 0, 1)
		}
		return
	}
	all, end := h.many.all, at.chunk+1
	first := &all[at.chunk]
	here := min(n, len(first.holdings)-at.item)
	first.holdings = slices.Replace(first.holdings, at.item, at.item+here, with...)
	for n -= here; n > 0; end++ {
		here = min(n, len(all[end].holdings))
		all[end].holdings = slices.Delete(all[end].holdings, 0, here)
		n -= here
	}
	if size := len(first.holdings); end == at.chunk+1 && size <= most && size > most/4 {
		for i := range with {
			first.to = max(first.to, uint32(with[i].to))
		}
		first.changed()
		return
	}
	h.many.balance(most, at.chunk, end)
	if len(h.many.all) == 1 && len(h.many.all[0].holdings) <= most/2 {
		h.few, h.many = h.many.all[0].holdings, nil
	}
}

// balance restores what chunks have in common, after those from one up to another one, exclusive, have changed: it divides those with too many holdings,
// and joins those with few with the next or the one before.
func (c *chunks) balance(most, from, to int) {
	var out []chunk
	from, to = max(from-1, 0), min(to+1, len(c.all))
	for _, one := range c.all[from:to] {
		if last := len(out) - 1; last >= 0 && len(out[last].holdings)+len(one.holdings) <= most/2 {
			out[last].holdings = append(out[last].holdings, one.holdings...)
			continue
		}
		for rest := one.holdings; len(rest) > 0; {
			if len(rest) <= most {
				out = append(out, chunk{holdings: rest})
				break
			}
			n := min(most, len(rest)/2)
			out = append(out, chunk{holdings: slices.Clone(rest[:n])})
			rest = slices.Clone(rest[n:])
		}
	}
	if len(out) == 0 {
		out = append(out, chunk{})
	}
	for i := range out {
		out[i].to = math.MaxUint32
		out[i].changed()
	}
	c.all = slices.Replace(c.all, from, to, out...)
}

// changed updates the end of a chunk, which is an upper bound before. It usually finds soon a holding with that end.
func (c *chunk) changed() {
	was, to := c.to, uint32(0)
	for i := 0; i < len(c.holdings) && to != was; i++ {
		to = max(to, uint32(c.holdings[i].to))
	}
	c.to = to
}

// set changes a holding whose place in the order stays.
func (h *holdings) set(at cursor, e holding) {
	if h.many == nil {
		h.few[at.item] = e
		return
	}
	h.many.all[at.chunk].holdings[at.item] = e
	h.many.all[at.chunk].to = max(h.many.all[at.chunk].to, uint32(e.to))
	h.many.all[at.chunk].changed()
}

// upTo returns the end of the last block that any holding has, or any value from a limit on.
func (h *holdings) upTo(limit uint32) (n uint32) {
	for i := 0; i < len(h.few) && n < limit; i++ {
		n = max(n, uint32(h.few[i].to))
	}
	if h.many != nil {
		for i := 0; i < len(h.many.all) && n < limit; i++ {
			n = max(n, h.many.all[i].to)
		}
	}
	return n
}

package sequence

import (
	"bytes"
	"unsafe"
)

// Limits of one publisher's reorder buffer. Config.Budget bounds those of all
// publishers together.
const (
	// maxBufferedBatches is as many batches as an engine replays by default.
	maxBufferedBatches = 10_000
	maxBufferedBytes   = 16 << 20
)

// batchOverhead is what a buffered batch takes beside its bytes: its place in a slice
// that doubles as it grows, and what the allocator rounds up for each of its parts.
const batchOverhead = 2*int(unsafe.Sizeof(Batch{})) + 3*16

// size is the memory of a buffered batch, in bytes.
func (b *Batch) size() int {
	return len(b.Epoch) + len(b.Publisher) + len(b.Payload) + batchOverhead
}

// Budget bounds the reorder buffers of all machines together, in bytes. Its methods
// neither block nor call the machine.
type Budget interface {
	// Take reserves n bytes. It reports false, and reserves nothing, where they do not fit.
	Take(n int64) bool
	Release(n int64)
}

// reorderBuffer keeps live batches while a replay is in progress, in the order in which
// they arrived. When it is full, a batch is refused, and the caller requests it from the
// replay socket later.
type reorderBuffer struct {
	batches []Batch
	bytes   int
	// requested is how many batches, from the first on, arrived before the last request.
	requested int
	budget    Budget // nil means unlimited
}

// add buffers a copy of a batch. It reports false where there is no room.
func (r *reorderBuffer) add(b *Batch) bool {
	n := b.size()
	if len(r.batches) >= maxBufferedBatches || r.bytes+n > maxBufferedBytes || r.budget != nil && !r.budget.Take(int64(n)) {
		return false
	}
	r.bytes += n
	c := *b
	c.Epoch, c.Publisher, c.Payload = bytes.Clone(b.Epoch), bytes.Clone(b.Publisher), bytes.Clone(b.Payload)
	r.batches = append(r.batches, c)
	return true
}

// markRequested records that a request is sent now.
func (r *reorderBuffer) markRequested() { r.requested = len(r.batches) }

// head returns the batch that arrived first; nil where the buffer is empty.
func (r *reorderBuffer) head() *Batch {
	if len(r.batches) == 0 {
		return nil
	}
	return &r.batches[0]
}

// pop removes the head. The batch stays valid until it is dropped by its holder.
func (r *reorderBuffer) pop() *Batch {
	b := r.batches[0]
	r.release(&b)
	r.batches[0] = Batch{}
	r.batches = r.batches[1:]
	r.requested = max(0, r.requested-1)
	if len(r.batches) == 0 {
		r.batches = nil
	}
	return &b
}

func (r *reorderBuffer) release(b *Batch) {
	r.bytes -= b.size()
	if r.budget != nil {
		r.budget.Release(int64(b.size()))
	}
}

// dropBefore removes the batches at the head that arrived by an earlier connection.
func (r *reorderBuffer) dropBefore(connection uint32) {
	for b := r.head(); b != nil && b.connection != connection; b = r.head() {
		r.pop()
	}
}

// keepOnly removes the batches of other incarnations.
func (r *reorderBuffer) keepOnly(i *incarnation) {
	all := r.batches
	r.batches, r.requested = nil, 0
	for k := range all {
		if i.contradicts(&all[k]) {
			r.release(&all[k])
		} else {
			r.batches = append(r.batches, all[k])
		}
	}
}

// clear removes all batches.
func (r *reorderBuffer) clear() {
	for r.head() != nil {
		r.pop()
	}
}

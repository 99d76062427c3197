package sequence

import (
	"bytes"
	"unsafe"
)

// Limits of one publisher's reorder buffer. Config.Budget limits the buffers of all publishers together.
const (
	// maxBufferedBatches is the number of batches that an engine replays by default.
	maxBufferedBatches = 10_000
	maxBufferedBytes   = 16 << 20
)

// batchOverhead is the memory of a buffered batch beside its bytes: an element of a slice that
// doubles as it grows, and the allocator's rounding for each byte slice.
const batchOverhead = 2*int(unsafe.Sizeof(Batch{})) + 3*16

// size is the memory of a buffered batch, in bytes.
func (b *Batch) size() int {
	return len(b.Epoch) + len(b.Publisher) + len(b.Payload) + batchOverhead
}

// Budget limits the bytes in the reorder buffers of all machines together. Its methods neither block nor call the machine.
type Budget interface {
	// Reserve reserves n bytes. It returns false and reserves nothing if they do not fit.
	Reserve(n int64) bool
	Release(n int64)
}

// reorderBuffer keeps live batches while a replay is in progress, in the order of their arrival. A
// batch that does not fit is refused; the machine requests it from the replay socket later.
type reorderBuffer struct {
	batches []Batch
	bytes   int
	// requested is how many batches, from the first on, arrived before the last request.
	requested int
	budget    Budget // nil means unlimited
}

// add buffers a copy of a batch. It returns false if the batch does not fit.
func (r *reorderBuffer) add(b *Batch) bool {
	n := b.size()
	if len(r.batches) >= maxBufferedBatches || r.bytes+n > maxBufferedBytes || r.budget != nil && !r.budget.Reserve(int64(n)) {
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

// head returns the batch that arrived first; nil if the buffer is empty.
func (r *reorderBuffer) head() *Batch {
	if len(r.batches) == 0 {
		return nil
	}
	return &r.batches[0]
}

// pop removes the head and returns it.
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

// removeIf removes the batches for which remove returns true.
func (r *reorderBuffer) removeIf(remove func(*Batch) bool) {
	all := r.batches
	r.batches, r.requested = nil, 0
	for i := range all {
		if remove(&all[i]) {
			r.release(&all[i])
		} else {
			r.batches = append(r.batches, all[i])
		}
	}
}

// clear removes all batches.
func (r *reorderBuffer) clear() { r.removeIf(func(*Batch) bool { return true }) }

package sequence

import "sort"

// historySize is how many batches are remembered, to tell a duplicate from a batch of a
// restarted engine.
const historySize = 1024

// Fingerprint distinguishes batches of equal seq.
type Fingerprint struct {
	Time uint64 // the bits of the batch's timestamp; 0 where it has none
	Hash uint64 // XXH3-64 of the payload
}

// pastBatch has 24 bytes, so that a full history has 24 KiB.
type pastBatch struct {
	seq uint64
	Fingerprint
}

// history is the last batches of an incarnation, in the order of their seqs. The ring
// grows as it fills, since most publishers may be idle.
type history struct {
	ring []pastBatch
	next int // index of the oldest batch once the ring is full
}

// add records a batch, in the place of the oldest. Its seq is above all others'.
func (h *history) add(seq uint64, fp Fingerprint) {
	if len(h.ring) < historySize {
		h.ring = append(h.ring, pastBatch{seq, fp})
		return
	}
	h.ring[h.next] = pastBatch{seq, fp}
	h.next = (h.next + 1) % historySize
}

// contains reports whether a batch is in the history, with this fingerprint.
func (h *history) contains(seq uint64, fp Fingerprint) bool {
	b, ok := h.find(seq)
	return ok && b == pastBatch{seq, fp}
}

// containsSeq reports whether the history has a batch of this seq.
func (h *history) containsSeq(seq uint64) bool {
	b, ok := h.find(seq)
	return ok && b.seq == seq
}

// contradicts reports whether the history has another batch of this seq.
func (h *history) contradicts(seq uint64, fp Fingerprint) bool {
	return h.containsSeq(seq) && !h.contains(seq, fp)
}

// startsAfter reports whether seq is below all that the history has.
func (h *history) startsAfter(seq uint64) bool {
	return len(h.ring) > 0 && seq < h.ring[h.next].seq
}

// find returns the batch of this seq, or of the next one above it.
func (h *history) find(seq uint64) (pastBatch, bool) {
	n := len(h.ring)
	i := sort.Search(n, func(i int) bool { return h.ring[(h.next+i)%n].seq >= seq })
	if i == n {
		return pastBatch{}, false
	}
	return h.ring[(h.next+i)%n], true
}

// reset empties the history and keeps its memory.
func (h *history) reset() {
	h.ring, h.next = h.ring[:0], 0
}

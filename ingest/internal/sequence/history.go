package sequence

import "sort"

// historySize is how many batches are remembered to distinguish a duplicate from a batch of a restarted engine.
const historySize = 1024

// Fingerprint distinguishes batches with the same seq.
type Fingerprint struct {
	Time uint64 // the bits of the batch's timestamp; 0 if it has none
	Hash uint64 // XXH3-64 of the payload
}

// pastBatch has 24 bytes: a full history has 24 KiB.
type pastBatch struct {
	seq uint64
	Fingerprint
}

// history is a ring of the last historySize batches of an incarnation, in ascending order of
// seq. It is allocated as it fills, because most publishers may be idle.
type history struct {
	ring []pastBatch
	next int // index of the oldest batch once the ring is full
}

// add records a batch, in place of the oldest. Its seq is above all others.
func (h *history) add(seq uint64, fp Fingerprint) {
	if len(h.ring) < historySize {
		h.ring = append(h.ring, pastBatch{seq, fp})
		return
	}
	h.ring[h.next] = pastBatch{seq, fp}
	h.next = (h.next + 1) % historySize
}

// find returns the fingerprint of the batch with this seq.
func (h *history) find(seq uint64) (fp Fingerprint, ok bool) {
	n := len(h.ring)
	i := sort.Search(n, func(i int) bool { return h.ring[(h.next+i)%n].seq >= seq })
	if i == n {
		return Fingerprint{}, false
	}
	b := h.ring[(h.next+i)%n]
	return b.Fingerprint, b.seq == seq
}

// startsAfter reports whether all batches in the history have seqs above seq.
func (h *history) startsAfter(seq uint64) bool {
	return len(h.ring) > 0 && seq < h.ring[h.next].seq
}

// reset empties the history and keeps its memory.
func (h *history) reset() {
	h.ring, h.next = h.ring[:0], 0
}

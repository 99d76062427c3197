package vllm

// History has the last batches of the streams of an endpoint, in the order of their publication. Consumers read it at their own
// pace: one that is slower than the history's limits misses batches, and holds up nobody.
type History struct {
	batches    []Batch
	head       int    // index of the oldest batch
	first      uint64 // position of the oldest batch
	bytes      int    // of payloads
	maxBatches int
	maxBytes   int
}

// NewHistory returns a history with at most some batches and bytes, but at least the last batch.
func NewHistory(maxBatches, maxBytes int) *History {
	return &History{maxBatches: maxBatches, maxBytes: maxBytes}
}

// batchBytes is the approximate memory of a batch without its payload.
const batchBytes = 64

// Append adds a batch, and evicts the oldest ones beyond the limits. Its stream keeps its last batch for consumers that miss it.
func (h *History) Append(b Batch) {
	if b.Last {
		b.Stream.final = b
	}
	h.batches = append(h.batches, b)
	h.bytes += batchBytes + len(b.Payload)
	for n := h.len(); n > 1 && (n > h.maxBatches || h.bytes > h.maxBytes); n-- {
		h.bytes -= batchBytes + len(h.batches[h.head].Payload)
		h.batches[h.head] = Batch{}
		h.head++
		h.first++
	}
	if h.head > len(h.batches)/2 {
		n := copy(h.batches, h.batches[h.head:])
		clear(h.batches[n:])
		h.batches, h.head = h.batches[:n], 0
	}
}

func (h *History) len() int { return len(h.batches) - h.head }

// End returns the position after the last batch.
func (h *History) End() uint64 { return h.first + uint64(h.len()) }

// Read appends batches from a position on, and returns the next position. It returns false if the batch at the position was
// evicted.
func (h *History) Read(from uint64, most int, to []Batch) (_ []Batch, next uint64, ok bool) {
	if from < h.first {
		return to, from, false
	}
	at := h.head + int(from-h.first)
	end := min(len(h.batches), at+most)
	return append(to, h.batches[at:end]...), from + uint64(end-at), true
}

// Find returns the position of a stream's batch with a seq, or of the first one after it; false if the history does not
// have the batch because it was evicted or is another stream's, or if a state has had the seq: whoever requests it may have the
// first batches of that state only, which the stream's batches do not complete. The history must be of one stream at a time.
func (h *History) Find(s *Stream, seq uint64) (position uint64, ok bool) {
	if h.len() == 0 || seq < s.stateEnd {
		return 0, false
	}
	oldest := h.batches[h.head]
	if oldest.Stream != s || seq < oldest.Seq && oldest.Seq != s.first {
		return 0, false
	}
	if seq <= oldest.Seq {
		return h.first, true
	}
	return min(h.first+(seq-oldest.Seq), h.End()), true
}

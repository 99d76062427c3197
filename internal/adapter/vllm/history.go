package vllm

// Log has the last batches of the streams of an endpoint, in the order of their publication. Consumers read it at their own
// pace: one that is slower than the log's limits misses batches, and holds up nobody.
type Log struct {
	batches    []Batch
	head       int    // index of the oldest batch
	first      uint64 // position of the oldest batch
	bytes      int    // of payloads
	maxBatches int
	maxBytes   int
}

// NewLog returns a log with at most some batches and bytes, but at least the last batch.
func NewLog(maxBatches, maxBytes int) *Log { return &Log{maxBatches: maxBatches, maxBytes: maxBytes} }

// batchBytes is the approximate memory of a batch without its payload.
const batchBytes = 64

// Append adds a batch, and evicts the oldest ones beyond the limits. Its stream keeps its last batch for consumers that miss it.
func (l *Log) Append(b Batch) {
	if b.Last {
		b.Stream.final = b
	}
	l.batches = append(l.batches, b)
	l.bytes += batchBytes + len(b.Payload)
	for n := l.len(); n > 1 && (n > l.maxBatches || l.bytes > l.maxBytes); n-- {
		l.bytes -= batchBytes + len(l.batches[l.head].Payload)
		l.batches[l.head] = Batch{}
		l.head++
		l.first++
	}
	if l.head > len(l.batches)/2 {
		n := copy(l.batches, l.batches[l.head:])
		clear(l.batches[n:])
		l.batches, l.head = l.batches[:n], 0
	}
}

func (l *Log) len() int { return len(l.batches) - l.head }

// End returns the position after the last batch.
func (l *Log) End() uint64 { return l.first + uint64(l.len()) }

// Read appends batches from a position on, and returns the next position. It returns false if the batch at the position was
// evicted.
func (l *Log) Read(from uint64, most int, to []Batch) (_ []Batch, next uint64, ok bool) {
	if from < l.first {
		return to, from, false
	}
	at := l.head + int(from-l.first)
	end := min(len(l.batches), at+most)
	return append(to, l.batches[at:end]...), from + uint64(end-at), true
}

// Find returns the position of a stream's batch with a seq, or of the first one after it; false if the log does not
// have the batch because it was evicted or is another stream's, or if a state has had the seq: whoever requests it may have the
// first batches of that state only, which the stream's batches do not complete. The log must be of one stream at a time.
func (l *Log) Find(s *Stream, seq uint64) (position uint64, ok bool) {
	if l.len() == 0 || seq < s.stateEnd {
		return 0, false
	}
	oldest := l.batches[l.head]
	if oldest.Stream != s || seq < oldest.Seq && oldest.Seq != s.first {
		return 0, false
	}
	if seq <= oldest.Seq {
		return l.first, true
	}
	return min(l.first+(seq-oldest.Seq), l.End()), true
}

package sequence

// verdict is the relation of a batch to the batches before it.
type verdict uint8

const (
	// verdictFirst: the first batch of an incarnation, whatever its seq.
	verdictFirst verdict = iota + 1
	// verdictNext: the batch with the next seq.
	verdictNext
	// verdictGap: a later batch; the seqs between are missing.
	verdictGap
	// verdictDuplicate: the batch was read before.
	verdictDuplicate
	// verdictRestart: a batch of another incarnation.
	verdictRestart
)

// seqRange is a range of seqs, both ends included; empty if count is 0. The range of all 2^64 seqs has the count 2^64-1.
type seqRange struct {
	first, last uint64
	count       uint64
}

// through returns the range extended by seq, the seq after its last.
func (r seqRange) through(seq uint64) seqRange {
	if r.count == 0 {
		r.first = seq
	}
	return seqRange{first: r.first, last: seq, count: max(r.count, r.count+1)}
}

// rangeBetween returns the range from first to end, without end. It is empty unless first is below end.
func rangeBetween(first, end uint64) seqRange {
	if end <= first {
		return seqRange{}
	}
	return seqRange{first: first, last: end - 1, count: end - first}
}

// progress is how much of an incarnation is known.
type progress uint8

const (
	// progressUnknown: nothing is known; the next batch is the first, whatever its seq.
	progressUnknown progress = iota
	// progressEmpty: the engine has not published yet; its first seq is next.
	progressEmpty
	// progressReading: the seq of the last batch is known.
	progressReading
)

// order classifies the batches of one incarnation by their seqs.
//
//  1. The first batch may have any seq.
//  2. The seq after the last is next. A larger seq leaves a gap.
//  3. A batch whose seq is not above the last is a duplicate if the history has it with the same
//     fingerprint. Otherwise the engine restarted.
//
// Every batch that is not a duplicate advances the last seq, even a malformed batch.
type order struct {
	first    uint64 // seq of an incarnation's first batch
	progress progress
	last     uint64 // valid if progress is progressReading
	history  history
}

func (o *order) reading() bool { return o.progress == progressReading }

// next returns the seq of the next batch. ok is false if it is unknown, or the last seq was the largest.
func (o *order) next() (seq uint64, ok bool) {
	switch o.progress {
	case progressEmpty:
		return o.first, true
	case progressReading:
		return o.last + 1, o.last+1 != 0
	default:
		return 0, false
	}
}

// classify returns a batch's verdict, and the seqs missing before it: for verdictGap the seqs after the last, for verdictFirst and
// verdictRestart the seqs from the incarnation's first. otherIncarnation reports whether the batch itself identifies another incarnation.
func (o *order) classify(seq uint64, fp Fingerprint, otherIncarnation bool) (verdict, seqRange) {
	switch {
	case o.progress == progressUnknown:
		return verdictFirst, rangeBetween(o.first, seq)
	case o.progress == progressEmpty && seq <= o.first:
		return verdictNext, seqRange{}
	case o.progress == progressEmpty:
		return verdictGap, rangeBetween(o.first, seq)
	case otherIncarnation:
		return verdictRestart, rangeBetween(o.first, seq)
	case seq > o.last && seq-o.last == 1:
		return verdictNext, seqRange{}
	case seq > o.last:
		return verdictGap, rangeBetween(o.last+1, seq)
	}
	if known, ok := o.history.find(seq); ok && known == fp {
		return verdictDuplicate, seqRange{}
	}
	return verdictRestart, rangeBetween(o.first, seq)
}

// advance makes a batch the last one. Its seq is above the last.
func (o *order) advance(seq uint64, fp Fingerprint) {
	o.skipTo(seq)
	o.history.add(seq, fp)
}

// skipTo makes seq the last one, without a batch: the batch is lost.
func (o *order) skipTo(seq uint64) {
	o.progress, o.last = progressReading, seq
}

// reset makes the next batch the first of another incarnation.
func (o *order) reset() {
	o.progress = progressUnknown
	o.history.reset()
}

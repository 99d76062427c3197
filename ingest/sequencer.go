package ingest

// verdict is what a batch is to those before it.
type verdict uint8

const (
	// verdictFirst is the first batch ever: the beginning, whatever its seq.
	verdictFirst verdict = iota + 1
	// verdictNext is the one that is due.
	verdictNext
	// verdictGap comes later than that: the batches between are missing.
	verdictGap
	// verdictDuplicate has come before.
	verdictDuplicate
	// verdictRestart is one of an engine that began anew.
	verdictRestart
)

// seqRange is a run of seqs, both ends included; none where count is 0. That of
// all seqs there are would count one more than a count can say, and says one less.
type seqRange struct {
	first, last uint64
	count       uint64
}

// through returns the range lengthened by seq, which comes right after it.
func (r seqRange) through(seq uint64) seqRange {
	if r.count == 0 {
		r.first = seq
	}
	return seqRange{first: r.first, last: seq, count: max(r.count, r.count+1)}
}

// rangeBetween returns the range from first up to and without end; none if they
// are equal or the wrong way round.
func rangeBetween(first, end uint64) seqRange {
	if end <= first {
		return seqRange{}
	}
	return seqRange{first: first, last: end - 1, count: end - first}
}

// sequencer follows the seqs of one publisher's life. It decides and touches
// nothing else.
//
//  1. The first batch is the beginning, whatever its seq.
//  2. The seq after the last goes on; a larger one leaves a gap.
//  3. A seq not above the last is a batch of before if one of the last
//     rememberedBatches had that seq and fingerprint. Otherwise the engine began
//     anew, and counts from its first seq again.
//
// Every batch that is no duplicate uses up its seq, those that do not decode
// included.
type sequencer struct {
	// start is the seq of the first batch in an engine's life.
	start uint64

	// begun tells that it is known where the life begins; empty, that there was
	// nothing before start, and nothing has come since.
	begun, empty bool
	last         uint64
	past         fingerprints
}

// due is the seq that is to come next. Where nothing is known, or no seq is left,
// there is none.
func (s *sequencer) due() (uint64, bool) {
	switch {
	case !s.begun:
		return 0, false
	case s.empty:
		return s.start, true
	default:
		return s.last + 1, s.last+1 != 0
	}
}

// judge tells what a batch is. newLife tells that the engine is known to have
// begun anew, whatever the seq says. The range is what is missing before the
// batch: for verdictGap the seqs between, for verdictFirst and verdictRestart
// those of the engine's life so far.
func (s *sequencer) judge(seq uint64, fp fingerprint, newLife bool) (verdict, seqRange) {
	switch {
	case !s.begun:
		return verdictFirst, rangeBetween(s.start, seq)
	case s.empty && seq <= s.start:
		return verdictNext, seqRange{}
	case s.empty:
		return verdictGap, rangeBetween(s.start, seq)
	case newLife:
		return verdictRestart, rangeBetween(s.start, seq)
	case seq > s.last && seq-s.last == 1:
		return verdictNext, seqRange{}
	case seq > s.last:
		return verdictGap, rangeBetween(s.last+1, seq)
	case s.past.has(seq, fp):
		return verdictDuplicate, seqRange{}
	default:
		return verdictRestart, rangeBetween(s.start, seq)
	}
}

// take makes a batch the last one. Its seq is above that before.
func (s *sequencer) take(seq uint64, fp fingerprint) {
	s.begun, s.empty = true, false
	s.last = seq
	s.past.add(seq, fp)
}

// lose makes a seq the last one, of a batch that is lost.
func (s *sequencer) lose(seq uint64) {
	s.begun, s.empty = true, false
	s.last = seq
}

// open makes start the seq that is due: the engine has published nothing yet.
func (s *sequencer) open() { s.begun, s.empty = true, true }

// forget makes the next batch the first of another life.
func (s *sequencer) forget() {
	s.begun, s.empty = false, false
	s.past.forget()
}

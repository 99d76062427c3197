package ingest

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// ambiguityEnds is how long one of two publishers must be silent for the other to
// be alone again.
const ambiguityEnds = time.Minute

// rivals notices that two publishers use one topic and rank: seqs jump, and then
// go on where they left off before the jump. The batches of the two can not be put
// in order, and neither is a restart of the other.
type rivals struct {
	// last is the last seq before seqs jumped, and former the incarnation that it was
	// of; known tells that they did.
	last   uint64
	former identity
	known  bool
	// mixing tells that two runs are being read. Each has its last seq, when it last
	// went on, and the connection that it comes by, where the two come by two.
	mixing bool
	runs   [2]run
}

type run struct {
	last uint64
	at   time.Time
	peer *peer
}

// succeed takes note that seqs jump from this one.
func (r *rivals) succeed(last uint64, of identity) { r.last, r.former, r.known = last, of, true }

// resumes tells whether a seq goes on where they jumped.
func (r *rivals) resumes(seq uint64) bool { return r.known && seq > r.last && seq-r.last == 1 }

// formerly tells whether a batch names the incarnation before the jump.
func (r *rivals) formerly(a *arrival) bool { return r.known && r.former.matches(a) }

// begin notes that the run before went on with seq, beside the one whose last
// seq is given. They come by these connections, the second nil where they come by
// one.
func (r *rivals) begin(now time.Time, seq, last uint64, by, other *peer) {
	if other == nil {
		by = nil
	}
	*r = rivals{mixing: true, runs: [2]run{{last, now, other}, {seq, now, by}}}
}

// next notes a batch of either run.
func (r *rivals) next(now time.Time, seq uint64, by *peer) {
	i, ok := r.by(by)
	if !ok {
		i = r.nearest(seq)
	}
	r.runs[i].last, r.runs[i].at = seq, now
}

// by returns the run that comes by a connection, if that tells.
func (r *rivals) by(c *peer) (i int, ok bool) {
	for i := range r.runs {
		if c != nil && r.runs[i].peer == c {
			return i, true
		}
	}
	return 0, false
}

// nearest returns the run that a seq is nearest above, else the one that was
// silent longer.
func (r *rivals) nearest(seq uint64) (i int) {
	switch above0, above1 := seq-r.runs[0].last, seq-r.runs[1].last; {
	case above1 < above0:
		i = 1
	case above1 == above0 && r.runs[1].at.Before(r.runs[0].at):
		i = 1
	}
	return i
}

// alone tells whether one of the two has been silent for so long that the other
// is alone, and what its last seq is.
func (r *rivals) alone(now time.Time) (last uint64, ok bool) {
	for i, other := range []int{1, 0} {
		if r.mixing && now.Sub(r.runs[i].at) > ambiguityEnds {
			return r.runs[other].last, true
		}
	}
	return 0, false
}

// left returns the last seq of the run that is left with a connection, or else of
// the one that went on last.
func (r *rivals) left(c *peer) uint64 {
	if i, ok := r.by(c); ok {
		return r.runs[i].last
	}
	if r.runs[1].at.After(r.runs[0].at) {
		return r.runs[1].last
	}
	return r.runs[0].last
}

// ambiguous tells that two publishers use this one's topic and rank.
func (p *publisher) ambiguous(in *intake, now time.Time, seq uint64) {
	p.worker.metrics.ambiguous.Inc()
	p.worker.warn(noticeAmbiguous, now, "two publishers use one topic and rank: their batches can not be told apart",
		"source", p.source, "rank", p.rank)
	p.rivals.begin(now, seq, p.seq.last, p.peer, p.rival)
	p.lose(now, seqRange{}, feed.GapAmbiguousPublisher)
	p.endRepair()
	p.owes, p.owed = false, 0
	for f := p.held.first(); f != nil; f = p.held.first() {
		a := f.arrival(in)
		p.mixed(in, f.at, &a)
		p.held.drop()
	}
	p.show()
}

// mixed takes a batch of either of two publishers.
func (p *publisher) mixed(in *intake, now time.Time, a *arrival) {
	p.rivals.next(now, a.seq, p.peer)
	if a.err != nil {
		p.reject(now, a)
		return
	}
	rank := p.rankOf(now, a)
	if !p.know(now, rank) {
		p.worker.refuse(refusedRanks, now)
		return
	}
	p.note(a.seq)
	p.batch(in, now, rank, a)
}

// parted goes on with the one publisher that is left. What the other one held is
// not told apart from it without a replay.
func (p *publisher) parted(now time.Time, last uint64) {
	p.rivals = rivals{}
	if p.replay != "" {
		p.restarted(now)
		p.rivals = rivals{}
		p.fetch(now, causeReconnect)
		return
	}
	p.seq.forget()
	p.seq.lose(last)
}

package ingest

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/wire"
)

// publisher is what gives batches one run of seqs: a source's engine of one dp
// rank. Batches flow in as they come; into the worker's lane they go in the
// engine's order, each once, and with them what the engine's life and losses
// mean. What may be missing is fetched from the engine's replay socket, where
// there is one; see repair.
//
// A rule that holds throughout: for every seq of an engine's life up to the
// last one read, the lane gets the batch or a Gap that covers it, which for those
// before first contact is GapJoinedLate. Only batches of a rank beyond what the
// worker may have are dropped without, as there is no one to tell.
//
// All its methods are called with the worker's mutex held.
type publisher struct {
	worker *worker
	source int
	// rank is that of batches that name none.
	rank uint32
	// rankTold tells that batches may name another, or that it was logged that they
	// do.
	rankTold bool
	// ranks are those of its batches. There is one, as a rule; where there are
	// more, a loss may concern any.
	ranks []uint32
	state SourceState
	seq   sequencer
	// lossy tells that batches of this life of the engine are missing, which are
	// as likely to be of a rank that is yet to be heard of.
	lossy bool
	// unheard are the seqs from before first contact; none where it was the beginning.
	unheard seqRange
	// reborn tells that the life that begins next is not the first.
	reborn bool
	// rules are the source's, shared by the publishers of its ranks.
	rules *wire.Rules
	// epoch names the engine's life, empty where the engine does not say;
	// epochKnown tells that it was heard.
	epoch      string
	epochKnown bool

	// connected tells that there is a connection; connection counts them.
	connected  bool
	connection uint32
	// heard is when the last message came, or the connection.
	heard time.Time
	// peer is a listener's connection that it was last read by, and rival another
	// one that it was read by before and that is still open; nil where unknown.
	peer, rival *peer
	// suspected tells that it was silent, and did not answer when it was asked.
	suspected bool
	// renew lets its connection be made anew; nil where that is the engine's part.
	renew func()

	// doubted tells that it was told that the engine may have begun anew, since the
	// last batch.
	doubted bool

	// replay is the endpoint of its replay socket; empty where there is none.
	replay string
	// repair is what is being fetched; nil where nothing is. Live batches are held
	// back meanwhile.
	repair *repair
	held   holding
	// owes tells that batches up to the seq owed were published that were neither
	// read nor held.
	owes bool
	owed uint64
	// helpful tells that the replay socket has ever answered. After a repair without
	// an answer nothing is asked until resting is over.
	helpful bool
	resting time.Time
	rivals  rivals

	posted  *posted
	metrics *metrics
	lastSeq prometheus.Gauge // nil until live
}

// newPublisher makes the publisher of a source at a dp rank, which posts how it
// is doing.
func newPublisher(w *worker, source int, about SourceStatus) *publisher {
	about.Worker = w.desc.Name
	p := &publisher{
		worker:  w,
		source:  source,
		rank:    about.Rank,
		replay:  about.Replay,
		posted:  w.shared.board.post(about),
		seq:     sequencer{start: about.Engine.firstSeq()},
		rules:   w.rulesOf(source),
		metrics: w.shared.metrics,
		held:    holding{budget: &w.shared.budget},
	}
	p.show()
	w.publishers = append(w.publishers, p)
	return p
}

// show finds out which state it is in.
func (p *publisher) show() {
	s := SourceLive
	switch {
	case p.state == SourceStopped:
		return
	case p.suspected:
		s = SourceSuspect
	case !p.connected:
		s = SourceConnecting
	case p.repair == nil || p.repair.cause == causeProbe:
	case p.repair.fresh, p.repair.cause == causeStart:
		s = SourceCatchingUp
	default:
		s = SourceRepairing
	}
	p.become(s)
}

func (p *publisher) become(s SourceState) {
	if p.state == s {
		return
	}
	p.metrics.move(p.state, s)
	p.state = s
	p.posted.state.Store(uint32(s))
}

// repairable tells whether there is a replay socket to ask.
func (p *publisher) repairable(now time.Time) bool {
	return p.replay != "" && (p.repair != nil || !now.Before(p.resting))
}

// stop ends the reading of the publisher.
func (p *publisher) stop() {
	p.repair = nil
	p.held.clear()
	p.become(SourceStopped)
}

// forget forgets that there was such a publisher. It was stopped.
func (p *publisher) forget() {
	p.metrics.move(p.state, 0)
	p.worker.shared.board.remove(p.posted)
}

// abandon lets go of all that it knows of the engine, whose worker has left the
// stream.
func (p *publisher) abandon() {
	p.repair = nil
	p.held.clear()
	p.owes, p.owed = false, 0
	p.rivals = rivals{}
	p.suspected = false
	for _, r := range p.ranks {
		p.rules.Reset(r)
	}
	p.ranks = nil
	p.forgetLife()
	p.reborn = false
	p.posted.started.Store(false)
	p.show()
}

// forgetLife makes the next batch the first of another life.
func (p *publisher) forgetLife() {
	p.seq.forget()
	p.epochKnown = false
	p.lossy, p.unheard = false, seqRange{}
	p.reborn = true
	p.doubted = false
}

// connect takes note of a new connection, which brings the worker into the stream,
// before anything is read.
func (p *publisher) connect(now time.Time) {
	p.worker.enter()
	again := p.connection > 0
	p.connected = true
	p.connection++
	p.heard = now
	p.suspected = false
	p.rivals = rivals{}
	p.resting = time.Time{}
	if !p.seq.begun || p.seq.empty {
		p.owes, p.owed = false, 0 // it may have been another life's
	}
	switch {
	case p.replay != "" && again:
		p.fetch(now, causeReconnect)
	case p.replay != "":
		p.fetch(now, causeStart)
	case again && p.seq.begun && !p.seq.empty:
		p.lose(now, seqRange{}, GapPossibleRestart)
	}
	p.show()
}

// suspect takes note that the connection seems to be dead.
func (p *publisher) suspect(now time.Time) {
	p.worker.warn(noticeSilent, now, "connection is silent, and the engine does not answer", "source", p.source, "rank", p.rank)
	p.suspected = true
	p.show()
}

// disconnect takes note that there is no connection any more.
func (p *publisher) disconnect() {
	p.connected = false
	p.show()
}

// take takes the next live batch, or what does not decode in its place.
func (p *publisher) take(in *intake, now time.Time, a *arrival) {
	p.heard = now
	if p.suspected {
		p.suspected = false
		p.show()
	}
	if last, ok := p.rivals.alone(now); ok {
		p.parted(now, last)
	}
	switch {
	case p.rivals.mixing:
		p.mixed(in, now, a)
	case !p.repairable(now) && p.mixes(a):
		p.ambiguous(in, now, a.seq)
		p.mixed(in, now, a)
	case !p.repairable(now):
		p.unrepairable(in, now, a)
	case p.repair != nil:
		p.hold(now, a)
	case !p.seq.begun:
		p.hold(now, a)
		p.fetch(now, causeStart)
	default:
		if !p.live(in, now, a) {
			p.hold(now, a)
			p.fetch(now, causeGap)
		}
	}
}

// mixes tells whether a batch is of another publisher that goes on beside the one
// read last: it goes on where seqs or epochs left off before they jumped, or runs
// backwards while the connection of before is still open.
func (p *publisher) mixes(a *arrival) bool {
	if v, _ := p.judge(a); v != verdictRestart {
		return false
	}
	if p.newLife(a.epoch) {
		return p.rivals.epochOf(a.epoch)
	}
	return p.rivals.former(a.seq) || p.rival != nil
}

// newLife tells whether a batch of this epoch says that it is of another life of the engine.
func (p *publisher) newLife(epoch []byte) bool { return p.epochKnown && string(epoch) != p.epoch }

func (p *publisher) judge(a *arrival) (verdict, seqRange) {
	return p.seq.judge(a.seq, a.print, p.newLife(a.epoch))
}

// judgeHeld is judge of a batch held back.
func (p *publisher) judgeHeld(h *held) verdict {
	v, _ := p.seq.judge(h.seq, h.print, p.newLife(h.epoch))
	return v
}

// hold keeps a live batch until those before it are there. One that does not
// decode may come whole from the replay.
func (p *publisher) hold(now time.Time, a *arrival) {
	switch {
	case a.err != nil:
		p.reject(now, a)
	case p.held.add(a, now, p.connection):
		return
	default:
		p.worker.metrics.unheld.Inc()
	}
	if due, ok := p.seq.due(); (!ok || a.seq >= due) && a.seq >= p.owed {
		p.owed, p.owes = a.seq, true
	}
}

// live takes a batch of a publisher with a replay socket as far as that goes
// without it. It tells whether the batch is done with.
func (p *publisher) live(in *intake, now time.Time, a *arrival) bool {
	switch v, missing := p.judge(a); v {
	case verdictDuplicate:
		p.worker.metrics.duplicates.Inc()
	case verdictFirst:
		if missing = p.begin(now, a.seq, missing); missing.count > 0 {
			p.lose(now, missing, GapReplayUnavailable)
		}
		p.accept(in, now, a)
	case verdictNext:
		if a.err != nil {
			return false
		}
		p.accept(in, now, a)
	case verdictGap, verdictRestart:
		// Whether the engine began anew is for its replay to say: a batch may be late, or
		// another publisher's.
		return false
	}
	return true
}

// unrepairable takes a batch of a publisher without a replay socket.
//
//  1. What the sequencer says of it is told: a duplicate ends here; of a restart
//     each rank that was heard of is told first.
//  2. What is missing is told as one Gap: the batches before it, and it as well
//     if it does not decode. After a restart the Gap is from the first seq of the
//     new life, and the ranks are incomplete as at first contact, where only that
//     is told.
//  3. What is left of it goes to the lane.
func (p *publisher) unrepairable(in *intake, now time.Time, a *arrival) {
	v, missing := p.judge(a)
	switch v {
	case verdictDuplicate:
		p.worker.metrics.duplicates.Inc()
		return
	case verdictRestart:
		p.restart(now, a)
		missing = p.begin(now, a.seq, missing)
	case verdictFirst:
		missing = p.begin(now, a.seq, missing)
	case verdictGap:
		p.rivals.succeed(p.seq.last, p.epoch)
	case verdictNext:
	}
	p.know(now, p.rankOf(now, a))
	if a.err != nil {
		p.reject(now, a)
		missing = missing.through(a.seq)
	}
	if missing.count > 0 {
		p.lose(now, missing, GapReplayUnavailable)
	}
	p.accept(in, now, a)
}

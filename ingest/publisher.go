package ingest

import (
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
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
	rank     uint32
	copyRule feed.CopyRule
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
	// identity is that of the present incarnation.
	identity identity

	// connected tells that there is a connection; connection counts them.
	connected  bool
	connection uint32
	// absent runs while there is no connection, once there was one. When the grace time
	// is over and the worker's other publishers still have theirs, the rank's blocks
	// are not to be trusted any more.
	absent *time.Timer
	// heard is when the last message came, or the connection.
	heard time.Time
	// peer is a listener's connection that it was last read by, and rival another
	// one that it was read by before and that is still open; nil where unknown.
	peer, rival *peer
	// suspected tells that it was silent, and did not answer when it was asked.
	suspected bool
	// renew lets its connection be made anew; nil where that is the engine's part.
	renew func()

	// overran runs while nothing was read since messages were dropped.
	overran *time.Timer
	// doubted tells that it was told that the engine may have begun anew, since the
	// last batch.
	doubted bool

	// replay is the endpoint of its replay socket; empty where there is none. replayAt
	// returns it for the address of a listener's peer; nil where it is configured.
	replay   string
	replayAt func(peer netip.Addr) string
	// repair is what is being fetched; nil where nothing is. Live batches are held
	// back meanwhile.
	repair *repair
	held   holding
	// owes tells that batches up to the seq owed were published that were neither
	// read nor held.
	owes bool
	owed uint64
	// replayResponsive reports whether the replay socket answered when it was asked last
	// and could be. After a repair without an answer nothing is asked until resting is
	// over.
	replayResponsive bool
	// replayAnswered reports whether the replay socket has ever answered.
	replayAnswered bool
	resting        time.Time
	rivals         rivals

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
		seq:     sequencer{start: about.Engine.FirstSeq()},
		rules:   w.rulesOf(source),
		metrics: w.shared.metrics,
		held:    holding{budget: w.shared.budgets.reordered},
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
	return p.repair != nil || p.replay != "" && !now.Before(p.resting)
}

// stop ends the reading of the publisher.
func (p *publisher) stop() {
	p.endRepair()
	p.held.clear()
	p.endAbsence()
	p.endOverrun()
	p.become(SourceStopped)
}

// forget forgets that there was such a publisher. It was stopped.
func (p *publisher) forget() {
	p.metrics.move(p.state, 0)
	p.worker.shared.board.remove(p.posted)
	p.worker.shared.budgets.sources.Release(1)
}

// abandon lets go of all that it knows of the engine, whose worker has left the
// stream.
func (p *publisher) abandon() {
	p.endRepair()
	p.held.clear()
	p.endAbsence()
	p.endOverrun()
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
	p.identity = identity{}
	p.lossy, p.unheard = false, seqRange{}
	p.reborn = true
	p.doubted = false
}

// connect takes note of a new connection, which brings the worker into the stream,
// before anything is read.
func (p *publisher) connect(now time.Time) {
	p.worker.enter()
	p.endAbsence()
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
		p.lose(now, seqRange{}, feed.GapPossibleRestart)
	}
	p.show()
}

// replayFrom has replays requested from where a peer with this address is asked.
func (p *publisher) replayFrom(peer netip.Addr) {
	if p.replayAt == nil {
		return
	}
	at := p.replayAt(peer)
	if at == p.replay {
		return
	}
	p.replay = at
	p.replayAnswered, p.replayResponsive = false, false
	p.posted.replay.Store(&at)
}

// overrunPatience is how long the next batch has to show what was dropped before it.
const overrunPatience = 5 * time.Second

// overrun has batches fetched that may have been dropped after the last one, as they
// were received faster than they could be processed. Where they can not be fetched the
// next batch shows which they are; if none comes, that something may be lost is
// reported.
func (p *publisher) overrun(now time.Time) {
	switch {
	case p.overran != nil: // nothing was read since
	case p.rivals.mixing: // its batches are not in order anyway
	case p.repair != nil:
		p.repair.overrun = true
	case p.repairable(now):
		p.fetch(now, causeGap)
	case p.seq.begun && !p.seq.empty:
		made := make(chan *time.Timer, 1)
		p.overran = time.AfterFunc(overrunPatience, func() { p.unshown(<-made) })
		made <- p.overran
	}
}

// unshown reports that something may be lost after the last batch.
func (p *publisher) unshown(timer *time.Timer) {
	p.worker.mu.Lock()
	defer p.worker.mu.Unlock()
	if p.overran == timer && !p.worker.closed && p.worker.lane != nil {
		p.lose(time.Now(), seqRange{}, feed.GapReplayUnavailable)
	}
}

func (p *publisher) endOverrun() {
	if p.overran != nil {
		p.overran.Stop()
		p.overran = nil
	}
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
	p.beginAbsence()
	p.show()
}

// beginAbsence has the rank reported as doubtful unless it is connected again within
// the grace time.
func (p *publisher) beginAbsence() {
	if p.absent != nil {
		return
	}
	made := make(chan *time.Timer, 1)
	p.absent = time.AfterFunc(p.worker.shared.grace, func() { p.overdue(<-made) })
	made <- p.absent
}

func (p *publisher) endAbsence() {
	if p.absent != nil {
		p.absent.Stop()
		p.absent = nil
	}
}

// overdue reports that the engine may have restarted: nobody hears of it any more. A
// worker none of whose publishers is connected is removed instead.
func (p *publisher) overdue(timer *time.Timer) {
	p.worker.mu.Lock()
	defer p.worker.mu.Unlock()
	if p.absent != timer || p.worker.closed || p.worker.lane == nil {
		return
	}
	if !p.worker.connected() {
		p.absent = nil
		p.beginAbsence() // the others may come back, and this one not
		return
	}
	now := time.Now()
	p.worker.log.Warn("source gone: its connection has been closed for the grace time, while the worker has others",
		"source", p.source, "rank", p.rank, "grace", p.worker.shared.grace)
	if p.seq.begun && !p.seq.empty {
		p.doubt(now)
	}
}

// take takes the next live batch, or what does not decode in its place.
func (p *publisher) take(in *intake, now time.Time, a *arrival) {
	p.heard = now
	if p.suspected {
		p.suspected = false
		p.show()
	}
	if p.heartbeat(a) {
		return
	}
	if last, ok := p.rivals.alone(now); ok {
		p.parted(now, last)
	}
	if !p.rivals.mixing && !p.identity.contradicts(a) {
		p.identity.learn(a)
	}
	switch {
	case p.rivals.mixing:
		p.mixed(in, now, a)
	case !p.repairable(now) && p.mixes(a):
		p.ambiguous(in, now, a.seq)
		p.mixed(in, now, a)
	case !p.repairable(now):
		p.unrepairable(in, now, a)
	case p.identity.contradicts(a):
		p.otherIncarnation(in, now, a)
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
	if p.identity.contradicts(a) {
		return p.rivals.formerly(a)
	}
	return p.rivals.resumes(a.seq) || p.rival != nil
}

func (p *publisher) judge(a *arrival) (verdict, seqRange) {
	return p.seq.judge(a.seq, a.print, p.identity.contradicts(a))
}

// judgeHeld is judge of a batch held back.
func (p *publisher) judgeHeld(h *held) verdict {
	v, _ := p.seq.judge(h.seq, h.print, p.identity.contradicts(&arrival{epoch: h.epoch, publisher: h.publisher}))
	return v
}

// otherIncarnation takes a live batch that names another incarnation than the one that
// is read, of a publisher with a replay socket. The batch is late if it was read
// before, or came by a connection that is closed; of a second publisher if it goes on
// beyond what was read of the incarnation before; and otherwise of an engine that
// restarted, whatever its seq.
func (p *publisher) otherIncarnation(in *intake, now time.Time, a *arrival) {
	switch {
	case !p.rivals.formerly(a):
		p.restart(now, a)
		p.endRepair() // its replies may be of either incarnation
		p.identity.learn(a)
		p.held.dropOthers(&p.identity)
		p.hold(now, a)
		p.fetch(now, causeStart)
	case a.orphaned || a.seq <= p.rivals.last:
		p.worker.metrics.stale.Inc()
	default:
		p.ambiguous(in, now, a.seq)
		p.mixed(in, now, a)
	}
}

// heartbeat reports whether a batch only says that its publisher is alive: without
// events, and with the seq of the last batch again. Only a publisher that names its
// incarnation is believed, since an engine that restarted may come to the same seq.
func (p *publisher) heartbeat(a *arrival) bool {
	return a.eventless() && len(a.publisher) > 0 &&
		p.seq.begun && !p.seq.empty && a.seq == p.seq.last && string(a.publisher) == p.identity.publisher
}

// firstHeld returns the first live batch that is held back, and drops the heartbeats
// before it: by the time their turn comes the batch whose seq they repeat was read.
func (p *publisher) firstHeld() *held {
	for {
		f := p.held.first()
		if f == nil || !f.eventless || len(f.publisher) == 0 || string(f.publisher) != p.identity.publisher ||
			!p.seq.begun || p.seq.empty || f.seq > p.seq.last {
			return f
		}
		p.held.drop()
	}
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
			p.lose(now, missing, feed.GapReplayUnavailable)
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
		p.rivals.succeed(p.seq.last, p.identity)
	case verdictNext:
	}
	p.know(now, p.rankOf(now, a))
	if a.err != nil {
		p.reject(now, a)
		missing = missing.through(a.seq)
	}
	if missing.count > 0 {
		p.lose(now, missing, feed.GapReplayUnavailable)
	}
	p.accept(in, now, a)
}

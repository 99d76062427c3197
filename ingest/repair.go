package ingest

import (
	"context"
	"errors"
	"time"

	"github.com/kvcast/kvcast/feed"
)

// repairCause is why batches are asked for.
type repairCause uint8

const (
	// causeStart: nothing of this life of the engine has been read.
	causeStart repairCause = iota + 1
	// causeGap: a live batch shows that some before it are missing.
	causeGap
	// causeReconnect: some may have been missed while there was no connection.
	causeReconnect
	// causeProbe: nothing has come for a while.
	causeProbe
)

// String returns the cause's name, as metrics label it.
func (c repairCause) String() string {
	return [...]string{causeStart: "start", causeGap: "gap", causeReconnect: "reconnect", causeProbe: "silence"}[c]
}

const (
	// maxFailures is how many asks in a row may bring nothing before what is missing
	// counts as lost. Of a replay socket that never answered they are fewer: none
	// that is silent is asked twice.
	maxFailures      = 4
	maxFirstFailures = 2
	// restTime is how long a replay socket that did not answer is left alone, so that
	// live batches are not held back for each gap in vain.
	restTime = time.Minute
	// busyRestTime is how long a replay socket is left alone that was not asked, as too
	// many others were.
	busyRestTime = 10 * time.Second
	// maxRepairTime is how long a repair may take in all, so that live batches are
	// not held back for ever by an engine whose replay never catches up.
	maxRepairTime = 2 * time.Minute
	// The wait before an ask that follows one that brought nothing. It grows fourfold.
	minRepairWait = 100 * time.Millisecond
	maxRepairWait = 10 * time.Second
)

// repair is what a publisher fetches from its engine's replay socket, from
// noticing that batches may be missing until all that can be had was read. It
// takes one or more asks, each of which is replayed from a seq to the newest:
//
//  1. Where nothing of the engine's life is known, the ask is a fresh one, from
//     its first seq. Whatever comes first is the beginning.
//  2. Otherwise it is from the last batch read, inclusive: the batch that comes
//     back must be that one. If it is another, the engine began anew: that is
//     told, and asked afresh. If later ones come first, twice the same, then the
//     engine has forgotten those between.
//  3. If nothing comes, not even the last batch, then the engine is asked from its
//     first seq: an older batch that is not as it was read shows that it began anew,
//     and one that is, that it goes on. If there is neither, it may have begun anew.
//  4. Replies must be contiguous. At a hole the ask ends, and the next one goes on
//     from there. So does one after an ask that was interrupted.
//  5. Then the live batches held back follow. They may show another hole, or
//     another life.
//  6. When maxFailures asks in a row brought nothing, what is missing is lost.
type repair struct {
	cause repairCause
	// cancel ends the request under way, and whatever it waits for.
	cancel context.CancelFunc
	// began is when it was, and since is from when on it may take maxRepairTime.
	began, since time.Time
	// fresh tells that the ask is from the first seq of a life.
	fresh bool
	// again tells that the connection was lost meanwhile, and overrun that live messages
	// were dropped.
	again, overrun bool
	// answered tells that anything ever came back.
	answered bool
	// failures are the asks in a row that brought nothing.
	failures int
	// lookback reports whether the request is to find out if the incarnation is the
	// same, and looked whether that was what the last one was for.
	lookback, looked bool
	// tolerant tells that the ask is the last one, and holes in it are losses.
	tolerant bool
	// forgotten is the first seq that came back last time instead of the one asked
	// for; 0 if none did.
	forgotten uint64
	// asks is how many asks there were, and brought how many batches were read of
	// them, those of another life included.
	asks, brought uint64

	// Of the ask under way: the connection that there was when it began, whether the
	// batch asked from was seen, how many batches came, whether they were the next
	// ones, and why it was ended.
	connection uint32
	verified   bool
	replies    uint64
	progress   bool
	ended      askEnd
}

// askEnd is why an ask was ended before its end marker.
type askEnd uint8

const (
	askOpen askEnd = iota
	// askHole: a batch is missing in it.
	askHole
	// askOtherLife: it is of another life of the engine than was read.
	askOtherLife
)

// fetch begins a repair, or lets the one under way look once more.
func (p *publisher) fetch(now time.Time, cause repairCause) {
	if p.repair != nil {
		if cause == causeReconnect {
			p.repair.again = true
			if p.repair.cause == causeProbe {
				p.repair.cause = cause
			}
		}
		return
	}
	p.repair = &repair{cause: cause, began: now, since: now, fresh: !p.seq.begun}
	p.worker.metrics.replay(cause)
	p.show()
	p.worker.fetch(p, p.repair)
}

// endRepair ends the repair under way, if there is one.
func (p *publisher) endRepair() {
	if p.repair != nil && p.repair.cancel != nil {
		p.repair.cancel()
	}
	p.repair = nil
}

// ask returns the seq to ask from.
func (p *publisher) ask(r *repair) (from uint64, ok bool) {
	if p.repair != r {
		return 0, false
	}
	r.connection, r.verified, r.replies, r.progress, r.ended = p.connection, false, 0, false, askOpen
	r.looked = false // the engine may have restarted since
	r.asks++
	r.fresh = !p.seq.begun || p.seq.empty
	p.held.mark()
	p.show()
	from = p.seq.last
	if r.fresh || r.lookback {
		from = p.seq.start
	}
	p.worker.log.Debug("asking for a replay", "source", p.source, "rank", p.rank, "cause", r.cause.String(), "from", from)
	return from, true
}

// replayed takes the next batch of an ask, and tells whether more are wanted.
func (p *publisher) replayed(in *intake, now time.Time, r *repair, a *arrival) bool {
	if p.repair != r {
		return false
	}
	r.answered = true
	r.replies++
	p.heard = now
	if p.seq.begun && !p.seq.empty && p.identity.contradicts(a) {
		r.ended = askOtherLife
		return false
	}
	switch {
	case r.lookback && !r.fresh:
		if a.seq > p.seq.last {
			break
		}
		switch {
		case p.seq.past.has(a.seq, a.print):
			r.verified = true
		case p.seq.past.knows(a.seq) || p.seq.past.outlived(a.seq):
			// An engine that went on would have let go of one so old long before the last.
			r.ended = askOtherLife
			return false
		default: // it was lost on the way
		}
		return true
	case !r.fresh && !r.verified:
		switch {
		case a.seq < p.seq.last:
			return true // not what was asked for
		case a.seq == p.seq.last:
			if p.seq.past.knows(a.seq) && !p.seq.past.has(a.seq, a.print) {
				r.ended = askOtherLife
				return false
			}
			r.verified = true
			return true
		}
	}
	due, begun := p.seq.due()
	switch {
	case !begun:
		if missing := p.begin(now, a.seq, rangeBetween(p.seq.start, a.seq)); missing.count > 0 {
			p.lose(now, missing, feed.GapReplayForgotten)
		}
	case a.seq < due:
		return true
	case r.replies == 1 && (!r.fresh || a.seq > due):
		// The batch asked from did not come.
		if r.forgotten != a.seq && !r.tolerant {
			r.forgotten, r.ended = a.seq, askHole
			return false
		}
		if p.contradicted() {
			r.ended = askOtherLife
			return false
		}
		r.verified = true
		p.lose(now, rangeBetween(due, a.seq), feed.GapReplayForgotten)
	case a.seq > due && !r.tolerant:
		r.ended = askHole
		return false
	case a.seq > due:
		p.lose(now, rangeBetween(due, a.seq), feed.GapReplayIncomplete)
	}
	r.progress = true
	r.brought++
	p.worker.metrics.replayed.Inc()
	if a.err != nil {
		p.reject(now, a)
		p.lose(now, seqRange{}.through(a.seq), feed.GapReplayIncomplete)
	}
	p.accept(in, now, a)
	return true
}

// asked takes the end of an ask. Without an error it came to its end marker, or
// replayed ended it. It tells whether to ask again, and after how long.
func (p *publisher) asked(in *intake, now time.Time, r *repair, err error) (wait time.Duration, again bool) {
	if p.repair != r {
		return 0, false
	}
	r.answered = r.answered || err == nil
	switch {
	case errors.Is(err, errReplayBusy):
	case r.replies > 0 || err == nil:
		p.replayResponsive, p.replayAnswered = true, true
	case errors.Is(err, errReplaySilent):
		p.replayResponsive = false // it shares the slots of those that never answered
	}
	if err != nil && !errors.Is(err, errReplayYielded) {
		p.worker.warn(noticeReplay, now, "replay failed", "source", p.source, "rank", p.rank, "endpoint", p.replay, "error", err)
	}
	switch {
	case err != nil || r.ended != askOpen:
	case r.lookback && !r.fresh:
		if !r.verified {
			// It has nothing that was read before, where an engine that goes on would
			// remember its last batch.
			p.doubt(now)
		}
		r.lookback, r.looked = false, true
	case !r.fresh && !r.looked && r.replies == 0 && p.contradicted():
		r.ended = askOtherLife
	case !r.fresh && !r.looked && r.replies == 0:
		r.lookback = true
		return 0, true
	case !p.seq.begun:
		p.seq.open()
	}
	if r.ended == askOtherLife {
		p.worker.warn(noticeRestart, now, "engine restarted, as its replay shows", "source", p.source, "rank", p.rank, "seq", p.seq.last)
		p.restarted(now)
		again := r.again
		r.restart(r.since)
		r.fresh, r.again = true, again
		p.show()
		return 0, true
	}
	before := len(p.held.batches)
	whole := err == nil && r.ended == askOpen
	if whole {
		p.dropStale(r.connection)
	}
	if r.fresh || r.verified || r.looked && whole {
		p.drain(in, r) // else they may be of another life
	}
	if p.repair != r {
		return 0, false
	}
	// An engine that only repeats the last batch, and says no end, has no more.
	silent := errors.Is(err, errReplaySilent)
	complete := (err == nil || silent && r.verified && !r.progress && p.caughtUp()) && r.ended == askOpen
	switch {
	case complete && p.caughtUp() && (r.again || r.overrun):
		r.restart(now)
		return 0, true
	case complete && p.caughtUp():
		p.repaired(now, r)
		return 0, false
	case r.progress || len(p.held.batches) < before:
		r.failures = 0
	case errors.Is(err, errReplayYielded): // for others' sake
	default:
		r.failures++
	}
	if r.cause == causeProbe && p.gapNoticed() {
		r.cause = causeGap
	}
	enough := r.failures >= maxFailures || now.Sub(r.since) > maxRepairTime || !r.answered && r.cause == causeProbe ||
		!p.replayAnswered && (r.failures >= maxFirstFailures || errors.Is(err, errReplaySilent)) ||
		errors.Is(err, errReplayBusy) || p.replay == ""
	if enough && (errors.Is(err, errReplayBusy) || r.tolerant || r.ended != askHole) {
		return p.giveUp(in, now, r, err)
	}
	r.tolerant = enough
	if r.ended == askHole {
		p.worker.inform(noticeReplayAgain, now, "replay has a hole: asking again", "source", p.source, "rank", p.rank,
			"last_seq", p.seq.last, "brought", r.brought)
	}
	if r.failures == 0 || r.tolerant {
		return 0, true
	}
	return jitter(repairWait(r.failures)), true
}

// restart has a repair that was answered begin anew; it remains one for the log.
func (r *repair) restart(since time.Time) {
	*r = repair{cause: r.cause, cancel: r.cancel, began: r.began, since: since, answered: true, asks: r.asks, brought: r.brought}
}

// repairWait is how long to wait after so many failures.
func repairWait(failures int) time.Duration {
	wait := minRepairWait
	for range failures - 1 {
		wait = min(4*wait, maxRepairWait)
	}
	return wait
}

// caughtUp tells that nothing is missing as far as is known.
func (p *publisher) caughtUp() bool {
	due, ok := p.seq.due()
	return p.seq.begun && p.firstHeld() == nil && (!p.owes || !ok || due > p.owed)
}

// gapNoticed reports whether a live batch has shown that batches before it are missing.
func (p *publisher) gapNoticed() bool {
	f := p.firstHeld()
	return p.owes || f != nil && p.judgeHeld(f) == verdictGap
}

// dropStale drops the live batches held back that came by a connection before the
// one that a complete ask was made with, except those that were read meanwhile: had
// they been of the life that was replayed, they would have come by that.
func (p *publisher) dropStale(connection uint32) {
	for f := p.firstHeld(); f != nil && f.connection < connection; f = p.firstHeld() {
		if p.judgeHeld(f) == verdictDuplicate {
			p.worker.metrics.duplicates.Inc()
		} else {
			p.worker.metrics.stale.Inc()
		}
		p.held.drop()
	}
}

// drain takes the live batches that were held back, as far as it goes without
// those that are missing, and those that came by a connection before that of the
// ask. What came before the ask, and contradicts a life that it has shown to go on,
// is not of it: a batch from before the engine began anew, that came late, or of
// another engine. What came since may be of the next life: the next ask tells.
func (p *publisher) drain(in *intake, r *repair) {
	for f := p.firstHeld(); f != nil && f.connection >= r.connection && p.seq.begun; f = p.firstHeld() {
		if r.verified && p.held.marked > 0 && p.judgeHeld(f) == verdictRestart {
			p.worker.metrics.stale.Inc()
			p.held.drop()
			continue
		}
		a := f.arrival(in)
		if !p.live(in, f.at, &a) {
			return
		}
		p.held.drop()
	}
}

// trust takes the live batches that were held back by what they say themselves, up
// to a gap.
func (p *publisher) trust(in *intake) {
	for f := p.firstHeld(); f != nil && p.judgeHeld(f) != verdictGap; f = p.firstHeld() {
		a, at := f.arrival(in), f.at
		p.held.drop()
		p.unrepairable(in, at, &a)
	}
}

// contradicted tells whether the first live batch held back can not be of the life
// that was read.
func (p *publisher) contradicted() bool {
	f := p.firstHeld()
	return f != nil && p.judgeHeld(f) == verdictRestart
}

// arrival returns a batch held back as it came.
func (h *held) arrival(in *intake) arrival {
	return newArrival(&in.decoder, h.epoch, h.seq, h.payload)
}

// repaired ends a repair that brought all there is.
func (p *publisher) repaired(now time.Time, r *repair) {
	p.worker.metrics.replaysDone.Inc()
	if r.brought > 0 {
		p.worker.inform(noticeReplayDone, now, "replay done", "source", p.source, "rank", p.rank, "cause", r.cause.String(),
			"batches", r.brought, "asks", r.asks, "took", now.Sub(r.began))
	}
	if r.cause == causeProbe && r.progress && p.renew != nil {
		// What was published did not come by the connection, which must be dead.
		p.worker.warn(noticeSilent, now, "connection renewed: it was silent while the engine was not", "source", p.source, "rank", p.rank)
		p.renew()
	}
	p.suspected = false
	p.owes, p.owed = false, 0
	p.endRepair()
	p.show()
}

// doubt tells that the engine may have begun anew, once for as long as nothing new
// is heard of it.
func (p *publisher) doubt(now time.Time) {
	if !p.doubted {
		p.doubted = true
		p.lose(now, seqRange{}, feed.GapPossibleRestart)
	}
}

// giveUp tells what could not be had, and goes on with what was held. Where that
// shows that more is missing, another repair follows.
func (p *publisher) giveUp(in *intake, now time.Time, r *repair, err error) (wait time.Duration, again bool) {
	p.worker.metrics.replaysFailed.Inc()
	why := feed.GapReplayIncomplete
	if !r.answered {
		why = feed.GapReplayUnavailable
		switch {
		case errors.Is(err, errReplayBusy):
			p.resting = now.Add(busyRestTime)
		case r.cause != causeProbe:
			p.resting = now.Add(restTime)
		}
	}
	if r.answered {
		p.dropStale(r.connection)
	}
	next, wanted := p.owed+1, p.owes
	if f := p.firstHeld(); f != nil {
		next, wanted = f.seq, true
	}
	if p.seq.empty {
		p.seq.forget() // the first batch is the beginning all the same
	}
	if p.seq.begun && (r.cause == causeReconnect || r.again) {
		p.doubt(now) // whoever is connected now was not asked
	}
	switch due, begun := p.seq.due(); {
	case !wanted && r.cause == causeProbe:
		p.suspect(now)
		if p.renew != nil {
			p.renew()
		}
	case !wanted && begun:
		p.doubt(now)
	case !wanted && !begun:
		// Whatever comes first will be the beginning.
		p.endRepair()
		p.show()
		return 0, false
	case wanted && !begun:
		if missing := p.begin(now, next, rangeBetween(p.seq.start, next)); missing.count > 0 {
			p.lose(now, missing, why)
		}
	case wanted && due < next:
		p.lose(now, rangeBetween(due, next), why)
	}
	if p.firstHeld() == nil {
		p.owes, p.owed = false, 0
	}
	p.trust(in)
	if p.repair != r {
		return 0, false
	}
	if p.caughtUp() || !wanted {
		p.endRepair()
		p.show()
		return 0, false
	}
	*r = repair{cause: causeGap, cancel: r.cancel, since: now, fresh: !p.seq.begun, again: r.again}
	p.show()
	return 0, true
}
